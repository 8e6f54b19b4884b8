"""Decoding strategies: greedy search, sampling, contrastive search, DoLa, beams, drafts."""
