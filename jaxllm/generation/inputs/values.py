"""Checks the caller's numbers and token ids on the host; converts them to arrays of fixed dtype.

A number that becomes a leaf of a compiled program always has the same dtype (float32 or int32),
whether it was a Python number, a NumPy scalar or a tracer; otherwise changing it would compile
again. Concrete values are checked; the values of tracers are not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.models.input_checks import is_traced

Number: TypeAlias = float | int | np.generic | Array
TokenIds: TypeAlias = int | Sequence[int] | np.ndarray | Array
HostArray: TypeAlias = Any
"""A NumPy array, or a tracer inside the caller's jit. Any for type checkers, since it is a leaf of
pytrees whose fields are declared as JAX arrays."""

NO_TOKEN = -1
"""Padding value for tables of token ids; not a valid token."""
_SMALLEST_ID_TABLE = 8


def in_interval(interval: str, value: float) -> bool:
    """Returns whether ``value`` is in an interval such as "(0, 1]"; ``inf`` means no bound.

    >>> in_interval("(0, 1]", 1.0), in_interval("(0, 1]", 0.0), in_interval("[0, inf)", 7)
    (True, False, True)
    """
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value > low or (value == low and interval[0] == "[")
    below = value < high or (value == high and interval[-1] == "]")
    return above and below


def any_traced(*values: object) -> bool:
    """Returns whether any leaf of the pytrees is a tracer."""
    return any(is_traced(leaf) for leaf in jax.tree.leaves(values))


def to_scalar(value: Any) -> Any:
    """Converts NumPy scalars and concrete 0-d arrays to Python numbers; leaves others unchanged."""
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or is_traced(value):
        return value
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)  # of random numbers: no number
    return value if value.ndim or is_key else value.item()


def is_integer(value: object) -> bool:
    """Returns whether ``value`` has an integer type; booleans do not count."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether ``value`` is a Python or NumPy integer or float; booleans do not count."""
    return is_integer(value) or isinstance(value, float | np.floating)


def float_leaf(owner: str, name: str, value: Number, interval: str) -> Float[Array, ""]:
    """Converts ``value`` to a float32 scalar; checks the interval unless it is a tracer.

    Raises:
        InputError: it is not a number in the interval; the message names ``owner`` and ``name``.
    """
    if is_traced(value):
        return jnp.asarray(value, jnp.float32)
    number = to_scalar(value)
    if not is_number(number) or not in_interval(interval, number):
        raise InputError(
            f"{owner}: `{name}` must be a number in {interval}, but is {quoted(value)}"
        )
    return np.float32(number)  # pyright: ignore[reportReturnType]  (a leaf like any other)


def int_leaf(owner: str, name: str, value: object, *, least: int = 0) -> Int[Array, " ..."]:
    """Converts ``value`` to int32: a scalar, or one number per row of the batch (shape ``[B]``).

    Raises:
        InputError: it is not an integer of at least ``least``.
    """
    if is_traced(value):
        return jnp.asarray(value, jnp.int32)
    number = to_scalar(value)
    if isinstance(number, np.ndarray | jax.Array):
        numbers = np.asarray(number)
        good = numbers.ndim == 1 and numbers.dtype.kind in "iu" and (numbers >= least).all()
    else:
        numbers = number
        good = is_integer(number) and least <= number <= np.iinfo(np.int32).max
    if not good:
        raise InputError(
            f"{owner}: `{name}` must be an integer of at least {least}, but is {quoted(value)}"
        )
    return np.asarray(numbers, np.int32)  # pyright: ignore[reportReturnType]


def int_rows(owner: str, name: str, value: object, *, least: int = 0) -> Int[Array, " R"]:
    """:func:`int_leaf` with a row axis: one number for all rows, or one per row."""
    leaf = int_leaf(owner, name, value, least=least)
    return leaf if leaf.ndim else leaf[None]


def id_list(value: TokenIds) -> list[int] | Array:
    """Flattens one id or several to a list; a traced value becomes a 1-d array."""
    if is_traced(value):
        return jnp.ravel(jnp.asarray(value))
    return [to_scalar(item) for item in np.ravel(np.asarray(value, dtype=object))]


def id_table(owner: str, name: str, value: TokenIds) -> Int[Array, "1 E"]:
    """Converts token ids to int32, padded with ``NO_TOKEN`` to 8, 16, 32, ... entries. The row
    axis of the table has size 1, since all rows share the ids.

    The bucket avoids compiling again when the number of ids changes slightly.

    Raises:
        InputError: an item is not an int32 of at least 0.
    """
    ids = id_list(value)
    if isinstance(ids, list):
        for item in ids:
            if not is_integer(item) or not 0 <= item <= np.iinfo(np.int32).max:
                raise InputError(f"{owner}: `{name}` must hold token ids, but holds {quoted(item)}")
        table = np.full((1, bucket(len(ids), _SMALLEST_ID_TABLE)), NO_TOKEN, np.int32)
        table[0, : len(ids)] = ids
        return table  # pyright: ignore[reportReturnType]
    missing = bucket(ids.size, _SMALLEST_ID_TABLE) - ids.size
    return jnp.pad(ids.astype(jnp.int32), (0, missing), constant_values=NO_TOKEN)[None]


def bucket(size: int, smallest: int) -> int:
    """Smallest ``smallest * 2**n`` that is at least ``size``.

    >>> bucket(3, 8), bucket(9, 8), bucket(16, 8)
    (8, 16, 16)
    """
    while smallest < size:
        smallest *= 2
    return smallest
