"""Layers in a scan give what unrolled ones give."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from devices import on_devices

import jaxllm
from jaxllm.models.build_options import Options
from jaxllm.models.lora import LoraConfig, add_lora
from jaxllm.models.weights import parameters

DEPTH = {
    "llama": {"num_hidden_layers": 3},
    "gpt2": {"n_layer": 3},
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
}


def models(family, *, remat=False, dtype=jnp.float32, **fields):
    """The same model unrolled and scanned."""
    fields = DEPTH.get(family, {}) | fields
    return [
        tiny.make(family, options=Options(dtype, remat=remat, scan_layers=scan), **fields)
        for scan in (False, True)
    ]


def losses_and_gradients(model, **inputs):
    tokens = tiny.ids()

    def loss_and_logits(model):
        out = model(tokens, labels=tokens, **inputs)
        return out.loss, out.logits

    return jax.jit(jax.value_and_grad(loss_and_logits, has_aux=True))(model)


def assert_equal_results(first, second):
    ((loss, logits), gradients), ((other_loss, other_logits), others) = first, second
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(other_logits, logits, atol=1e-5 * float(jnp.std(logits)), rtol=1e-5)
    others = parameters(others)
    scale = max(float(jnp.std(x)) for x in others.values())
    for path, gradient in parameters(gradients).items():
        np.testing.assert_allclose(
            others[path], gradient, atol=1e-5 * scale, rtol=1e-4, err_msg=path
        )


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "remat"),
    [
        ("llama", True),
        pytest.param("llama", False, marks=pytest.mark.slow),
        pytest.param("t5", True, marks=pytest.mark.slow),
        pytest.param("gpt2", True, marks=pytest.mark.slow),
        pytest.param("t5", False, marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_with_dropout(family, remat):
    plain, scanned = models(family, remat=remat)
    assert parameters(plain).keys() == parameters(scanned).keys()
    inputs = {"dropout_key": jax.random.key(1)}
    inputs |= {"decoder_input_ids": tiny.ids()} if family == "t5" else {}
    assert_equal_results(*(losses_and_gradients(m, **inputs) for m in (plain, scanned)))


@pytest.mark.slow
def test_layers_with_and_without_lora():
    config = LoraConfig(targets=("blocks.[01].attn.(q|v)",))
    results = [
        losses_and_gradients(add_lora(model, config, key=0))
        for model in models("llama", num_hidden_layers=4)
    ]
    assert_equal_results(*results)


ON_A_MESH = """
import jax
from test_layer_scan import assert_equal_results, losses_and_gradients, models
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import make_mesh, use_mesh

mesh = make_mesh(fsdp=2)
results = []
for model in models("llama", remat=True):
    with use_mesh(mesh):
        results.append(losses_and_gradients(put_tree(model, mesh)))
assert_equal_results(*results)
"""


@pytest.mark.slow
def test_layers_on_a_mesh():
    folder = str(Path(__file__).parent)
    on_devices(f"import sys; sys.path.insert(0, {folder!r})" + ON_A_MESH, devices=2)


@pytest.mark.slow
def test_hidden_states_and_attentions():
    out, other = (
        model(tiny.ids(), output_hidden_states=True, output_attentions=True)
        for model in models("gpt2")
    )
    for name in ("hidden_states", "attentions"):
        assert len(out[name]) == len(other[name])
        for x, y in zip(out[name], other[name], strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.by_default("llama")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_scans_of_equal_layers(family):
    """One scan for each stack."""
    _, scanned = models(family, dtype=jnp.bfloat16)
    inputs = {"decoder_input_ids": tiny.ids()} if family == "t5" else {}
    jaxpr = str(jax.make_jaxpr(lambda model: model(tiny.ids(), **inputs).logits)(scanned))
    assert jaxpr.count(" scan[") == (2 if family == "t5" else 1)


@pytest.mark.parametrize(
    ("family", "layers", "scans"),
    [("gemma2", 6, 1), ("gemma2", 5, 1), pytest.param("gemma3_text", 6, 1, marks=pytest.mark.ci)],
)
def test_scans_of_alternating_layers(family, layers, scans):
    """Windows in every other layer, and RoPEs: the scan's body is one period of the pattern."""
    plain, scanned = models(family, num_hidden_layers=layers)
    jaxpr = str(jax.make_jaxpr(lambda model: model(tiny.ids()).logits)(scanned))
    assert jaxpr.count(" scan[") == scans
    assert jaxpr.count("name=__call__") == 2 + layers % 2
    np.testing.assert_allclose(tiny.logits(scanned), tiny.logits(plain), atol=1e-4)


@pytest.mark.slow
def test_decoding_with_a_cache():
    plain, scanned = (
        jaxllm.generate(model, tiny.ids(), max_new_tokens=6, eos_token_id=None).sequences
        for model in models("llama")
    )
    np.testing.assert_array_equal(plain, scanned)
