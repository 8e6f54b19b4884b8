"""T5's buckets against the reference's, and the bias of a cached step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity_data import load_case

from jaxllm.nn.positions import RelativeBias

TABLES = {k: v for k, v in load_case("tables").calls.items() if k.startswith("buckets_")}
# Half of the buckets reach the maximal distance: the reference's logarithm is divided by 0 there,
# its buckets are no numbers, and T5Config raises.
del TABLES["buckets_6_3_causal"]


def bias_of(num_buckets, max_distance, *, bidirectional, heads=1, dtype=jnp.float32):
    return RelativeBias(
        num_buckets,
        max_distance,
        heads,
        bidirectional=bidirectional,
        std=1.0,
        dtype=dtype,
        param_dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )


@pytest.mark.by_default(
    "buckets_10_64_causal",
    "buckets_13_19_causal",
    "buckets_32_128_causal",
    "buckets_64_256_causal",
    "buckets_8_20_causal",
)
@pytest.mark.parametrize("name", TABLES)
def test_buckets(name):
    """A table whose row b holds b shows each distance's bucket."""
    _, num_buckets, max_distance, direction = name.split("_")
    call = TABLES[name]
    bias = bias_of(int(num_buckets), int(max_distance), bidirectional=direction == "bidirectional")
    bias.table.weight[...] = jnp.arange(int(num_buckets), dtype=jnp.float32)[:, None]
    keys = jnp.asarray(call.inputs["relative_position"], jnp.int32)
    actual = bias(jnp.zeros(1, jnp.int32), keys)
    np.testing.assert_array_equal(actual[0, 0, 0], call.outputs["bucket"])


@pytest.mark.ci
def test_every_bucket_is_used_in_bfloat16_too():
    """Buckets are integers made in float32 on the host: the compute dtype cannot move them."""
    wide, narrow = (bias_of(32, 128, bidirectional=True, dtype=d) for d in ("float32", "bfloat16"))
    narrow.table.weight[...] = wide.table.weight[...]
    slots = jnp.arange(300)
    expected = wide(slots, slots).astype(jnp.bfloat16)
    np.testing.assert_array_equal(narrow(slots, slots), expected)


@pytest.mark.ci
def test_a_cached_step_has_the_bias_of_its_position():
    bias = bias_of(8, 20, bidirectional=False, heads=3)
    slots = jnp.arange(30)
    full = bias(slots, slots)
    assert full.shape == (1, 3, 30, 30)
    np.testing.assert_array_equal(bias(slots[17:18], slots), full[:, :, 17:18])


@pytest.mark.ci
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_the_product_of_a_tpu_chooses_the_same_entries(dtype, bidirectional):
    bias = bias_of(32, 128, bidirectional=bidirectional, heads=4, dtype=dtype)
    columns = jnp.arange(300)
    weights = jax.random.normal(jax.random.key(1), (1, 4, 300, 300))

    def chosen_by(choose):
        """The bias in float32, and the gradient of a weighted sum of it in the table."""

        def loss(table):
            chosen = choose(table, bias.buckets(columns, columns)).astype(jnp.float32)
            return (chosen * weights).sum(), chosen

        return jax.grad(loss, has_aux=True)(bias.table.weight[...])

    gradient, entries = chosen_by(bias._by_gather)
    actual_gradient, actual = chosen_by(bias._by_product)
    np.testing.assert_array_equal(actual, entries)
    assert gradient.dtype == jnp.float32
    np.testing.assert_allclose(actual_gradient, gradient, rtol=0, atol=2e-3)


@pytest.mark.parametrize(("platform", "products"), [("tpu", 1), ("cpu", 0), ("cuda", 0)])
def test_a_tpu_multiplies_at_the_highest_precision(platform, products):
    """At its default precision it would round float32 entries to bfloat16."""
    bias, columns = bias_of(32, 128, bidirectional=True), jnp.arange(300)
    lowered = jax.jit(bias).trace(columns, columns).lower(lowering_platforms=(platform,))
    found = [line for line in lowered.as_text().splitlines() if "dot_general" in line]
    assert len(found) == products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in found)
