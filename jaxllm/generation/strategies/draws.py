"""Random keys of rows, and the choice of each row's next token.

Every sample of a row has a key of its own, derived only from the caller's key and the row's id. A
row therefore draws the same tokens in any batch, any bucket and on any device.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import is_traced, to_scalar
from jaxllm.generation.strategies.strategy import Length
from jaxllm.models.input_checks import on_host
from jaxllm.nn.platform.decoding import argmax_of_rows, block_size, in_blocks, random_bits
from jaxllm.parallel.vocabulary import argmax, has_blocks, race

RandomKey: TypeAlias = Array | np.ndarray | int | None
"""A typed PRNG key, the data of a raw one, or an int seed; None: a fresh seed."""

RowIds: TypeAlias = Sequence[int] | np.ndarray | Array | None


def shared_key(key: RandomKey, mesh: Mesh | None) -> RandomKey:
    """The caller's key; None becomes a random seed shared by all processes of a mesh.

    Without a multi-process mesh None stays None.
    """
    if key is not None or mesh is None or not mesh.is_multi_process:
        return key
    return int(multihost_utils.broadcast_one_to_all(np.uint32(secrets.randbits(32))))


def row_keys(
    key: RandomKey, row_ids: RowIds, batch: int, samples: int, *, sampling: bool, under_jit: bool
) -> Key[Array, " Bn"] | UInt32[Array, "Bn 3"]:
    """Random keys for `samples` results of each row; the samples of a row are adjacent. Without
    sampling they are zeros on the host.

    Args:
        key: a PRNG key (typed or raw), an int seed, or None: a fresh seed at every call, since
            a constant would give the same sequence each time.
        row_ids: int [B]; None means 0..B-1.
        sampling: whether the keys will be used; greedy search needs none.
        under_jit: the call is being traced, and a fresh key would become a constant of the program.

    Raises:
        InputError: `key` is not a key or a seed of 32 bits, `row_ids` has another shape or values
            that are not uint32, or sampling inside jax.jit without a key.
    """
    row_ids = _checked_row_ids(row_ids, batch)
    seed: Any = to_scalar(key)
    if is_integer(seed) and not 0 <= seed < 2**32:  # JAX drops higher bits
        raise InputError(f"key: a seed is from 0 to 2**32 - 1, found {quoted(seed)}")
    if not (seed is None or is_integer(seed)):
        seed = _typed_key(seed)
    if not sampling:
        zeros: Any = np.zeros((batch * samples, 3), np.uint32)
        return zeros
    if seed is None:
        if under_jit:
            raise InputError("key: sampling inside jax.jit needs a key, as an argument")
        seed = secrets.randbits(32)
    return _random_keys(_typed_key(seed), row_ids, samples)


def _typed_key(key: Any) -> Key[Array, ""]:
    if is_integer(key) or (getattr(key, "ndim", 1) == 0 and jnp.issubdtype(key.dtype, jnp.integer)):
        key = jax.random.key(key)
    elif not hasattr(key, "dtype"):
        raise InputError(f"key: expected jax.random.key(...) or an int, found {quoted(key)}")
    elif not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        try:
            key = jax.random.wrap_key_data(key)
        except (TypeError, ValueError) as error:
            raise InputError(f"key: not the data of a PRNG key ({error})") from None
    if key.shape != ():
        raise InputError(f"key: expected one key, found {key.shape}; rows fold their ids into it")
    return key


def _checked_row_ids(row_ids: RowIds, batch: int) -> UInt32[Array, " B"]:
    host = on_host("row_ids", np.arange(batch) if row_ids is None else row_ids)
    if host.shape != (batch,):
        raise InputError(f"row_ids: expected shape {(batch,)}, found {host.shape}")
    if not is_traced(host):
        if host.dtype.kind not in "iu" or (host < 0).any() or (host >= 2**32).any():
            raise InputError(
                f"row_ids: expected integers from 0 to 2**32 - 1, found {quoted(row_ids)}"
            )
        return host.astype(np.uint32)
    return jnp.asarray(host, jnp.uint32)


@jax.jit(static_argnames=("samples",))
def _random_keys(
    key: Key[Array, ""], row_ids: UInt32[Array, " B"], samples: int
) -> Key[Array, " Bn"]:
    of_row = jax.vmap(jax.vmap(sample_key, in_axes=(None, None, 0)), in_axes=(None, 0, None))
    return of_row(key, row_ids, jnp.arange(samples, dtype=jnp.uint32)).reshape(-1)


def sample_key(
    key: Key[Array, ""], row: UInt32[Array, ""], sample: UInt32[Array, ""]
) -> Key[Array, ""]:
    """The key of a sample of a row."""
    return jax.random.fold_in(jax.random.fold_in(key, row), sample)


def keys_of_slots(numbers: UInt32[Array, "B 3"]) -> Key[Array, " B"]:
    """Random keys of slots, equal to the keys of `generate(..., key=seed, row_ids=[row])`.

    Args:
        numbers: seed, number of the row and number of the sample of each slot.
    """
    seeds, rows, samples = jnp.asarray(numbers).T
    return jax.vmap(sample_key)(jax.vmap(jax.random.key)(seeds), rows, samples)


def choose_greedy(scores: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Best token of each row, int32 ``[B]``; ties go to the first. Scores hold no NaN.

    >>> import jax.numpy as jnp
    >>> choose_greedy(jnp.array([[1.0, 3.0, 3.0]])).tolist()
    [1]
    """
    return argmax(scores, argmax_of_rows)


def choose_sample(
    keys: Key[Array, " B"],
    scores: Float[Array, "B V"],
    step: Length | None = None,
) -> Int[Array, " B"]:
    """Draws one token from softmax(scores) for each row, with the row's own key.

    The draw has two steps, each among about sqrt(V) items, which needs 450 random numbers at a
    vocabulary of 50,000 instead of one for every token: first a block of tokens by its summed
    probability, then a token within the block. Each step is an exponential race: the smallest of
    ``E_i / w_i`` with E_i independent and exponential is item i with probability w_i / sum(w).
    No cumulative sums are taken, whose rounding would make tokens of small probability unreachable.
    Every backend takes the same two steps, since they determine which token a key draws.

    Args:
        keys: typed PRNG keys, one per row. A row's draw depends on its key and scores only.
        scores: ``[B, V]``; a row has at least one finite score, and no NaN or +inf.
        step: draw with ``fold_in(key, step)``; None: with the key itself.

    Returns:
        int32 ``[B]``. A token of score -inf is never chosen. Probabilities are exact up to float32
        rounding; an item whose share of its step is below 2**-33 or so may not be reachable.
    """
    size = block_size(scores.shape[1])
    if has_blocks(scores, size):
        times = _times(keys, step, -(-scores.shape[1] // size) + size)
        return race(_weights(scores), times, size).astype(jnp.int32)
    weights = in_blocks(_weights(scores), 0.0)
    block, within = _race(keys, step, weights)
    return (block * size + within).astype(jnp.int32)


def draw_without_replacement(
    keys: Key[Array, " B"],
    scores: Float[Array, "B V"],
    places: int,
    count: Int[Array, " R"],
    *,
    worst: float,
) -> tuple[Float[Array, "B P"], Int[Array, "B P"]]:
    """Draws `count` different items of softmax(scores), one by one: their scores and indices.

    `count` is one number for all rows, or one for each. Equal in distribution to
    `torch.multinomial(..., replacement=False)`. Entries beyond `count`, or beyond the items of
    positive probability, have the score `worst`.
    """
    batch, weights = scores.shape[0], in_blocks(_weights(scores), 0.0)

    def draw(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weights, value, index = carry
        block, within = _race(keys, i, weights)
        row = jnp.arange(batch)
        is_drawn = (weights[row, block, within] > 0) & (i < count)
        item = block * weights.shape[2] + within
        score = jnp.where(is_drawn, scores[row, item], worst)
        weights = weights.at[row, block, within].set(0.0)
        return weights, value.at[:, i].set(score), index.at[:, i].set(item)

    empty = jnp.full((batch, places), worst, jnp.float32), jnp.zeros((batch, places), jnp.int32)
    draws = jnp.minimum(jnp.max(count), places)
    _, value, index = jax.lax.fori_loop(0, draws, draw, (weights, *empty))
    return value, index


def _weights(scores: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """exp(scores), scaled to a maximum of 1."""
    scores = scores.astype(jnp.float32)
    return jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))


def _race(
    keys: Key[Array, " B"],
    step: Length | None,
    weights: Float[Array, "B blocks size"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """Draws a block and an index in it, each with probability proportional to its weight."""
    _, blocks, size = weights.shape
    times = _times(keys, step, blocks + size)
    block = jnp.argmin(times[:, :blocks] / jnp.sum(weights, axis=-1), axis=-1)
    within_block = jnp.take_along_axis(weights, block[:, None, None], 1, mode="clip")[:, 0]
    return block, jnp.argmin(times[:, blocks:] / within_block, axis=-1)


def _times(keys: Key[Array, " B"], step: Length | None, count: int) -> Float[Array, "B count"]:
    """Random times of a race, for blocks and for the entries of a block."""
    return _exponential(random_bits(keys, step, count))


def _exponential(bits: UInt32[Array, "B n"]) -> Float[Array, "B n"]:
    """Standard exponential numbers, positive, finite, and fine-grained near 0 (from 2**-33).

    Small ones win the race, so the uniform numbers that they come from use all 32 bits;
    ``jax.random.exponential`` uses 23.
    """
    uniform = (bits.astype(jnp.float32) + 0.5) * 2.0**-32
    return -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
