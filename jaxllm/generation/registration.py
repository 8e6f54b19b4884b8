"""Registration hooks: adds strategies and prompt transforms without a change to `generate()`.

A module registers what it adds when it is imported. The tables stand beside the code that reads
them: `strategies.select_strategy.REGISTERED_STRATEGIES` and `call.prompts.PROMPT_TRANSFORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.generation.call.prompts import PROMPT_TRANSFORMS, PromptTransform
from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.strategies.select_strategy import (
    REGISTERED_STRATEGIES,
    Call,
    RegisteredStrategy,
)
from jaxllm.generation.strategies.strategy import Strategy


def register_strategy(
    name: str, selects: Callable[[Call], bool], build: Callable[[Call], Strategy[Any]]
) -> None:
    """Adds a generation strategy. Registered strategies are asked before the built-in ones.

    Args:
        name: for messages; a second registration under the same name replaces the first.
        selects: whether the settings of a call ask for this strategy. The first registered
            strategy that says yes is taken.
        build: makes the strategy of a call; raises `InputError` or `UnsupportedError` for settings
            that contradict it.

    >>> from jaxllm.generation.strategies.sample import Sample
    >>> def asks_for_typical(call):
    ...     return call.config.typical_p is not None and call.config.do_sample
    >>> register_strategy("typical", asks_for_typical, lambda call: Sample(sampling=True))
    >>> REGISTERED_STRATEGIES.pop("typical").name
    'typical'
    """
    REGISTERED_STRATEGIES[name] = RegisteredStrategy(name, selects, build)


def register_prompt_transform(field: str, transform: PromptTransform) -> None:
    """Adds a change of the prompt before generation, in calls where `field` is set.

    Args:
        field: a field of `GenerationConfig`.
        transform: `(model, tokenizer, input_ids, attention_mask) -> (input_ids, attention_mask)`,
            on the host. The call must have a tokenizer, and no other inputs beside `input_ids`.

    Raises:
        ValueError: `GenerationConfig` has no such field.
    """
    if field not in FIELDS:
        raise ValueError(f"register_prompt_transform: GenerationConfig has no field {field!r}")
    PROMPT_TRANSFORMS[field] = transform
