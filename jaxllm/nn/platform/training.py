"""Training steps: random numbers of dropout, logits, order of the backward pass, updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Bool, Float, Int, UInt16, UInt32

from jaxllm.parallel.sharding import context_mesh

State = TypeVar("State")
"""A pytree of arrays."""
MAX_LOGITS = 1 << 27
"""512 MiB in float32; chunks of 2048 tokens of GPT-2's vocabulary, which keep a TPU's matrix unit
busy."""


def random_uint16(key: Array, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Uniform random uint16 numbers, generated once even if used several times."""
    *leading, rows, width = (1, 1, *shape)[-max(2, len(shape)) :]
    # PERF(cpu, tpu): random bits are most of dropout's cost, so that each hash gives four numbers.
    # They are a quarter of the rows apart, which costs a TPU no copy;
    # docs/decisions/tpu-training-step.md.
    words = random_words(key, (*leading, math.ceil(rows / 4), width))
    quarters = [half.astype(jnp.uint16) for x in words for half in (x & 0xFFFF, x >> 16)]
    return jnp.concatenate(quarters, axis=-2)[..., :rows, :].reshape(shape)


def random_words(key: Array, shape: tuple[int, ...]) -> Sequence[UInt32[Array, ...]]:
    """Two random words for each element of an array of this shape, from one hash."""
    if jax.random.key_impl(key) == "threefry2x32":
        # `jax.random.bits` returns the exclusive or of the two words of a hash.
        words = threefry2x32_p.bind(*jax.random.key_data(key), *counters(shape))
    else:
        words = list(jax.random.bits(key, (2, *shape), jnp.uint32))
    # PERF(cpu): without the barrier XLA fuses their generation into every use and repeats it;
    # benchmarks/train.py.
    return jax.lax.optimization_barrier(words)


def counters(shape: tuple[int, ...]) -> tuple[UInt32[Array, ...], UInt32[Array, ...]]:
    """A pair of numbers for each element: its index in all axes but the last two, and in those."""

    def index(axes: range) -> Array:
        result = jnp.zeros(shape, jnp.uint32)
        for axis in axes:
            result = result * shape[axis] + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        return result

    last = len(shape) - 2
    return index(range(last)), index(range(last, len(shape)))


def entry_of_rows(x: Float[Array, "*B V"], index: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """``x[..., index]`` of each row."""

    def gathered(x: Array, index: Array) -> Array:
        return jnp.take_along_axis(x, index[..., None], axis=-1)[..., 0]

    # PERF(tpu): a gather needs an array of x, where a sum over x is part of the pass that computes
    # it: logits then stay in bfloat16; docs/decisions/tpu-training-step.md.
    def selected(x: Array, index: Array) -> Array:
        entries = jnp.expand_dims(jnp.arange(x.shape[-1]), tuple(range(index.ndim)))
        is_entry = entries == index[..., None]
        return jnp.sum(jnp.where(is_entry, x, 0), axis=-1)

    return jax.lax.platform_dependent(x, index, tpu=selected, default=gathered)


def logits_within_memory(platform: str, dtype: np.dtype, memory: int | None = None) -> int:
    """Most logits of this dtype that the loss holds at once on a device of a platform.

    Args:
        memory: bytes of the device's memory that JAX uses; None: unknown.
    """
    if platform not in ("gpu", "cuda", "rocm"):
        return MAX_LOGITS
    # PERF(gpu): each chunk of tokens casts the head, and adds its gradient to a sum in float32,
    # which moves several times the bytes of its logits; docs/decisions/gpu-programs.md.
    most = 1 << 31
    return (most if memory is None else min(most, max(1 << 29, memory // 32))) // dtype.itemsize


def updated_if(condition: Bool[Array, ""], update: Callable[[State], State], state: State) -> State:
    """``update(state)`` if the condition holds, and the state otherwise."""
    in_loop = partial(updated_in_loop, update=update)
    # PERF(gpu): the host reads the condition of a loop. A loop also reads gradients as float32
    # arrays, where XLA otherwise casts those of bfloat16 in the kernel that updates a parameter.
    # On a mesh it would copy the state for a select; docs/decisions/gpu-programs.md.
    tuned = {"cuda": partial(updated_by_select, update=update)} if context_mesh() is None else {}
    return jax.lax.platform_dependent(condition, state, **tuned, default=in_loop)


def updated_in_loop(condition: Array, state: State, *, update: Callable[[State], State]) -> State:
    """`updated_if` by a loop that ends after one update: XLA updates in place what a loop carries,
    and with `cond` or a select would copy donated arrays; docs/decisions/gpu-programs.md."""
    return jax.lax.while_loop(
        lambda carry: carry[0],
        lambda carry: (jnp.zeros_like(carry[0]), update(carry[1])),
        (condition, state),
    )[1]


def updated_by_select(condition: Array, state: State, *, update: Callable[[State], State]) -> State:
    """`updated_if` in the kernels that update."""
    return jax.tree.map(partial(jnp.where, condition), update(state), state)


def after_gradient(x: Array, gradient: Array) -> Array:
    """Returns x; on CPU with a data dependency, so that its users run after `gradient`."""

    # PERF(cpu): XLA drops barriers before scheduling, but keeps `+ gradient * 0`, which may be NaN.
    # Otherwise all blocks are recomputed before the first is needed, and remat saves no memory;
    # benchmarks/train.py.
    def waiting(x: Array, gradient: Array) -> Array:
        # The gradient may be float32 where x is not: T5 in bfloat16.
        return x + (gradient * 0).astype(x.dtype)

    return jax.lax.platform_dependent(x, gradient, cpu=waiting, default=lambda x, gradient: x)
