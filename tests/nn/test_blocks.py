"""Remat recomputes, and changes nothing."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import compiled_as_users

from jaxllm.models.build_options import Options
from jaxllm.models.lora import LoraConfig, add_lora
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import abstract_mesh

DEPTH = {"llama": {"num_hidden_layers": 2}, "gpt2": {"n_layer": 1}}
DEPTH["t5"] = {"num_layers": 1, "num_decoder_layers": 1, "feed_forward_proj": "relu"}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "dropout", "name"),
    [
        ("llama", False, True),
        ("llama", False, "dots"),
        ("gpt2", False, True),
        ("t5", False, True),
        ("t5", False, "dots"),
        pytest.param("gpt2", True, True, marks=pytest.mark.slow),
        pytest.param("gpt2", True, "dots", marks=pytest.mark.slow),
    ],
)
def test_remat(family, dropout, name):
    """Outputs are equal bit for bit; gradients up to the order of additions; dropout is redrawn."""
    tokens = tiny.ids()
    inputs = {"decoder_input_ids": tokens} if family == "t5" else {}
    inputs["dropout_key"] = jax.random.key(0) if dropout else None

    @jax.jit
    def run(model):
        def loss_and_logits(model):
            out = model(tokens, labels=tokens, **inputs)
            return out.loss, out.logits

        return jax.value_and_grad(loss_and_logits, has_aux=True)(model)

    (plain, grads), (remat, grads_remat) = (
        run(tiny.make(family, options=Options(remat=r), **DEPTH[family])) for r in (False, name)
    )
    np.testing.assert_array_equal(plain[1], remat[1])
    other = parameters(grads_remat)
    for path, gradient in parameters(grads).items():
        np.testing.assert_allclose(gradient, other[path], rtol=1e-4, atol=1e-6, err_msg=path)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remat_in_bfloat16(family):
    """The gradients have the dtype of the weights."""
    options = Options(jnp.bfloat16, jnp.bfloat16, remat=True)
    model = tiny.make(family, options=options, **DEPTH[family])
    tokens = tiny.ids()
    inputs = {"decoder_input_ids": tokens} if family == "t5" else {}
    grad = jax.grad(lambda model: model(tokens, labels=tokens, **inputs).loss)
    assert jax.tree.leaves(jax.eval_shape(grad, model))[0].dtype == jnp.bfloat16


def count_products(jaxpr):
    """Matrix products of a jaxpr and of all within it. A printed one has equal functions once."""

    def is_jaxpr(x):
        return hasattr(x, "eqns") or hasattr(x, "jaxpr")

    count = 0
    for equation in jaxpr.eqns:
        inner = filter(is_jaxpr, jax.tree.leaves(equation.params, is_leaf=is_jaxpr))
        count += equation.primitive.name == "dot_general"
        count += sum(count_products(getattr(x, "jaxpr", x)) for x in inner)
    return count


@pytest.mark.parametrize("fsdp", [1, 4])
@pytest.mark.parametrize(
    ("lora", "repeated"),
    [(None, 0), (LoraConfig(rank=2), 0), (LoraConfig(rank=2, dora=True), 7)],
)
def test_products_are_kept(fsdp, lora, repeated):
    """With "dots" a backward pass repeats two products of attention and the two by which a TPU
    rotates queries and keys: none with weights, which on a mesh are all-gathered first, and none
    with the factors of LoRA. DoRA repeats the product with B in each of seven linear layers, and
    not the product of B and A."""
    tokens = np.ones((4, 16), np.int32)

    def products(remat):
        def model():
            plain = tiny.make("llama", options=Options(remat=remat), num_hidden_layers=1)
            return plain if lora is None else add_lora(plain, lora, key=0)

        loss = jax.grad(lambda model: model(tokens, labels=tokens).loss)
        with jax.sharding.use_abstract_mesh(abstract_mesh(fsdp=fsdp)):
            return count_products(jax.make_jaxpr(loss)(jax.eval_shape(model)).jaxpr)

    none, dots, full = products(False), products("dots"), products("full")
    assert none + 2 + 2 + repeated == dots < full


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_remat_takes_less_memory(family):
    """Memory of the compiled gradient: as XLA made it, not as it was asked to."""
    names = {
        "llama": ("num_hidden_layers",),
        "gpt2": ("n_layer",),
        "t5": ("num_layers", "num_decoder_layers"),
    }
    tokens = np.ones((8, 64), np.int32)

    def memory(remat):
        deep = dict.fromkeys(names[family], 8)
        model = tiny.make(family, options=Options(remat=remat), **deep)
        inputs = {"decoder_input_ids": tokens} if model.is_encoder_decoder else {}

        def loss(model, key):
            return model(tokens, labels=tokens, **inputs, dropout_key=key).loss

        lowered = jax.jit(jax.grad(loss)).lower(model, jax.random.key(0))
        return compiled_as_users(lowered).memory_analysis().temp_size_in_bytes

    assert memory(True) < 0.6 * memory(False)
