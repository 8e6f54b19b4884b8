"""Writes of new columns into a cache: what they hold, and what XLA makes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxllm.cache.kv_cache import write_columns, write_heads
from jaxllm.models.build_options import Options

B, K, S, H = 3, 2, 7, 4
SLOTS = {
    "all rows": np.int32(2),
    "per row": np.array([0, 5, 3], np.int32),
    "per row, beyond the end": np.array([6, 7, 20], np.int32),
    "per column": np.array([[4, 1], [6, 0], [2, 3]], np.int32),
    "per column, some dropped": np.array([[7, 1], [7, 7], [30, 30]], np.int32),
}


def written(old: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """`old` [B, K, S, H] with the columns `new` [B, T, K, H], one at a time."""
    old = old.copy()
    rows, columns = new.shape[:2]
    if slots.ndim < 2:
        slots = np.broadcast_to(slots, (rows,))[:, None] + np.arange(columns)
    for row in range(rows):
        for column in range(columns):
            if slots[row, column] < S:
                old[row, :, slots[row, column]] = new[row, column]
    return old


@pytest.mark.by_default(
    "False-all rows",
    "False-per column, some dropped",
    "False-per row, beyond the end",
    "True-per column, some dropped",
)
@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("merged", [True, False])
def test_columns_are_written_to_their_slots(name, merged):
    random = np.random.default_rng(0)
    old, new = random.normal(size=(B, K, S, H)), random.normal(size=(B, 2, K, H))
    old, new = old.astype(np.float32), new.astype(np.float32)
    expected = written(old, new, SLOTS[name])
    shape = (B * K, S, H) if merged else old.shape
    out = write_heads(jnp.asarray(old).reshape(shape), jnp.asarray(new), jnp.asarray(SLOTS[name]))
    np.testing.assert_array_equal(np.reshape(out, old.shape), expected)


@pytest.mark.parametrize("name", SLOTS)
@pytest.mark.parametrize("shape", [(B * K, S, H), (B, K, S, H)])
def test_a_tpu_can_write_all_rows_at_once(name, shape):
    """Without the promise of unique indices its compiler writes the rows in a serial loop."""
    new, slots = jnp.ones((B, 2, K, H)), jnp.asarray(SLOTS[name])
    traced = jax.jit(write_heads).trace(jnp.zeros(shape), new, slots)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "while" not in text
    scatters = int(slots.ndim > 0)
    assert text.count('"stablehlo.scatter"(') == scatters
    assert text.count("unique_indices = true") == scatters


@pytest.mark.ci
def test_a_mask_is_written_like_keys():
    mask = write_columns(jnp.zeros((B, S), bool), jnp.ones((B, 1), bool), jnp.array([0, 3, 6]))
    np.testing.assert_array_equal(np.argwhere(mask), [[0, 0], [1, 3], [2, 6]])


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("t5"))
def test_a_model_for_tpus_has_a_cache_with_an_axis_of_heads(family: str) -> None:
    """Scores and sums are then products across heads, and the sequences are the same."""
    depth = {"num_layers": 1, "num_decoder_layers": 1} if family == "t5" else {}
    merged = tiny.make(family, **depth)
    model = tiny.make(
        family, options=Options(attn_implementation="splash", platform="tpu"), **depth
    )
    cache, plain = (x.decoder_stack.cache_has_head_axis for x in (model, merged))
    assert (cache, plain) == (True, False)
    ids, settings = tiny.ids(), {"max_new_tokens": 6, "num_beams": 2, "do_sample": False}
    actual, expected = (x.generate(ids, **settings).sequences for x in (model, merged))
    np.testing.assert_array_equal(actual, expected)
