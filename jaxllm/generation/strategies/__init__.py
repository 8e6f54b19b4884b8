"""Decoding strategies: greedy search, sampling, contrastive search, DoLa, beams, drafts.

`Strategy` is what the decode loop runs; `select_strategy.py` chooses one for a call.
"""

from jaxllm.generation.strategies.assisted import Assisted
from jaxllm.generation.strategies.beam_search import BeamSearch
from jaxllm.generation.strategies.constrained_beam import ConstrainedBeamSearch
from jaxllm.generation.strategies.contrastive import Contrastive
from jaxllm.generation.strategies.dola import DoLa
from jaxllm.generation.strategies.group_beam import GroupBeamSearch
from jaxllm.generation.strategies.sample import Sample
from jaxllm.generation.strategies.strategy import DecodeSettings, PrefillInputs, Result, Strategy

__all__ = [
    "Assisted",
    "BeamSearch",
    "ConstrainedBeamSearch",
    "Contrastive",
    "DecodeSettings",
    "DoLa",
    "GroupBeamSearch",
    "PrefillInputs",
    "Result",
    "Sample",
    "Strategy",
]
