"""Stopping criteria, under the names they have in transformers."""

from __future__ import annotations

from jaxllm.generation.stopping.criteria import (
    EosTokenCriteria,
    HostCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

__all__ = [
    "EosTokenCriteria",
    "HostCriteria",
    "MaxLengthCriteria",
    "MaxTimeCriteria",
    "StopStringCriteria",
    "StoppingCriteria",
    "StoppingCriteriaList",
]
