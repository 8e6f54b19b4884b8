"""Decoding strategies: greedy search, sampling, contrastive search, DoLa, beams, drafts.

`strategy.Strategy` is what the decode loop runs; `select_strategy.py` chooses one for a call.
Modules that add a strategy import what they need from `jaxllm.generation.registration`.
"""
