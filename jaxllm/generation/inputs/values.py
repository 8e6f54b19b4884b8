"""Checks the caller's values on the host; converts numbers and ids to arrays of fixed dtype.

A check such as `number("[0, 1]")` returns a value as settings store it, or raises BadValueError;
`checked_by` adds the name and the value to the message. Values of tracers are not checked.

A number that becomes a leaf of a compiled program always has the same dtype (float32 or int32),
whether it was a Python number, a NumPy scalar or a tracer; otherwise changing it would compile
again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, JaxLLMError, quoted
from jaxllm.models.input_checks import is_traced

T = TypeVar("T")
Number: TypeAlias = float | int | np.generic | Array
TokenIds: TypeAlias = int | Sequence[int] | np.ndarray | Array
HostArray: TypeAlias = Any
"""A NumPy array, or a tracer inside the caller's jit. Any for type checkers, since it is a leaf of
pytrees whose fields are declared as JAX arrays."""

NO_TOKEN = -1
"""Padding value for tables of token ids; not a valid token."""
MAX_BIASED_TOKENS = 512
"""Most tokens of one `logit_bias`."""
_SMALLEST_ID_TABLE = 8


def any_traced(*values: object) -> bool:
    """Returns whether any leaf of the pytrees is a tracer."""
    return any(is_traced(leaf) for leaf in jax.tree.leaves(values))


def to_scalar(value: Any) -> Any:
    """Converts NumPy scalars and concrete 0-d arrays to Python numbers; leaves others unchanged."""
    if not isinstance(value, np.generic | np.ndarray | jax.Array) or is_traced(value):
        return value
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.extended)  # of random numbers: no number
    return value if value.ndim or is_key else value.item()


def is_number(value: object) -> bool:
    """Returns whether ``value`` is a Python or NumPy integer or float; booleans do not count."""
    return is_integer(value) or isinstance(value, float | np.floating)


class BadValueError(ValueError):
    """Error with the expected value as message; the caller adds the field's name and value."""


def checked_by(
    where: str,
    name: str,
    check: Callable[[Any], T],
    value: Any,
    error: type[JaxLLMError] = InputError,
    hint: str = "",
) -> T:
    """The value as ``check`` returns it; raises ``error`` with ``where`` and the field's name."""
    try:
        return check(value)
    except BadValueError as bad:
        raise error(f"{where}: `{name}` must be {bad}, but is {quoted(value)}{hint}") from None


def number(interval: str) -> Callable[[Number | None], float]:
    """Checks for a real number in an interval, stored as a float; accepts tracers.

    >>> number("(0, 1]")(1), number("[0, inf)")(0)
    (1.0, 0.0)
    """
    low, high = (float(end) for end in interval[1:-1].split(","))

    def check(value: Any) -> Any:
        if is_traced(value):
            return value
        value = to_scalar(value)
        if is_number(value):
            with suppress(OverflowError):  # an integer too large for a float
                value = float(value)
                is_end = value == low and interval[0] == "[", value == high and interval[-1] == "]"
                if low < value < high or any(is_end):
                    return value
        raise BadValueError(f"a number in {interval}")

    return check


def integer(least: int) -> Callable[[int | np.integer | Array | None], int]:
    """Checks for an int32 of at least ``least``, stored as an int; accepts tracers."""

    def check(value: Any) -> Any:
        if is_traced(value):
            return value
        value = to_scalar(value)
        largest = np.iinfo(np.int32).max
        if is_integer(value) and value > largest:
            raise BadValueError(f"an integer of at most {largest}")
        if not is_integer(value) or value < least:
            raise BadValueError(f"an integer of at least {least}")
        return int(value)

    return check


def boolean(value: object) -> bool:
    """Checks for True or False. Refuses tracers: the value decides which program is built."""
    value = to_scalar(value)
    if not isinstance(value, bool):
        raise BadValueError("true or false")
    return value


def choice(*values: Any) -> Callable[[Any], Any]:
    """Checks for one of the given values; 1 is not True."""

    def check(value: object) -> Any:
        value = to_scalar(value)
        if not any(type(value) is type(allowed) and value == allowed for allowed in values):
            raise BadValueError("one of " + ", ".join(map(repr, values)))
        return value

    return check


def token_ids(value: object) -> tuple[int, ...]:
    """Checks for a list of token ids, stored as a tuple. Refuses tracers, as `boolean`."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise BadValueError("a list of token ids")
    try:
        result = tuple(integer(0)(item) for item in value)
    except (TypeError, ValueError):  # an array without axes is an Iterable too
        raise BadValueError("a list of token ids") from None
    if any_traced(result):
        raise BadValueError("a list of token ids known outside jax.jit")
    return result


def token_id_or_ids(value: object) -> Any:
    """Checks for a token id, or a list of them stored as a tuple; accepts tracers."""
    if is_traced(value):
        return value
    ids: Any = id_list(value) if isinstance(value, np.ndarray) else value
    if isinstance(to_scalar(ids), int):
        return integer(0)(ids)
    result = token_ids(ids)
    if not result:
        raise BadValueError("a token id or a non-empty list of them")
    return result


def layers(value: object) -> Any:
    """Checks for "low", "high", or a non-empty list of layers, stored as a tuple."""
    if isinstance(value, str) and value in ("low", "high"):
        return value
    try:
        result = token_ids(value)
    except BadValueError:
        result = ()
    if not result:
        raise BadValueError("'low', 'high' or a non-empty list of layers")
    return result


def one_word(value: object) -> tuple[int, ...]:
    """Checks for a non-empty list of token ids, stored as a tuple."""
    result = token_ids(value)
    if not result:
        raise BadValueError("a non-empty list of token ids")
    return result


def _each(check: Callable[[Any], T], value: Any, expected: str) -> tuple[T, ...]:
    """Checks the items of a non-empty list, stored as a tuple."""
    try:
        result = () if isinstance(value, Mapping) else tuple(map(check, value))
    except (TypeError, ValueError):
        result = ()
    if not result:
        raise BadValueError(expected)
    return result


def words(value: Any) -> tuple[tuple[int, ...], ...]:
    """Checks for a non-empty list of non-empty lists of token ids, stored as tuples."""
    return _each(one_word, value, "a non-empty list of non-empty lists of token ids")


def phrases(value: Any) -> tuple[tuple[Any, ...], ...]:
    """Checks for a list of phrases, or of lists of phrases of which one suffices; stores tuples.

    >>> phrases([[5, 6], [[7], [8, 9]]])
    ((5, 6), ((7,), (8, 9)))
    """

    def check(item: Any) -> tuple[Any, ...]:
        is_list = isinstance(item, Sequence | np.ndarray) and len(item) > 0
        return words(item) if is_list and np.ndim(item[0]) == 1 else one_word(item)

    return _each(check, value, "a non-empty list of phrases, which are lists of token ids")


def biases(value: Any) -> tuple[tuple[tuple[int, ...], float], ...]:
    """Checks for a map from tuples of ids to numbers, or a list of [ids, number]; stores pairs."""
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        result = {token_ids(ids): number("[-inf, inf]")(bias) for ids, bias in pairs}
    except (TypeError, ValueError):
        result = {}
    if not result or not all(result) or any_traced(*result.values()):
        raise BadValueError("a map from tuples of token ids to numbers, or a list of [ids, number]")
    return tuple(result.items())


def token_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Checks for a map from token ids to numbers, or a list of pairs; stores pairs.

    >>> token_biases({"7": -100})
    ((7, -100.0),)
    """
    try:
        pairs = value.items() if isinstance(value, Mapping) else value
        biases = {
            integer(0)(int(token) if isinstance(token, str) else token): number("[-100, 100]")(bias)
            for token, bias in pairs
        }
    except (TypeError, ValueError):
        raise BadValueError("a map from token ids to numbers from -100 to 100") from None
    if any_traced(*biases.values()):
        raise BadValueError("a map to numbers known outside jax.jit")
    if len(biases) > MAX_BIASED_TOKENS:
        raise BadValueError(f"a map of at most {MAX_BIASED_TOKENS} token ids")
    return tuple(biases.items())


def ids_in(value: Any) -> Iterator[Any]:
    """The token ids in a stored value: one, or nested tuples of them, in which floats are biases.

    >>> list(ids_in((((4, 5), -1.0), (6, 2.0))))
    [4, 5, 6]
    """
    if isinstance(value, tuple):
        for item in value:
            yield from ids_in(item)
    elif not isinstance(value, float):
        yield value


def decay(value: Any) -> tuple[int, float]:
    """Checks for a pair (start, factor); either may be a tracer."""
    try:
        start, factor = value
        return integer(0)(start), number("[1e-30, 1e30]")(factor)
    except (TypeError, ValueError):
        raise BadValueError("a pair (start, factor) with start >= 0 and factor > 0") from None


def strings(value: Any) -> tuple[str, ...]:
    """Checks for a non-empty string or a list of them, stored as a tuple."""
    result = (value,) if isinstance(value, str) else value
    is_list = isinstance(result, Sequence) and len(result) > 0
    if not is_list or not all(isinstance(s, str) and s for s in result):
        raise BadValueError("a non-empty string or a list of them")
    if any("\ud800" <= char <= "\udfff" for string in result for char in string):
        raise BadValueError("text without unpaired surrogates")
    return tuple(result)


def options(value: object) -> dict[str, Any]:
    """Checks for a map from names to values that are no arrays, stored as a dict."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise BadValueError("a map from names to values")
    result = {name: to_scalar(item) for name, item in value.items()}
    if any(np.ndim(item) for item in result.values() if hasattr(item, "dtype")):
        raise BadValueError("a map from names to values that are no arrays")
    return result


def constraint_list(value: object) -> tuple[Any, ...]:
    """Checks for a list, stored as a tuple; constrained beam search checks its items."""
    if not isinstance(value, list | tuple):
        raise BadValueError("a list of constraints")
    return tuple(value)


def converted_by(module: str, function: str) -> Callable[[object], Any]:
    """Converts by a function of a module that is imported with the first value."""

    def check(value: object) -> Any:
        try:
            return getattr(import_module(module), function)(value)
        except InputError as error:
            raise BadValueError(f"valid ({error})") from None

    return check


def anything(value: object) -> Any:
    """Accepts any value."""
    return value


def as_leaf(value: Number, dtype: type) -> Array:
    """Converts a checked number to a scalar of ``dtype``, a NumPy array unless it is a tracer."""
    convert = jnp.asarray if is_traced(value) else np.asarray
    return convert(value, dtype)  # pyright: ignore[reportReturnType]  (a leaf like any other)


def float_leaf(owner: str, name: str, value: Number, interval: str) -> Float[Array, ""]:
    """Converts ``value`` to a float32 scalar; checks the interval unless it is a tracer.

    Raises:
        InputError: it is not a number in the interval; the message names ``owner`` and ``name``.
    """
    return as_leaf(checked_by(owner, name, number(interval), value), np.float32)


def int_leaf(owner: str, name: str, value: object, *, least: int = 0) -> Int[Array, " ..."]:
    """Converts ``value`` to int32: a scalar, or one number per row of the batch (shape ``[B]``).

    Raises:
        InputError: it is not an integer of at least ``least``.
    """
    if is_traced(value):
        return jnp.asarray(value, jnp.int32)
    scalar = to_scalar(value)
    if isinstance(scalar, np.ndarray | jax.Array):
        numbers = np.asarray(scalar)
        good = numbers.ndim == 1 and numbers.dtype.kind in "iu" and (numbers >= least).all()
    else:
        numbers = scalar
        good = is_integer(scalar) and least <= scalar <= np.iinfo(np.int32).max
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
