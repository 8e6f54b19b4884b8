"""Beam search: plain, sampled, diverse (groups) and constrained."""

from jaxllm.generation.strategies.beam.beam_search import BeamSearch, BeamStrategy
from jaxllm.generation.strategies.beam.constrained_beam import (
    ConstrainedBeamSearch,
    DisjunctiveConstraint,
    PhrasalConstraint,
)
from jaxllm.generation.strategies.beam.group_beam import GroupBeamSearch

__all__ = [
    "BeamSearch",
    "BeamStrategy",
    "ConstrainedBeamSearch",
    "DisjunctiveConstraint",
    "GroupBeamSearch",
    "PhrasalConstraint",
]
