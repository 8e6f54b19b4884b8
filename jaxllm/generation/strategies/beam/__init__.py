"""Beam search: plain, sampled, diverse (groups) and constrained."""
