"""Decode steps: heads of the queries, where keys and values are written, the choice of a token."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

MAX_ROWS_APART = 8
"""Most rows of a TPU's decode step whose largest scores are an operation of their own."""


def split_heads(x: Float[Array, "B T D"], heads: int) -> Float[Array, "B T N H"]:
    """Splits the output of a projection into heads."""
    # PERF(tpu): without the barrier XLA computes the product of a decode step with the heads as its
    # first axis, and copies it; docs/decisions/tpu-decode-step.md.
    if x.shape[1] == 1:
        barrier = jax.lax.optimization_barrier
        x = jax.lax.platform_dependent(x, tpu=barrier, default=lambda x: x)
    return x.reshape(*x.shape[:2], heads, -1)


def largest_scores(scores: Float[Array, "B N T S"]) -> Float[Array, "B N T 1"]:
    """The largest of each query's scores."""
    largest = scores.max(axis=-1, keepdims=True)
    # PERF(tpu): without the barrier XLA computes the softmax of a decode step within one operation,
    # in which every entry of a row searches the row for its largest. With many rows that is still
    # faster than an operation more; docs/decisions/tpu-decode-step.md.
    if scores.shape[2] == 1 and len(scores) <= MAX_ROWS_APART:
        barrier = jax.lax.optimization_barrier
        largest = jax.lax.platform_dependent(largest, tpu=barrier, default=lambda x: x)
    return largest


def writes_one_slot(platform: str) -> bool:
    """True if rows of different lengths are written to one cache slot of all (`RotatedCache`)."""
    # PERF(tpu): XLA keeps a cache with heads of 64 in a layout that a scatter cannot write, so it
    # would copy the whole cache before and after the loop; docs/decisions/tpu-decode-step.md. On a
    # CPU a step reads only the slots that are in use, which are the first ones without rotation.
    return platform == "tpu"


def steps_between_checks(platform: str) -> int:
    """Decode steps that a loop runs before it checks again whether a row is unfinished."""
    # PERF(gpu): XLA copies the condition of a loop of unknown length to the host, which waits for
    # the step's kernels before it launches those of the next one;
    # docs/decisions/gpu-decode-step.md.
    return 4 if platform in ("gpu", "cuda", "rocm") else 1


def argmax_of_rows(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Index of the largest entry of each row, int32; the first of equal ones. No entry is NaN."""

    def in_two_steps(x: Float[Array, "B V"]) -> Int[Array, " B"]:
        blocks = in_blocks(x, -jnp.inf)
        block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
        # Not a search for the value that was found: XLA may compute x again, and round differently.
        within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        return (block * blocks.shape[2] + jnp.argmax(within, axis=-1)).astype(jnp.int32)

    def in_one_step(x: Float[Array, "B V"]) -> Int[Array, " B"]:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    # PERF(cpu): a block, then an entry, in a third of the time of one argmax over a vocabulary;
    # benchmarks/decode.py.
    # Elsewhere one argmax is a single pass, which XLA fuses with the LM head's output.
    return jax.lax.platform_dependent(x, cpu=in_two_steps, default=in_one_step)


def in_blocks(x: Float[Array, "B V"], filler: float) -> Float[Array, "B blocks size"]:
    """Splits rows into about sqrt(V) blocks of as many entries, the last one filled up."""
    batch, width = x.shape
    size = math.isqrt(width - 1) + 1
    blocks = -(-width // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - width)), constant_values=filler)
    return x.reshape(batch, blocks, size)
