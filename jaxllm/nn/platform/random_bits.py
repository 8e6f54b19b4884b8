"""Random bits of a sampling step, from code that compiles quickly on a CPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, UInt32

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
