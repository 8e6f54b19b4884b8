"""From generation settings to the strategy that they ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.errors import UnsupportedError
from jaxllm.generation.assistants import assisted, drafts_asked_for
from jaxllm.generation.config import GenerationConfig, generation_mode
from jaxllm.generation.sample import Sample
from jaxllm.generation.strategy import Strategy


@dataclasses.dataclass(frozen=True)
class Call:
    """What is known on the host when the strategy is chosen."""

    model: Any
    config: GenerationConfig
    eos: tuple[int, ...]
    batch: int
    start_len: int
    """Columns of the prompt, padding included."""
    until: int
    """`max_length`."""
    arguments: Mapping[str, Any]
    """Arguments of generate() that a strategy reads, such as `assistant_model`."""


def _sample(call: Call) -> Strategy[Any]:
    config = call.config
    return Sample(sampling=bool(config.do_sample), count=config.num_return_sequences)


def _assisted(call: Call) -> Strategy[Any]:
    assistant = call.arguments.get("assistant_model")
    return assisted(
        call.model, call.config, assistant, new=call.until - call.start_len, until=call.until
    )


MODES: Mapping[str, Callable[[Call], Strategy[Any]]] = {
    "greedy_search": _sample,
    "sample": _sample,
    "assisted_generation": _assisted,
}


def choose_strategy(call: Call) -> Strategy[Any]:
    """The strategy of a call, by the rule of transformers (`generation_mode`)."""
    assistant = call.arguments.get("assistant_model")
    mode = generation_mode(call.config, assistant)
    asked = drafts_asked_for(call.config, assistant)
    if asked and mode != "assisted_generation":
        raise UnsupportedError(
            f"{asked[0]}: drafts go with greedy search and sampling alone, and these settings ask "
            f"for {mode} (transformers would leave the draft out); drop one of the two"
        )
    return MODES[mode](call)
