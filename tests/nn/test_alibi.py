"""ALiBi: slopes of any number of heads, and the same bias in all forms of attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxllm.common.errors import InputError
from jaxllm.models.build_options import Options
from jaxllm.nn.positions import Alibi, alibi_slopes

pytestmark = pytest.mark.usefixtures("highest_precision")

COLUMNS = 300


def ragged_mask() -> np.ndarray:
    """Padding on the left, on the right, and inside of a row."""
    mask = np.ones((3, COLUMNS), np.int32)
    mask[0, :50] = mask[1, -40:] = mask[2, 100:130] = 0
    return mask


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (5, [0.25, 0.0625, 0.015625, 0.0039062, 0.5]),
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.0039062]),
        (12, [0.5**i for i in range(1, 9)] + [0.7071068, 0.3535534, 0.1767767, 0.0883883]),
    ],
)
def test_slopes(heads, slopes):
    """Of the reference."""
    np.testing.assert_allclose(alibi_slopes(heads), slopes, atol=1e-7)


def test_slopes_of_the_largest_bloom():
    slopes = alibi_slopes(112)
    np.testing.assert_array_equal(slopes[:64], alibi_slopes(64))
    np.testing.assert_array_equal(slopes[64:], alibi_slopes(128)[::2][:48])


def test_distances_are_exact_in_long_texts():
    index = jnp.array([[2**20, 2**20 + 3]])
    bias = Alibi(8)(index, index)
    np.testing.assert_array_equal(bias[0, 0], [[0, 1.5], [-1.5, 0]])


@pytest.mark.ci
@pytest.mark.parametrize("implementation", ["blockwise", "xla"])
def test_every_implementation_has_the_bias(implementation):
    mask, ids = ragged_mask(), tiny.ids(3, COLUMNS)
    results = []
    for name in ("eager", implementation):
        model = tiny.make("bloom", options=Options(attn_implementation=name))
        labels = np.where(mask, ids, -100)

        @jax.jit
        @jax.value_and_grad
        def loss(model, labels=labels):
            return model(ids, mask, labels=labels).loss

        logits = tiny.logits(model, ids, attention_mask=mask)[mask.astype(bool)]
        results.append((logits, loss(model)))
    (expected, (loss, gradients)), (actual, (other_loss, others)) = results
    np.testing.assert_allclose(actual, expected, atol=1e-4 * expected.std())
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    leaves = zip(jax.tree.leaves(others), jax.tree.leaves(gradients), strict=True)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradients))
    for other, gradient in leaves:
        np.testing.assert_allclose(other, gradient, atol=1e-5 * largest)


@pytest.mark.ci
def test_layers_in_a_scan_and_recomputed():
    mask, ids = ragged_mask()[:, -60:], tiny.ids(3, 60)
    expected = tiny.logits(tiny.cached("bloom"), ids, attention_mask=mask)
    for options in (Options(scan_layers=True), Options(remat=True)):
        model = tiny.make("bloom", options=options)
        actual = tiny.logits(model, ids, attention_mask=mask)
        np.testing.assert_allclose(actual, expected, atol=1e-5 * expected.std())


def test_positions_are_refused():
    """The reference takes them and does nothing with them."""
    with pytest.raises(InputError, match=r"^position_ids: this model has none"):
        tiny.cached("bloom")(tiny.ids(2, 4), position_ids=np.arange(4)[None])
