"""Options of a forward call, beyond what the stored reference covers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jaxllm.common.errors import InputError
from jaxllm.models.build_options import Options
from jaxllm.models.losses import classification_loss, token_loss
from jaxllm.models.outputs import BaseOutput
from jaxllm.models.weights import parameters
from jaxllm.nn.block import clamp_to_float16

pytestmark = pytest.mark.usefixtures("highest_precision")


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_fused_attention_is_equal(family):
    mask = np.ones((2, 9), int)
    mask[0, :4] = 0
    eager, fused = (
        tiny.make(family, options=Options(attn_implementation=i)) for i in ("eager", "xla")
    )
    a, b = (tiny.logits(m, attention_mask=mask) for m in (eager, fused))
    np.testing.assert_allclose(a, b, atol=5e-5)


@pytest.mark.ci
def test_fused_attention_gives_weights_when_asked():
    """Such a call is written out."""
    model = tiny.make("llama", options=Options(attn_implementation="xla"))
    out = model(tiny.ids(), output_attentions=True)
    np.testing.assert_allclose(out.attentions[0].sum(-1), 1, rtol=1e-5)


def decoder(model):
    return {"decoder_input_ids": tiny.ids()} if model.is_encoder_decoder else {}


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_embeddings_are_ids(family):
    model, ids = tiny.cached(family), tiny.ids()
    table = model.shared if family == "t5" else model.backbone.embed
    vectors = table.weight[...][ids]
    actual = model(inputs_embeds=vectors, **decoder(model)).logits
    np.testing.assert_array_equal(actual, model(ids, **decoder(model)).logits)
    if family == "t5":
        actual = model(ids, decoder_inputs_embeds=vectors).logits
        np.testing.assert_array_equal(actual, model(ids, decoder_input_ids=ids).logits)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_float32_embeddings_do_not_widen_a_bfloat16_model(family):
    options = Options(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    model = tiny.make(family, options=options)
    vectors = np.random.default_rng(0).standard_normal((2, 9, 32)).astype(np.float32)
    out = model(inputs_embeds=vectors, output_hidden_states=True, **decoder(model))
    states = out.encoder_hidden_states if family == "t5" else out.hidden_states
    assert states[0].dtype == jnp.bfloat16
    assert out.logits.dtype == jnp.float32


@pytest.mark.in_ci("3-llama", "3-t5", "keep1-t5", "keep3-llama")
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("keep", [3, np.int64(3), np.array(3), [6, 7, 8], np.array([-3, -2, -1])])
def test_logits_to_keep(family, keep):
    model = tiny.cached(family)
    every = model(tiny.ids(), **decoder(model)).logits
    assert np.array_equal(model(tiny.ids(), logits_to_keep=0, **decoder(model)).logits, every)
    actual = model(tiny.ids(), logits_to_keep=keep, **decoder(model)).logits
    np.testing.assert_allclose(actual, every[:, -3:], atol=1e-5)


@pytest.mark.ci
def test_labels_are_shifted_for_a_decoder_and_not_for_t5():
    ids = tiny.ids()
    labels = ids.copy()
    labels[0, :3] = -100
    for family in ("llama", "gpt2"):
        out = tiny.cached(family)(ids, labels=labels)
        log_probs = jax.nn.log_softmax(out.logits)
        picked = [
            log_probs[b, t - 1, labels[b, t]]
            for b in range(2)
            for t in range(1, 9)
            if labels[b, t] != -100
        ]
        np.testing.assert_allclose(out.loss, -np.mean(picked), rtol=1e-5)
    t5 = tiny.cached("t5")
    out = t5(ids, labels=labels)
    log_probs = jax.nn.log_softmax(out.logits)
    picked = [log_probs[b, t, labels[b, t]] for b, t in np.argwhere(labels != -100)]
    np.testing.assert_allclose(out.loss, -np.mean(picked), rtol=1e-5)
    inputs = np.hstack([np.zeros((2, 1), int), np.where(labels == -100, 0, labels)[:, :-1]])
    np.testing.assert_array_equal(t5(ids, decoder_input_ids=inputs).logits, out.logits)


@pytest.mark.ci
def test_a_loss_over_nothing_is_zero_and_so_is_its_gradient():
    logits, labels = jnp.ones((2, 3, 5)), jnp.full((2, 3), -100)
    loss, gradient = jax.value_and_grad(token_loss)(logits, labels)
    assert loss == 0
    assert (gradient == 0).all()


@pytest.mark.ci
def test_classification_losses():
    logits = jnp.array([[0.5, -1.0, 2.0], [0.0, 0.3, -0.2]])
    ids, targets = np.array([2, 0]), np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]], np.float32)
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-logits))
    cross = -np.log(probabilities[[0, 1], ids]).mean()
    binary = -np.mean(targets * np.log(sigmoid) + (1 - targets) * np.log(1 - sigmoid))
    square = np.mean((logits - targets) ** 2)
    single, multi = "single_label_classification", "multi_label_classification"
    for expected, labels, problem in (
        (cross, ids, None),
        (cross, ids[:, None], single),
        (-np.log(probabilities[0, 2]), np.array([2, -100]), single),
        (binary, targets, None),
        (binary, targets.astype(int), multi),
        (binary, targets.astype(bool), None),
        (square, targets, "regression"),
    ):
        np.testing.assert_allclose(classification_loss(logits, labels, problem), expected, 1e-5)
    one = classification_loss(logits[:, :1], np.array([1, 2]), None)
    np.testing.assert_allclose(one, ((0.5 - 1) ** 2 + (0 - 2) ** 2) / 2, rtol=1e-6)


@pytest.mark.ci
def test_encoder_outputs_are_reused():
    model, ids = tiny.cached("t5"), tiny.ids()
    mask = np.arange(9)[None] < [[9], [5]]
    options = {"output_hidden_states": True, "output_attentions": True}
    full = model(ids, mask, ids, **options)
    encoder = BaseOutput(
        last_hidden_state=full.encoder_last_hidden_state,
        hidden_states=full.encoder_hidden_states,
        attentions=full.encoder_attentions,
    )
    for given in (encoder, full.encoder_last_hidden_state):
        again = model(encoder_outputs=given, attention_mask=mask, decoder_input_ids=ids, **options)
        np.testing.assert_array_equal(again.logits, full.logits)
    assert again.encoder_hidden_states is None
    both = model(encoder_outputs=encoder, attention_mask=mask, decoder_input_ids=ids)
    assert both.encoder_hidden_states is encoder.hidden_states
    assert both.encoder_attentions is encoder.attentions


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_call_inside_jit_is_equal(family):
    """Outputs are pytrees, so they leave the jit whole."""
    model, ids = tiny.cached(family), jnp.asarray(tiny.ids())
    inputs = {"decoder_input_ids": ids} if family == "t5" else {}
    call = jax.jit(lambda m, ids: m(ids, labels=ids, output_hidden_states=True, **inputs))
    inside, outside = call(model, ids), model(ids, labels=ids, **inputs)
    np.testing.assert_allclose(inside.logits, outside.logits, atol=2e-5)
    np.testing.assert_allclose(inside.loss, outside.loss, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "xglm", "t5"])
def test_arguments_that_a_call_has_not(family):
    model = tiny.cached(family)
    message = rf"atention_mask: no argument of a {type(model).__name__}, which has attention_mask, "
    with pytest.raises(InputError, match=message):
        model(tiny.ids(), atention_mask=np.ones((2, 9), int))


def test_explicit_positions():
    for family in ("llama", "gpt2"):
        model, ids = tiny.cached(family), tiny.ids()
        plain = tiny.logits(model, ids)
        same = tiny.logits(model, ids, position_ids=np.arange(9)[None])
        np.testing.assert_array_equal(plain, same)
        spread = tiny.logits(model, ids, position_ids=np.arange(9)[None].repeat(2, 0) * 2)
        assert np.abs(plain - spread).max() > 1e-2
        packed = np.arange(9)[None] % 4
        with pytest.raises(InputError, match="for packed documents give segment_ids"):
            model(ids, position_ids=packed)
        model(ids, np.ones_like(ids), position_ids=packed)


@pytest.mark.ci
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_t5_is_finite_on_large_activations(dtype):
    """The feed-forward output passes 65504, and the squares of the stream do by far."""
    options = Options(dtype=dtype, param_dtype=dtype)
    model, exact = tiny.make("t5", options=options), tiny.make("t5")
    for m in (model, exact):
        for block in m.encoder.blocks:
            block.mlp.up.weight[...] *= 40
            block.mlp.down.weight[...] *= 250
    logits = tiny.logits(model)
    assert np.isfinite(logits).all()
    states = model(tiny.ids(), decoder_input_ids=tiny.ids(), output_hidden_states=True)
    loudest = max(float(jnp.abs(s).max()) for s in states.encoder_hidden_states)
    assert loudest > 65504
    distance = np.abs(logits - tiny.logits(exact)).max()
    assert distance < {jnp.bfloat16: 1.0, jnp.float16: 0.1}[dtype] * logits.std()


def test_clamp():
    top = float(jnp.finfo(jnp.float16).max)
    x = jnp.array([jnp.inf, -jnp.inf, 1.0], jnp.float16)
    np.testing.assert_allclose(clamp_to_float16(x), [top - 1000, 1000 - top, 1.0], atol=32)
    np.testing.assert_array_equal(clamp_to_float16(x[2:] * top), [top])
    for dtype in (jnp.float32, jnp.bfloat16):
        loud = jnp.array([1e6, -1e6], dtype)
        np.testing.assert_array_equal(clamp_to_float16(loud), loud)


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_two_models_of_one_config_share_a_program(family):
    """Static attributes are compared by value: another set of weights compiles nothing."""
    traces = []

    @jax.jit
    def run(model, ids):
        traces.append(1)
        return model(ids, **({"decoder_input_ids": ids} if family == "t5" else {})).logits

    ids = jnp.asarray(tiny.ids())
    a, b = run(tiny.make(family, seed=1), ids), run(tiny.make(family, seed=2), ids)
    assert len(traces) == 1
    assert np.abs(a - b).max() > 0.1


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_parameter_has_a_path_and_acts(family):
    """A gradient for each: none is left out of the forward pass."""
    model, ids = tiny.cached(family), tiny.ids()
    inputs = {"decoder_input_ids": ids} if family == "t5" else {}
    grads = jax.jit(jax.grad(lambda m: m(ids, labels=ids, **inputs).loss))(model)
    for path, gradient in parameters(grads).items():
        if path.endswith("attn.k.bias"):
            continue  # GPT-2: a constant over the keys, which softmax does not see
        assert float(jnp.abs(gradient).max()) > 1e-8, path
