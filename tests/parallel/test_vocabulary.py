"""Choices among scores that are sharded over the vocabulary: those of one device, to the bit."""

from __future__ import annotations

import pytest
from devices import on_devices

COMMON = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from jaxllm.generation.processors.warpers import top_k_mask, top_p_mask
from jaxllm.generation.strategies.draws import choose_greedy, choose_sample
from jaxllm.parallel.sharding import make_mesh, use_mesh
from jaxllm.parallel.vocabulary import top_k
"""
ROWS = """
def draws(x, keys):
    return jnp.stack([choose_sample(keys, x, jnp.int32(step)) for step in range(30)])

CHOICES = {
    "greedy": lambda x, keys: choose_greedy(x),
    "sample": draws,
    "largest": lambda x, keys: top_k(x, 10),
    "top-k": lambda x, keys: top_k_mask(x, jnp.int32(20)),
    "top-k by bisection": lambda x, keys: top_k_mask(x, jnp.int32(300)),
    "top-p": lambda x, keys: top_p_mask(x, jnp.float32(0.9)),
    "top-p by bisection": lambda x, keys: top_p_mask(x / 20, jnp.float32(0.97)),
}
rng, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 8)
for width in (4096, 4104, 1000, 48):  # blocks of 64, 65, 32 and 7; the last has shards of 6
    x = (3 * rng.normal(size=(8, width))).astype(np.float32)
    x[:, ::7] = -np.inf
    x[0, [5, width - 3]] = 20.0  # ties, also between shards
    x[1] = np.round(x[1])
    x[2, :-5] = -np.inf
    for sizes in (dict(tensor=8), dict(data=2, tensor=4), dict(data=4, tensor=2)):
        mesh = make_mesh(**{"data": 1, **sizes})
        sharding = NamedSharding(mesh, P(("data", "fsdp"), "tensor"))
        for name, choose in CHOICES.items():
            expected = jax.jit(choose)(x, keys)
            with use_mesh(mesh):
                compiled = jax.jit(choose).lower(jax.device_put(x, sharding), keys).compile()
                found = compiled(jax.device_put(x, sharding), keys)
            for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
                np.testing.assert_array_equal(other, one, err_msg=f"{width} {sizes} {name}")
            if width > 4000:
                assert not re.search(rf"\\[\\d+,{width}\\]", compiled.as_text()), (sizes, name)
print("done")
"""
MODEL = """
import jaxllm
from compiling import compiled_as_users
from jaxllm.generation import loop
from jaxllm.generation.generate import prepare_call
from jaxllm.parallel.placement import put_tree
import tiny

model = tiny.make("llama", vocab_size=2064, num_hidden_layers=1, num_key_value_heads=4)
there = put_tree(model, make_mesh(data=2, tensor=4))
ids = np.arange(3, 27).reshape(4, 6)
for fields in ({}, {"do_sample": True, "top_k": 50, "top_p": 0.9, "temperature": 1.3, "key": 5}):
    fields = {"max_new_tokens": 12, "pad_token_id": 0, **fields}
    found, expected = (jaxllm.generate(m, ids, **fields).sequences for m in (there, model))
    np.testing.assert_array_equal(found, expected)
    key = fields.pop("key", None)
    call = prepare_call(there, ids, None, None, key, fields)
    bare = call.model
    with use_mesh(call.mesh):
        state = loop.prefill_program(
            call.strategy, bare, call.inputs, call.settings,
            capacity=call.capacity, new_token_bucket=call.request.new_token_bucket)
        compiled = compiled_as_users(loop.decode_program.lower(
            call.strategy, bare, state, call.settings, np.int32(20)))
    assert "516]" in compiled.as_text()
    assert not re.search(r"2064\\]", compiled.as_text()), fields
print("done")
"""


@pytest.mark.ci
@pytest.mark.parametrize("code", [ROWS, MODEL], ids=["rows", "model"])
def test_no_device_holds_a_whole_row(code: str) -> None:
    assert on_devices(COMMON + code) == "done\n"
