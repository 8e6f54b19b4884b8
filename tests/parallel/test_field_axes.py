"""Arrays find the logical axes that their dataclass fields declare."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from devices import on_devices

from jaxllm.cache.variants import CacheKind
from jaxllm.parallel.field_axes import axes, map_with_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    cache: object
    scores: object = dataclasses.field(metadata=axes(None, "rows"))


@pytest.mark.by_default("True")
@pytest.mark.parametrize("quantized", [False, True])
def test_keys_and_values_have_heads_and_everything_else_rows(quantized):
    cache = CacheKind(quantized=quantized).convert(tiny.cached("llama").init_cache(2, 8))
    actual = map_with_axes(lambda names, x: names, State(cache, {"steps": (jnp.zeros(3),)}))
    assert actual.scores == {"steps": ((None, "rows"),)}
    assert actual.cache.mask == ("rows",)
    layer = actual.cache.layers[0]
    assert set(vars(layer).values()) - {layer.dtype if quantized else None} == {
        ("rows", "heads", None, None)
    }


FOUR_DEVICES = """
import dataclasses, jax, jax.numpy as jnp, tiny
from jaxllm.parallel.field_axes import constrain_fields, field_shardings
from jaxllm.parallel.sharding import make_mesh, use_mesh

cache = tiny.cached("llama").init_cache(4, 8)
mesh = make_mesh(data=2, tensor=2)
with use_mesh(mesh):
    for shape in ((4, 2, 8, 3), (8, 8, 3)):
        x = jnp.zeros(shape)
        layers = tuple(dataclasses.replace(kv, k=x, v=x) for kv in cache.layers)
        placed = jax.jit(lambda c: constrain_fields(c, batch=4))(cache.replace(layers=layers))
        k = placed.layers[0].k
        print(k.sharding.shard_shape(k.shape), placed.mask.sharding.shard_shape((4, 8)))
        stated = field_shardings(cache.replace(layers=layers), mesh, batch=4)
        same = jax.tree.map(lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), placed, stated)
        assert jax.tree.all(same)
"""


@pytest.mark.ci
def test_rows_are_sharded_with_heads_beside_them_or_merged():
    actual = on_devices(FOUR_DEVICES, devices=4)
    assert actual.splitlines() == ["(2, 1, 8, 3) (2, 8)", "(4, 8, 3) (2, 8)"]
