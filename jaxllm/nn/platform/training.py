"""Training steps: random numbers of dropout, logits of labels, order of the backward pass."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt16, UInt32


def random_uint16(key: Array, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Uniform random uint16 numbers, generated once even if used several times.

    Each random word gives two numbers, since random bits are most of dropout's cost. A TPU draws
    others than other platforms.
    """
    # PERF(tpu): the two numbers of a word beside each other would be 2 of 128 entries of a tile;
    # writing them took six times as long as drawing; docs/decisions/tpu-training-step.md.
    return jax.lax.platform_dependent(
        key,
        tpu=functools.partial(split_in_halves, shape=shape),
        default=functools.partial(split_in_pairs, shape=shape),
    )


def split_in_pairs(key: Array, *, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Random numbers of which neighbours come from one word."""
    size = math.prod(shape)
    numbers = jax.lax.bitcast_convert_type(random_words(key, ((size + 1) // 2,)), jnp.uint16)
    return numbers.reshape(-1)[:size].reshape(shape)


def split_in_halves(key: Array, *, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Random numbers of which the two halves of the last axis come from the same words."""
    *rest, width = shape or (1,)
    words = random_words(key, (*rest, (width + 1) // 2))
    numbers = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :width]
    return numbers.astype(jnp.uint16).reshape(shape)


def random_words(key: Array, shape: tuple[int, ...]) -> UInt32[Array, ...]:
    # PERF(cpu): without the barrier XLA fuses their generation into every use and repeats it;
    # benchmarks/train.py.
    return jax.lax.optimization_barrier(jax.random.bits(key, shape, jnp.uint32))


def entry_of_rows(x: Float[Array, "*B V"], index: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """``x[..., index]`` of each row."""

    def gathered(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]

    # PERF(tpu): a gather needs an array of x, where a sum over x is part of the pass that computes
    # it: logits then stay in bfloat16; docs/decisions/tpu-training-step.md.
    def selected(x: Array, index: Array) -> Array:
        is_entry = jnp.arange(x.shape[-1]) == index[..., None]
        return jnp.sum(jnp.where(is_entry, x, 0), axis=-1)

    return jax.lax.platform_dependent(x, index, tpu=selected, default=gathered)


def after_gradient(x: Array, gradient: Array) -> Array:
    """Returns x; on CPU with a data dependency, so that its users run after `gradient`."""

    # PERF(cpu): XLA drops barriers before scheduling, but keeps `+ gradient * 0`, which may be NaN.
    # Otherwise all blocks are recomputed before the first is needed, and remat saves no memory;
    # benchmarks/train.py.
    def waiting(x: Array, gradient: Array) -> Array:
        # The gradient may be float32 where x is not: T5 in bfloat16.
        return x + (gradient * 0).astype(x.dtype)

    return jax.lax.platform_dependent(x, gradient, cpu=waiting, default=lambda x, gradient: x)
