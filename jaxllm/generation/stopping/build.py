"""Builds stopping criteria from generation settings."""

from __future__ import annotations

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.arguments import CallArguments, needed_tokenizer
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping.base import StoppingCriteriaList
from jaxllm.generation.stopping.criteria import MaxTimeCriteria
from jaxllm.generation.stopping.stop_strings import StopStringCriteria


def build_criteria(
    config: GenerationConfig, arguments: CallArguments
) -> tuple[StoppingCriteriaList, tuple[MaxTimeCriteria, ...]]:
    """Builds the criteria of the compiled loop, and the time limits that the host checks."""
    criteria = arguments.stopping_criteria
    criteria = [] if criteria is None else criteria
    if not isinstance(criteria, list | tuple) or not all(map(callable, criteria)):
        raise InputError(f"stopping_criteria: expected a list of callables, found {criteria!r}")
    clocks = [c for c in criteria if isinstance(c, MaxTimeCriteria)]
    if config.max_time is not None:
        clocks.insert(0, MaxTimeCriteria(config.max_time))
    stops = [c for c in criteria if not isinstance(c, MaxTimeCriteria)]
    if config.stop_strings is not None:
        tokenizer = needed_tokenizer(arguments.tokenizer, "stop_strings")
        stops.insert(0, StopStringCriteria(tokenizer, list(config.stop_strings)))
    return StoppingCriteriaList(stops), tuple(clocks)
