"""Python functions that compiled programs call on the host: callbacks, rules of allowed tokens, and
the processors `HostLogitsProcessor` and `PrefixConstrainedLogitsProcessor`.

JAX replaces an exception of a callback by its own (a JaxRuntimeError or a ValueError), with the
traceback as text. Here the original exception is stored under a number that the text contains, and
reraised.

A Python function cannot be an argument of a compiled program, and a static function compiles the
program again for each new one. So each rule for the allowed next tokens gets a number; the number
is an ordinary argument, and one callback, shared by all programs, looks up the rule.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import weakref
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, ParamSpec, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from jaxllm.common.arguments import checked_function, is_integer
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.inputs.values import any_traced
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    LogitsProcessor,
    Scores,
    describe_array,
    logits_processor,
    name_of,
    store,
)
from jaxllm.models.input_checks import is_traced
from jaxllm.parallel.sharding import context_mesh

P = ParamSpec("P")
T = TypeVar("T")

_MAX_STORED = 16
_FAILURES: OrderedDict[int, Exception] = OrderedDict()
_NUMBERS = itertools.count()
_FAILURE_NUMBER = re.compile(r"\(host failure (\d+)\)")
_LOGGER = logging.getLogger("jax._src.callback")  # prints each failed callback's traceback
WORD_BITS = 32
_RULES: dict[int, Rule] = {}
AllowedTokens: TypeAlias = Callable[[int, np.ndarray], Iterable[int]]
HostFunction = Callable[[np.ndarray, np.ndarray], Any]


class HostError(Exception):
    """Error of a host function; the message ends with the number of the stored exception."""


def call_on_host(
    function: Callable[..., np.ndarray], result: jax.ShapeDtypeStruct, *arrays: ArrayLike | None
) -> jax.Array:
    """Calls ``function(*arrays)`` with NumPy arrays: at once, or as a callback of a program.

    ``function`` must not call JAX, and must depend on its arguments alone: a program may call it
    twice or not at all. An exception in it ends the program (see :func:`reraise_failures`).

    Raises:
        UnsupportedError: the current mesh has several devices. A device in a callback and devices
            waiting for it in an all-reduce may deadlock.
    """
    mesh = context_mesh()
    if mesh is not None and mesh.size > 1:
        raise UnsupportedError(
            "logits_processor, stopping_criteria, prefix_allowed_tokens_fn: Python functions and "
            f"grammars cannot run in programs of several devices (mesh {dict(mesh.shape)}); load "
            "the model without mesh="
        )
    if not any_traced(arrays):
        return jnp.asarray(function(*map(np.asarray, arrays)), result.dtype)
    return jax.pure_callback(record_failures(function), result, *arrays, vmap_method="sequential")


def record_failures(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that its exceptions are stored for :func:`reraise_failures`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as failure:
            number = next(_NUMBERS)
            _FAILURES[number] = failure
            while len(_FAILURES) > _MAX_STORED:
                _FAILURES.popitem(last=False)
            raise HostError(f"{failure} (host failure {number})") from failure

    return call


@contextmanager
def reraise_failures() -> Generator[None]:
    """Context in which programs raise the exceptions stored by :func:`record_failures`.

    The program must finish inside the context, for example by fetching its result.
    """
    _LOGGER.addFilter(_is_not_ours)
    try:
        yield
    except Exception as error:
        match = _FAILURE_NUMBER.search(str(error))
        failure = _FAILURES.pop(int(match[1]), None) if match else None
        if failure is None:
            raise
        raise failure from None
    finally:
        _LOGGER.removeFilter(_is_not_ours)


def _is_not_ours(record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], HostError))


class HostRow(NamedTuple):
    """Tokens so far of one row, padding included, on the host.

    Attributes:
        ids: int64 ``[cur_len]``.
        real: bool ``[cur_len]``; False at padding, and after the row's end.
        prompt_len: columns before the first new token.
        sequence: number of the sequence, of which drafts have several rows.
    """

    ids: np.ndarray
    real: np.ndarray
    prompt_len: int
    sequence: int = 0


Rule: TypeAlias = Callable[[list[HostRow], int], np.ndarray]
"""`(rows, V) -> uint32 [B, W]`: the allowed tokens of each row as bits (see `pack_bits`)."""


def register_rule(rule: Rule, owner: object) -> Int[Array, ""]:
    """Registers a rule and returns its number, int32; it is removed when ``owner`` is freed."""
    number = next(_NUMBERS)
    _RULES[number] = rule
    weakref.finalize(owner, _RULES.pop, number, None)
    return np.asarray(number, np.int32)  # pyright: ignore[reportReturnType]  (a leaf)


def allowed_tokens(
    number: Int[Array, ""],
    history: History,
    prompt_len: Int[Array, "#B 1"],
    vocab_size: int,
    columns: int = 1,
) -> Bool[Array, "B V"]:
    """Calls a rule (see :func:`call_on_host`); True at the tokens that it allows.

    ``columns`` is the number of consecutive rows that belong to one sequence.
    """
    rows, words = history.ids.shape[0], -(-vocab_size // WORD_BITS)
    # A concrete number binds the program to this rule and keeps it alive.
    rule = None if is_traced(number) else rule_of(number)
    call = partial(_call_rule, vocab_size, columns, rule)
    bits = call_on_host(
        call,
        jax.ShapeDtypeStruct((rows, words), jnp.uint32),
        number,
        history.ids,
        history.real,
        *(jnp.broadcast_to(count[:, 0], (rows,)) for count in (history.length, prompt_len)),
    )
    return unpack_bits(bits, vocab_size)


def _call_rule(
    vocab_size: int, columns: int, rule: Rule | None, number: np.ndarray, *table: np.ndarray
) -> np.ndarray:
    # NumPy only: a callback must not call JAX.
    arrays = map(np.asarray, table)
    rows = [
        HostRow(ids[:length].astype(np.int64), real[:length], int(prompt_len), i // columns)
        for i, (ids, real, length, prompt_len) in enumerate(zip(*arrays, strict=True))
    ]
    return (rule_of(number) if rule is None else rule)(rows, vocab_size)


def rule_of(number: ArrayLike) -> Rule:
    """The rule with a number.

    Raises:
        InputError: its processor no longer exists.
    """
    try:
        return _RULES[int(np.asarray(number))]
    except KeyError:
        raise InputError(
            "logits_processor: the processor whose rule this program asks no longer exists: keep "
            "the object that you made until the result has come"
        ) from None


def pack_bits(allowed: Bool[np.ndarray, "B V"]) -> UInt32[np.ndarray, "B W"]:
    """Packs booleans into 32-bit words, lowest bit first: an eighth of the bytes to transfer.

    >>> pack_bits(np.array([[True, False, True]])).tolist()
    [[5]]
    """
    missing = -allowed.shape[1] % WORD_BITS
    padded = np.pad(allowed, ((0, 0), (0, missing)))
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32)


def unpack_bits(words: UInt32[Array, "B W"], vocab_size: int) -> Bool[Array, "B V"]:
    """The booleans that `pack_bits` packed."""
    bits = words[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)[None, None]
    return (bits & 1).astype(bool).reshape(words.shape[0], -1)[:, :vocab_size]


@logits_processor(static=("num_beams",))
class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Forbids all tokens except those that ``prefix_allowed_tokens_fn(batch_id, ids)`` returns.

    The function runs on the host for each row and step, while the device waits. It receives the
    index of the prompt and the row's tokens so far, int64 ``[n]``, with the prompt's padding moved
    to the left, as in transformers. It must not call JAX and must depend on its arguments alone. A
    new function does not compile again.

    If other processors forbid every token that the function allows, in all beams of a prompt, the
    function's tokens are allowed again, with score 0, as in transformers 5.

    Args:
        prefix_allowed_tokens_fn: returns a non-empty list of token ids.
        num_beams: rows per prompt, beams or samples; row r belongs to prompt ``r // num_beams``.

    Raises:
        InputError: an argument has the wrong type. While the program runs: the function returned
            no token, or one outside the vocabulary
            (see `jaxllm.generation.processors.host`).

    >>> def even_after_odd(batch_id, ids):
    ...     return [0, 2] if ids[-1] % 2 else [1, 3]
    >>> processor = PrefixConstrainedLogitsProcessor(even_after_odd, num_beams=1)
    >>> processor(jnp.array([[3, 1, 0]]), jnp.zeros((1, 4)), 2).tolist()
    [[0.0, -inf, 0.0, -inf]]
    """

    rule: Int[Array, ""]
    num_beams: int

    def __init__(self, prefix_allowed_tokens_fn: AllowedTokens, num_beams: int) -> None:
        owner = type(self).__name__
        checked_function(prefix_allowed_tokens_fn, "prefix_allowed_tokens_fn")
        if not is_integer(num_beams) or num_beams < 1:
            raise InputError(
                f"{owner}: `num_beams` must be a positive integer, but is {quoted(num_beams)}"
            )
        rule = partial(_allowed_rows, prefix_allowed_tokens_fn, int(num_beams))
        store(self, rule=register_rule(rule, owner=self), num_beams=int(num_beams))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: CurLen = None,
        columns: int = 1,
        **_: object,
    ) -> Scores:
        """float32 ``[B, V]``; with ``prompt_len``, the function is not called for ended rows.

        ``columns`` is the number of consecutive rows of scores that belong to one sequence (used to
        check drafts); ``cur_len`` and ``mask`` then have one row per row of scores.
        """
        scores = jnp.asarray(scores, jnp.float32)
        rows, vocab_size = scores.shape
        if rows % (self.num_beams * columns):
            raise InputError(f"{rows} rows of scores do not divide into {self.num_beams} beams")
        history = History.of(input_ids, cur_len, mask, prompt_len)
        allowed = allowed_tokens(self.rule, history, history.first_new, vocab_size, columns)
        constrained = jnp.where(allowed, scores, -jnp.inf)
        is_stuck = (constrained.max(-1) == -jnp.inf).reshape(-1, self.num_beams, columns)
        no_candidate_left = is_stuck.all(axis=1, keepdims=True)
        no_candidate_left = jnp.broadcast_to(no_candidate_left, is_stuck.shape).reshape(rows, 1)
        return jnp.where(no_candidate_left & allowed, 0.0, constrained)


def _allowed_rows(
    function: AllowedTokens, num_beams: int, rows: list[HostRow], vocab_size: int
) -> np.ndarray:
    allowed = np.zeros((len(rows), vocab_size), bool)
    for number, row in enumerate(rows):
        if not row.real[row.prompt_len :].all():
            allowed[number] = True  # the row has ended
            continue
        batch_id = row.sequence // num_beams
        ids = np.concatenate([row.ids[~row.real], row.ids[row.real]])
        out = function(batch_id, ids)
        if not isinstance(out, Iterable):
            raise InputError(
                f"prefix_allowed_tokens_fn: expected a list of token ids for prompt {batch_id}, "
                f"found {quoted(out)}"
            )
        out = list(out)
        try:
            tokens = np.array(out)
        except ValueError:  # lists of different lengths
            tokens = np.array([""])
        if tokens.size == 0:
            raise InputError(
                f"prefix_allowed_tokens_fn: returned no token for prompt {batch_id} after "
                f"{ids.tolist()}; it must allow at least one, for example the end token"
            )
        is_list = tokens.ndim == 1 and tokens.dtype.kind in "iu"
        if not is_list or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise InputError(
                f"prefix_allowed_tokens_fn: expected token ids from 0 to {vocab_size - 1} for "
                f"prompt {batch_id}, found {quoted(out)}"
            )
        allowed[number, tokens] = True
    return pack_bits(allowed)


@logits_processor(static=("fn",))
class HostLogitsProcessor(LogitsProcessor):
    """Runs a NumPy function ``fn(input_ids, scores) -> scores`` that JAX cannot trace.

    ``fn`` receives int32 ``[B, cur_len]``, the caller's padding included as in transformers, and
    float32 ``[B, V]``, and returns ``[B, V]``. It runs once for each new token, while the device
    waits; it must not call JAX, and its result must depend on its arguments alone. ``fn`` is
    static: the same object does not compile again, another one does. With drafts, rows differ in
    length, so ``fn`` is called separately for each row and drafted token, with B = 1.

    >>> import jax.numpy as jnp
    >>> processor = HostLogitsProcessor(lambda input_ids, scores: scores * input_ids.shape[1])
    >>> processor(jnp.zeros((1, 4), jnp.int32), jnp.array([[1.0, 2.0]]), 3).tolist()
    [[3.0, 6.0]]
    """

    fn: HostFunction

    def __init__(self, fn: HostFunction) -> None:
        store(self, fn=checked_function(fn, f"{type(self).__name__}: fn"))

    def process(self, history: History, scores: Scores) -> Scores:
        columns = jnp.arange(history.ids.shape[1])[None]
        is_old = (columns < history.first_new) | (columns >= history.length)
        return call_by_row(self.fn, history, scores, scores, (history.real | is_old).all(axis=1))


def call_by_row(
    fn: HostFunction,
    history: History,
    scores: Float[Array, "B V"] | None,
    default: Shaped[Array, "B ..."],
    unfinished: Bool[Array, " B"],
) -> Shaped[Array, "B ..."]:
    """Calls ``fn(input_ids[:, :cur_len], scores)``, also from a compiled program.

    If the rows differ in length, ``fn`` is called for each row separately, with ``[1, cur_len]``,
    and not for rows where ``unfinished`` is False, whose result is ``default``.

    Raises:
        InputError: the result does not have the shape and kind of dtype of ``default`` (reraised
            from a program by `jaxllm.generation.processors.host`).
    """
    dtype = np.dtype(default.dtype)

    def call(ids: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        out = np.asarray(fn(ids, values))
        if out.shape != shape or not np.can_cast(out.dtype, dtype, "same_kind"):
            raise InputError(
                f"{name_of(fn)}: expected {dtype}{list(shape)} as the result, found "
                f"{describe_array(out)}"
            )
        return out.astype(dtype)

    def run(*arrays: ArrayLike) -> np.ndarray:
        ids, values, length, result, active = map(np.asarray, arrays)
        if len(length) < len(ids):  # one length for all rows
            return call(ids[:, : length[0]], values, result.shape)
        result = result.copy()
        for i in np.flatnonzero(active):
            row = slice(i, i + 1)
            result[row] = call(ids[row, : length[i]], values[row], result[row].shape)
        return result

    result = jax.ShapeDtypeStruct(default.shape, dtype)
    length = history.length[:, 0]
    return call_on_host(run, result, history.ids, scores, length, default, unfinished)
