"""All outputs of tiny models with every option off its default, against the reference's."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from parity_data import cases, load_case
from parity_runs import NOT_FORWARD, distances, forward, model_of

import jaxllm
from jaxllm.models.registry import FAMILIES, architecture_of
from jaxllm.models.weights import parameters

pytestmark = pytest.mark.usefixtures("highest_precision")

MODELS = [name for name in cases() if name != "tables"]
# Each kind of cached decoding once; the other cases (near relatives) take their time in test-all.
QUICK = {"llama_bias", "llama_dynamic_v5", "llama_longrope_v5", "llama_yarn_v5", "t5_relu", "umt5"}
QUICK |= {"gpt2_base", "gpt2_cross", "gpt2_inverse_layer", "t5_v11"}
QUICK |= {"mistral_window", "qwen2_window", "qwen3_window", "phi3_window", "gemma3_full"}
QUICK |= {"t5gemma_published"}
QUICK |= {"opt_full", "gpt_neo_full", "gptj_full", "bloom_full"}
GENERATE = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in MODELS
    if "generate" in load_case(name).calls
]
BEAMS = [name for name in MODELS if "generate_beams" in load_case(name).calls]
GRADIENTS = [name for name in MODELS if "grad" in load_case(name).calls]


@pytest.mark.parametrize("name", MODELS)
def test_outputs(name):
    case = load_case(name)
    model = model_of(name)
    for label, call in case.calls.items():
        if label.startswith(NOT_FORWARD):
            continue
        out = forward(model, call)
        std = float(np.std(call.outputs.get("logits", 1.0))) or 1.0
        for output, distance in distances(call, out, std).items():
            assert distance < 1e-4, (label, output)


@pytest.mark.parametrize("name", GENERATE)
def test_greedy_tokens(name):
    call = load_case(name).calls["generate"]
    inputs = {k: v for k, v in call.inputs.items() if k != "max_new_tokens"}
    out = jaxllm.generate(
        model_of(name),
        **inputs,
        max_new_tokens=int(call.inputs["max_new_tokens"]),
        eos_token_id=None,
        do_sample=False,
        output_logits=True,
    )
    np.testing.assert_array_equal(out.sequences, call.outputs["sequences"])
    logits = np.stack(out.logits, axis=1)
    expected = call.outputs["logits"]
    assert np.abs(logits - expected).max() < 1e-4 * max(1.0, expected.std())


@pytest.mark.ci
@pytest.mark.parametrize("name", BEAMS)
def test_beams(name):
    call = load_case(name).calls["generate_beams"]
    inputs = {k: v for k, v in call.inputs.items() if k != "max_new_tokens"}
    out = jaxllm.generate(
        model_of(name),
        **inputs,
        max_new_tokens=int(call.inputs["max_new_tokens"]),
        num_beams=3,
        num_return_sequences=2,
        length_penalty=0.7,
    )
    width = call.outputs["sequences"].shape[1]
    np.testing.assert_array_equal(out.sequences[:, :width], call.outputs["sequences"])
    np.testing.assert_allclose(out.sequences_scores, call.outputs["sequences_scores"], atol=1e-4)


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name):
    case = load_case(name)
    call, model = case.calls["grad"], model_of(name)

    @jax.jit
    @jax.value_and_grad
    def loss_of(model):
        return model(**call.inputs).loss

    loss, grads = loss_of(model)
    np.testing.assert_allclose(loss, call.outputs["loss"], atol=1e-5)
    model_type, _ = architecture_of(model)
    ours = parameters(grads)
    entries = FAMILIES[model_type].table(model.config).for_model(ours)
    actual = {e.tensor: e.join([np.asarray(ours[o]) for o in e.parameters]) for e in entries}
    expected = {k.removeprefix("grad/"): v for k, v in call.outputs.items() if "grad/" in k}
    for parameter, gradient in expected.items():
        largest = np.abs(gradient).max()
        difference = np.abs(actual[parameter] - gradient).max()
        assert difference < 1e-4 * max(largest, 1e-2), parameter
