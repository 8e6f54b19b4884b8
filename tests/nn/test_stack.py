"""Remat recomputes, and changes nothing."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny

from jaxllm.models.options import Options
from jaxllm.models.weights import parameters


def loss_and_grads(model, tokens, key):
    inputs = {"decoder_input_ids": tokens} if model.is_encoder_decoder else {}

    @jax.jit
    @jax.value_and_grad
    def run(model):
        return model(tokens, labels=tokens, dropout_key=key, **inputs).loss

    return run(model)


DEPTH = {"llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 1}}
DEPTH["t5"] = {"num_layers": 1, "num_decoder_layers": 1, "feed_forward_proj": "relu"}


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remat(family):
    """Outputs are equal bit for bit; gradients up to the order of additions; dropout is redrawn."""
    plain, remat = (
        tiny.make(family, options=Options(remat=r), **DEPTH[family]) for r in (False, True)
    )
    np.testing.assert_array_equal(tiny.logits(plain), tiny.logits(remat))
    tokens = tiny.ids()
    key = jax.random.key(0) if family == "gpt2" else None
    (loss, grads), (loss_r, grads_r) = (loss_and_grads(m, tokens, key) for m in (plain, remat))
    np.testing.assert_allclose(loss, loss_r, rtol=1e-6)
    other = parameters(grads_r)
    for path, gradient in parameters(grads).items():
        np.testing.assert_allclose(gradient, other[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remat_keeps_less(family):
    """The backward pass holds fewer intermediate values of the blocks."""

    def kept(remat):
        model = tiny.make(family, options=Options(remat=remat))
        tokens = tiny.ids()
        inputs = {"decoder_input_ids": tokens} if model.is_encoder_decoder else {}
        _, pullback = jax.eval_shape(
            lambda m: jax.vjp(lambda m: m(tokens, labels=tokens, **inputs).loss, m), model
        )
        return sum(x.size for x in jax.tree.leaves(pullback))

    assert kept(True) < kept(False)
