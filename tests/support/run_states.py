"""States of a made-up training run for the tests of checkpoints, each a function of its step."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Moments(NamedTuple):
    """Stands for an optimizer's state: a named tuple, as optax has them."""

    count: Any
    mu: Any


def state(step: int) -> dict[str, Any]:
    """Every kind of array that a training state may hold, different in every step."""
    rng = np.random.default_rng(step)
    w = rng.standard_normal((33, 40), dtype=np.float32)
    w[0, :3] = np.nan, -0.0, 1e-42
    return {
        "params": {"blocks.0.w": jnp.array(w), "b": jnp.array(w[1], jnp.bfloat16)},
        "opt_state": (Moments(jnp.int32(step), {"w": jnp.array(w * 2)}), (), None),
        "key": jax.random.key(step),
        "raw_key": jax.random.PRNGKey(step),
        "mask": jnp.array(w[:, 0] > 0),
        "empty": jnp.zeros((0, 4)),
    }


def meta(step: int) -> dict[str, Any]:
    return {"data": {"epoch": step, "position": [step, 3]}, "config": {"lr": 0.1}, "name": "é"}


def bits(tree: Any) -> list[tuple[str, tuple[int, ...], bytes]]:
    """Everything that must come back, to the bit: NaN equals itself, and -0.0 is not 0.0."""
    leaves = []
    for x in jax.tree.leaves(tree):
        raw = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        leaves.append((str(x.dtype), x.shape, np.asarray(raw).tobytes()))
    return leaves


def like(tree: Any) -> Any:
    """The target that restores a tree like this one."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
