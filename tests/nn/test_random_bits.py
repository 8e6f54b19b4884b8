"""Random bits of a sampling step are those of `jax.random`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.nn.platform.decoding import random_bits


@pytest.mark.parametrize("step", [None, 0, 2**31 - 1, [3, 0, 70_000]])
@pytest.mark.parametrize("kind", ["threefry2x32", "rbg", "not partitionable"])
def test_they_are_those_of_jax_random(kind, step):
    is_rbg, count = kind == "rbg", 37
    keys = jax.random.split(jax.random.key(5, impl="rbg" if is_rbg else None), 3)
    step = None if step is None else jnp.asarray(step, jnp.int32)

    with jax.threefry_partitionable(kind != "not partitionable"):
        folded = keys
        if step is not None:
            folded = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(step, (3,)))
        expected = jax.vmap(lambda key: jax.random.bits(key, (count,), jnp.uint32))(folded)
        bits = jax.jit(random_bits, static_argnums=2)(keys, step, count)
    np.testing.assert_array_equal(bits, expected)
