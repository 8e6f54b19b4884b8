"""From generation settings to the criteria that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.arguments import needed_tokenizer
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping.base import StoppingCriteriaList
from jaxllm.generation.stopping.criteria import MaxTimeCriteria
from jaxllm.generation.stopping.stop_strings import StopStringCriteria


def build_criteria(
    config: GenerationConfig, arguments: Mapping[str, Any]
) -> tuple[StoppingCriteriaList, tuple[MaxTimeCriteria, ...]]:
    """The criteria of the compiled loop, and the clocks that only the host can read."""
    given = arguments.get("stopping_criteria")
    given = [] if given is None else given
    if not isinstance(given, list | tuple) or not all(map(callable, given)):
        raise InputError(f"stopping_criteria: expected a list of callables, found {given!r}")
    clocks = [c for c in given if isinstance(c, MaxTimeCriteria)]
    if config.max_time is not None:
        clocks.insert(0, MaxTimeCriteria(config.max_time))
    stops = [c for c in given if not isinstance(c, MaxTimeCriteria)]
    if config.stop_strings is not None:
        tokenizer = needed_tokenizer(arguments, "stop_strings")
        stops.insert(0, StopStringCriteria(tokenizer, list(config.stop_strings)))
    return StoppingCriteriaList(stops), tuple(clocks)
