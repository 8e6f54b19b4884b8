"""Shapes and shardings of the arrays of a checkpoint."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.checkpoint.orbax.leaves import bits_like


def test_an_array_is_restored_with_the_sharding_of_its_target():
    mesh = Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"))
    target = jax.ShapeDtypeStruct((4, 2), jnp.float32, sharding=sharding)
    assert bits_like(target).sharding == sharding
    single = bits_like(jax.ShapeDtypeStruct((4, 2), jnp.float32)).sharding
    assert isinstance(single, jax.sharding.SingleDeviceSharding)
