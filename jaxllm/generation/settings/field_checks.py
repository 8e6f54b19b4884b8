"""What values of fields may be: each check returns the stored form, or raises BadValueError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from jaxllm.generation.inputs.values import Number, id_list, inside, is_integer, is_traced, plain


class BadValueError(ValueError):
    """What a value should have been; the caller adds the field's name and the value."""


def number(interval: str) -> Callable[[Number | None], float]:
    """A real number of the interval, stored as a float; a tracer is let through."""

    def check(value: Any) -> Any:
        if is_traced(value):
            return value
        value = plain(value)
        if not (is_integer(value) or isinstance(value, float)) or not inside(interval, value):
            raise BadValueError(f"a number in {interval}")
        try:
            return float(value)
        except OverflowError:  # an integer beyond all floats
            raise BadValueError(f"a number in {interval}") from None

    return check


def integer(least: int) -> Callable[[int | np.integer | Array | None], int]:
    """An integer of at least ``least``; a tracer is let through."""

    def check(value: Any) -> Any:
        if is_traced(value):
            return value
        value = plain(value)
        if not is_integer(value) or not least <= value <= np.iinfo(np.int32).max:
            raise BadValueError(f"an integer of at least {least}")
        return int(value)

    return check


def boolean(value: Any) -> bool:
    """True or False. A tracer is refused: it would have to decide what the program is."""
    value = plain(value)
    if not isinstance(value, bool):
        raise BadValueError("true or false")
    return value


def choice(*values: Any) -> Callable[[Any], Any]:
    """One of a few values."""

    def check(value: Any) -> Any:
        if not any(value is known or (value == known) is True for known in values):
            raise BadValueError("one of " + ", ".join(map(repr, values)))
        return value

    return check


def token_ids(value: Any) -> tuple[int, ...]:
    """A list of token ids, stored as a tuple."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadValueError("a list of token ids")
    try:
        return tuple(integer(0)(item) for item in value)
    except BadValueError:
        raise BadValueError("a list of token ids") from None


def token_id_or_ids(value: Any) -> Any:
    """A token id, or a list of them stored as a tuple; a tracer is let through."""
    if is_traced(value):
        return value
    ids: Any = id_list(value) if isinstance(value, np.ndarray) else value
    if isinstance(plain(ids), int):
        return integer(0)(ids)
    result = token_ids(ids)
    if not result:
        raise BadValueError("a token id or a non-empty list of them")
    return result


def layers(value: Any) -> Any:
    """ "low", "high", or a non-empty list of layers stored as a tuple."""
    if isinstance(value, str) and value in ("low", "high"):
        return value
    try:
        result = token_ids(value)
    except BadValueError:
        result = ()
    if not result:
        raise BadValueError("'low', 'high' or a non-empty list of layers")
    return result


def words(value: Any) -> tuple[tuple[int, ...], ...]:
    """A non-empty list of non-empty lists of token ids."""
    try:
        result = tuple(token_ids(word) for word in value)
    except (BadValueError, TypeError):
        result = ()
    if isinstance(value, str) or not result or not all(result):
        raise BadValueError("a non-empty list of non-empty lists of token ids")
    return result


def biases(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """A mapping from tuples of ids to numbers, or a list of [ids, number], stored as pairs."""
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        result = {token_ids(ids): number("[-inf, inf]")(bias) for ids, bias in pairs}
    except (BadValueError, TypeError, ValueError):
        result = {}
    if not result or not all(result):
        raise BadValueError("a map from tuples of token ids to numbers, or a list of [ids, number]")
    return tuple(result.items())


def decay(value: Any) -> tuple[int, float]:
    """A pair (start, factor); either may be a tracer."""
    try:
        start, factor = value
        return integer(0)(start), number("(0, inf)")(factor)
    except (BadValueError, TypeError, ValueError):
        raise BadValueError("a pair (start, factor) with start >= 0 and factor > 0") from None


def strings(value: Any) -> tuple[str, ...]:
    """A string or a list of strings."""
    result = (value,) if isinstance(value, str) else value
    if not isinstance(result, Sequence) or not all(isinstance(s, str) and s for s in result):
        raise BadValueError("a non-empty string or a list of them")
    return tuple(result)


def options(value: Any) -> dict[str, Any]:
    """A map from names to values."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise BadValueError("a map from names to values")
    return {name: plain(item) for name, item in value.items()}


def anything(value: Any) -> Any:
    """Not looked at."""
    return value
