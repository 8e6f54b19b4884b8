"""Assisted (speculative) generation: drafts, acceptance and the strategy."""
