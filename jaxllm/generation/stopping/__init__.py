"""Stopping criteria, under the names they have in transformers."""

from __future__ import annotations

from jaxllm.generation.stopping.base import StoppingCriteria, StoppingCriteriaList
from jaxllm.generation.stopping.criteria import (
    EosTokenCriteria,
    HostCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
)
from jaxllm.generation.stopping.stop_strings import StopStringCriteria

__all__ = [
    "EosTokenCriteria",
    "HostCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
]
