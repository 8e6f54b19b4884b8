"""Checks of config fields: types, sizes, rates. Each raises ConfigError, naming the field."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeGuard

import numpy as np

from jaxllm.common.errors import ConfigError, UnsupportedError, quoted

MAX_LAYERS = 4096
MAX_SIZE = 2**26
FULL, SLIDING = "full_attention", "sliding_attention"
"""Entries of `layer_types`."""


def coerce(key: str, value: object, hint: object) -> Any:
    """Converts a value to the annotated type, or raises ConfigError. Integers pass as floats."""
    if isinstance(value, np.generic):
        value = value.item()
    for option in _options(hint):
        if option is type(None) and value is None:
            return None
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and is_float32_number(value):
            return float(value)
        if option is str and isinstance(value, str):
            return value
        if (
            typing.get_origin(option) is tuple
            and isinstance(value, list | tuple)
            and None not in value
        ):
            inner = typing.get_args(option)[0]
            return tuple(coerce(key, v, inner) for v in value)
        if dataclasses.is_dataclass(option) and isinstance(value, option):  # the RoPE
            return value
    if value is None:  # null in a file: not set
        return None
    raise ConfigError(f"{key}: expected {spelled(hint)}, found {quoted(value)}")


def _options(hint: object) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def spelled(hint: object) -> str:
    """A type in words, without None."""
    options = [option for option in _options(hint) if option is not type(None)]
    return " or ".join(getattr(option, "__name__", str(option)) for option in options)


def is_float32_number(value: object) -> TypeGuard[float]:
    """True for numbers in the range of float32; JSON integers can have any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def check_size(config: object, *names: str, limit: int = MAX_SIZE) -> None:
    """Checks that each named field is an integer in 1..limit."""
    for name in names:
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"{name}: expected 1 to {limit}, found {quoted(value)}")


def check_rate(config: object, *names: str) -> None:
    """Checks that each named field is a probability below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}: expected 0 <= rate < 1, found {quoted(value)}")


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}: expected a number > 0, found {quoted(value)}")


def check_no_layerdrop(config: object, *names: str) -> None:
    """Checks that LayerDrop, which is not implemented, is off."""
    for name in names:
        value = getattr(config, name)
        if value:
            raise UnsupportedError(
                f"{name}: LayerDrop is not implemented, found {value}; it acts in training only, "
                "so 0 gives the same answers"
            )


def check_divides(config: object, whole: str, part: str) -> None:
    a, b = getattr(config, whole), getattr(config, part)
    if a % b:
        raise ConfigError(f"{whole}: {a} is not a multiple of {part}, {b}")


def check_layer_types(types: tuple[str, ...] | None, layers: int) -> None:
    """Checks that `layer_types`, if set, names full or sliding attention for each layer."""
    if types is None:
        return
    if len(types) != layers:
        raise ConfigError(f"layer_types: {len(types)} layers, but num_hidden_layers is {layers}")
    for name in types:
        if name not in (FULL, SLIDING):
            raise UnsupportedError(
                f"layer_types: expected {FULL} or {SLIDING}, found {quoted(name)}"
            )
