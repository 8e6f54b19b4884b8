"""Widths of chunks of prompts, choice of a token, and how a decode loop writes and ends."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, UInt32

# PERF(cpu): decoding waits half as long for a chunk of 128 columns as for one of 256, which takes 6
# to 16% less for each column. A chunk of 32 takes half as much again; benchmarks/serve.py.
CHUNK_SIZE = {"cpu": 128}
ACCELERATOR_CHUNK_SIZE = 512
NARROW_CHUNK_SIZE = {"cpu": 32}
NARROW_ACCELERATOR_CHUNK_SIZE = 64


def chunk_size(platform: str) -> int:
    """Columns of a wide chunk of a prompt that suit a platform."""
    return CHUNK_SIZE.get(platform, ACCELERATOR_CHUNK_SIZE)


def narrow_chunk_size(platform: str) -> int:
    """Columns of a narrow chunk of a prompt that suit a platform."""
    return NARROW_CHUNK_SIZE.get(platform, NARROW_ACCELERATOR_CHUNK_SIZE)


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
    # docs/decisions/gpu-programs.md.
    return 4 if platform in ("gpu", "cuda", "rocm") else 1


def dispatches_ahead(platform: str) -> bool:
    """True if a server dispatches its next decode steps before it reads the tokens of the last
    ones."""
    # PERF(cpu): host and device are the same cores, so that nothing is gained, and a request that
    # arrives would wait for more steps.
    return platform != "cpu"


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


def block_size(width: int) -> int:
    """Entries of a block of `in_blocks`."""
    return math.isqrt(width - 1) + 1


def in_blocks(x: Float[Array, "B V"], filler: float) -> Float[Array, "B blocks size"]:
    """Splits rows into about sqrt(V) blocks of as many entries, the last one filled up."""
    batch, width = x.shape
    size = block_size(width)
    blocks = -(-width // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - width)), constant_values=filler)
    return x.reshape(batch, blocks, size)


Words = tuple[UInt32[Array, "B n"], UInt32[Array, "B n"]]


def random_bits(
    keys: Key[Array, " B"], step: Int[Array, ""] | Int[Array, " B"] | None, count: int
) -> UInt32[Array, "B count"]:
    """``jax.random.bits(jax.random.fold_in(key, step), count)`` for each key.

    Args:
        step: None: draws with the key itself.
    """
    steps = None if step is None else jnp.broadcast_to(step, keys.shape)

    def with_jax(keys: Key[Array, " B"], steps: Int[Array, " B"] | None) -> UInt32[Array, "B n"]:
        if steps is not None:
            keys = jax.vmap(jax.random.fold_in)(keys, steps)
        return jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(keys)

    def in_one_loop(keys: Key[Array, " B"], steps: Int[Array, " B"] | None) -> UInt32[Array, "B n"]:
        shape = (*keys.shape, count)
        numbers = [jnp.broadcast_to(jnp.arange(count, dtype=jnp.uint32), shape)]
        if steps is not None:
            numbers.insert(0, jnp.broadcast_to(steps.astype(jnp.uint32)[:, None], shape))
        table = jnp.stack(numbers)
        words = jax.random.key_data(keys)
        key = (jnp.broadcast_to(words[:, :1], shape), jnp.broadcast_to(words[:, 1:], shape))
        first, second = jax.lax.fori_loop(
            0, len(numbers), lambda i, key: threefry(key, table[i]), key
        )
        return first ^ second

    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    if not partitionable or jax.random.key_impl(keys) != "threefry2x32":
        return with_jax(keys, steps)
    # PERF(cpu): `fold_in` and `bits` both hash a number with the key. JAX makes a loop of each,
    # with four rounds of the hash in an iteration; one loop with a round in an iteration compiles
    # in half the time, and a program has two such steps. Elsewhere JAX unrolls the rounds into one
    # kernel.
    return jax.lax.platform_dependent(keys, steps, cpu=in_one_loop, default=with_jax)


def threefry(key: Words, number: UInt32[Array, "B n"]) -> Words:
    """Threefry-2x32 (Salmon et al. 2011) of the words 0 and `number`."""

    def mix(i: Int[Array, ""], state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        a, b, rotations = state
        a = a + b
        return a, ((b << rotations[i]) | (b >> (32 - rotations[i]))) ^ a, rotations

    def add_key(i: Int[Array, ""], state: tuple[Array, ...]) -> tuple[Array, ...]:
        a, b, k0, k1, k2, rotations, next_rotations = state
        a, b, _ = jax.lax.fori_loop(0, 4, mix, (a, b, rotations))
        return a + k1, b + k2 + (i + 1).astype(jnp.uint32), k1, k2, k0, next_rotations, rotations

    k0, k1 = key
    k2 = k0 ^ k1 ^ jnp.uint32(0x1BD11BDA)
    rotations = jnp.array([[13, 15, 26, 6], [17, 29, 16, 24]], jnp.uint32)
    a, b, *_ = jax.lax.fori_loop(0, 5, add_key, (k0, k1 + number, k0, k1, k2, *rotations))
    return a, b
