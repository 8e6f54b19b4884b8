"""Decoding strategies: greedy search, sampling, contrastive search, DoLa, beams, drafts.

`strategy.Strategy` is what the decode loop runs; `generation/registration.py` chooses one for a
call. Modules that add a strategy import what they need from there.
"""
