"""Registration hooks: add strategies, processors and prompt transforms to `generate()`.

A module registers its additions when it is imported; docs/extending.md has examples. Also exported
from here is what such a module builds on: `Strategy` and `Sample` to subclass, `store` and
`float_leaf` for the numbers of a processor, the `History` it reads, checks for a `Field`.

The tables are next to the code that reads them: `strategies.select_strategy.REGISTERED_STRATEGIES`,
`processors.build.REGISTERED` and `request.PROMPT_TRANSFORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from jaxllm.generation.inputs.values import boolean, float_leaf, int_leaf, integer, number
from jaxllm.generation.processors.base import History, store
from jaxllm.generation.processors.build import REGISTERED, Builder, ProcessorInputs
from jaxllm.generation.request import PROMPT_TRANSFORMS, PromptTransform
from jaxllm.generation.request import Request as Call
from jaxllm.generation.settings.config import FIELDS, declare_field
from jaxllm.generation.settings.fields import Condition, Field
from jaxllm.generation.strategies.sample import Sample, SampleState
from jaxllm.generation.strategies.select_strategy import (
    REGISTERED_STRATEGIES,
    RegisteredStrategy,
)
from jaxllm.generation.strategies.strategy import (
    AnyStrategy,
    DecodeSettings,
    PrefillInputs,
    Result,
    Strategy,
)
from jaxllm.generation.strategies.token_choice import choose_greedy, choose_sample

__all__ = [
    "Call",
    "Condition",
    "DecodeSettings",
    "Field",
    "History",
    "PrefillInputs",
    "ProcessorInputs",
    "Result",
    "Sample",
    "SampleState",
    "Strategy",
    "boolean",
    "choose_greedy",
    "choose_sample",
    "declare_field",
    "float_leaf",
    "int_leaf",
    "integer",
    "number",
    "register_processor",
    "register_prompt_transform",
    "register_strategy",
    "store",
]


def register_strategy(
    name: str,
    selects: Callable[[Call], bool],
    build: Callable[[Call], AnyStrategy],
    *,
    modes: tuple[str, ...] = ("greedy_search", "sample"),
) -> None:
    """Adds a generation strategy. Registered strategies are tried before the built-in ones. In the
    batch engine their rows run in static batches of one row.

    Args:
        name: used in messages; a second registration under the same name replaces the first.
        selects: returns True if the settings of a call ask for this strategy. The first registered
            strategy that returns True is used.
        build: creates the strategy of a call; raises `InputError` or `UnsupportedError` for
            settings that contradict it.
        modes: generation modes that it replaces; settings that ask for another, such as beams,
            raise `UnsupportedError`.

    >>> def asks_for_typical(call):
    ...     return call.config.typical_p is not None and call.config.do_sample
    >>> register_strategy("typical", asks_for_typical, lambda call: Sample(sampling=True))
    >>> REGISTERED_STRATEGIES.pop("typical").name
    'typical'
    """
    REGISTERED_STRATEGIES[name] = RegisteredStrategy(name, selects, build, modes)


def register_processor(
    name: str,
    build: Builder,
    *,
    field: Field | None = None,
    place: Literal["penalties", "last"] = "penalties",
) -> None:
    """Adds a logits processor that a generation field enables.

    It is part of every call in which the field has an effect or was given in code, in every
    strategy. Rows with it run in the slots of the batch engine unless the field has `slots=False`.

    Args:
        name: the field; a second registration under the same name replaces the first.
        build: `(value, inputs) -> processor`, from the field's value and
            `processors.build.ProcessorInputs`; None if the value needs no processor.
        field: declares a new field. None: `GenerationConfig` already has it.
        place: "penalties": before the caller's own processors and the sampling filters; "last":
            after them.

    Raises:
        ValueError: `GenerationConfig` has no such field, or `field` has the name of a built-in one.
    """
    if field is not None:
        declare_field(name, field)
    elif name not in FIELDS:
        raise ValueError(f"register_processor: GenerationConfig has no field {name!r}; give field=")
    for builders in REGISTERED.values():
        builders.pop(name, None)
    REGISTERED[place][name] = build


def register_prompt_transform(field: str, transform: PromptTransform) -> None:
    """Adds a function that changes the prompt before generation, in calls where `field` is set.

    Args:
        field: a field of `GenerationConfig`.
        transform: `(model, tokenizer, input_ids, attention_mask) -> (input_ids, attention_mask)`,
            on the host. The call must have a tokenizer, and no other inputs than `input_ids`.

    Raises:
        ValueError: `GenerationConfig` has no such field.
    """
    if field not in FIELDS:
        raise ValueError(f"register_prompt_transform: GenerationConfig has no field {field!r}")
    PROMPT_TRANSFORMS[field] = transform
