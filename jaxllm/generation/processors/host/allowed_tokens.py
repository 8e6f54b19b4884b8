"""Host-side rules for the allowed next tokens, called by number from compiled programs.

A Python function cannot be an argument of a compiled program, and a static function compiles the
program again for each new one. So each rule gets a number; the number is an ordinary argument, and
one callback, shared by all programs, looks up the rule.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int, UInt32

from jaxllm.common.errors import InputError
from jaxllm.generation.processors.base import CurLen, History, column_count
from jaxllm.generation.processors.host.callbacks import call_on_host
from jaxllm.models.input_checks import is_traced

WORD_BITS = 32
_UNKNOWN = -1
_RULES: dict[int, Rule] = {}
_NUMBERS = itertools.count()


class HostRow(NamedTuple):
    """Tokens so far of one row, padding included, on the host.

    Attributes:
        ids: int64 ``[cur_len]``.
        real: bool ``[cur_len]``; False at padding, and after the row's end.
        prompt_len: columns before the first new token; None if the call did not pass it.
    """

    ids: np.ndarray
    real: np.ndarray
    prompt_len: int | None


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
    input_ids: Int[Array, "B L"],
    cur_len: CurLen,
    mask: Bool[Array, "B L"] | None,
    prompt_len: Int[Array, ""] | int | None,
    vocab_size: int,
) -> Bool[Array, "B V"]:
    """Calls a rule (see :func:`call_on_host`); True at the tokens that it allows."""
    history = History.of(input_ids, cur_len, mask)
    rows, words = history.ids.shape[0], -(-vocab_size // WORD_BITS)
    if is_traced(number):
        call = partial(_call_rule, vocab_size)
    else:  # a concrete number binds the program to this rule and keeps it alive
        call = partial(_call_rule, vocab_size, rule=rule_of(number))
    bits = call_on_host(
        call,
        jax.ShapeDtypeStruct((rows, words), jnp.uint32),
        number,
        history.ids,
        history.real,
        jnp.broadcast_to(column_count(input_ids, cur_len).reshape(-1), (rows,)),
        jnp.asarray(_UNKNOWN if prompt_len is None else prompt_len, jnp.int32),
    )
    return unpack_bits(bits, vocab_size)


def _call_rule(
    vocab_size: int,
    number: np.ndarray,
    ids: np.ndarray,
    real: np.ndarray,
    lengths: np.ndarray,
    prompt_len: np.ndarray,
    *,
    rule: Rule | None = None,
) -> np.ndarray:
    # NumPy only: a callback must not call JAX.
    start = None if int(prompt_len) == _UNKNOWN else int(prompt_len)
    table = np.asarray(ids, np.int64), np.asarray(real), np.asarray(lengths)
    rows = [
        HostRow(row[:length], row_real[:length], start)
        for row, row_real, length in zip(*table, strict=True)
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
    bits = words[:, :, None] >> jnp.arange(WORD_BITS, dtype=jnp.uint32)
    return (bits & 1).astype(bool).reshape(words.shape[0], -1)[:, :vocab_size]
