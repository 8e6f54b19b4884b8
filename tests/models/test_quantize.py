"""Quantized models: their logits, what decodes with them, their files, and what refuses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from devices import on_devices

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.models.lora import add_lora, module_at
from jaxllm.models.quantize import FORMATS, formats_of, quantize_model
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.training.state import TrainState

ERROR = {"int8": 0.05, "int4": 0.8}
"""Root mean square of the change that a format may cause in the logits of a tiny model, in standard
deviations of the logits. Its rows are short and its weights large; docs/quantization.md has the
change of a real model."""


def calm(family: str, **changes: Any) -> Any:
    """A tiny model; T5's queries, which it does not scale, are divided by 3, so that a small change
    of the weights is a small change of the logits. For the same reason all experts are chosen. The
    std of its logits is 1 or more."""
    config = tiny.CONFIGS[family]
    if "num_experts_per_tok" in config:
        experts = config.get("num_experts", config.get("num_local_experts"))
        changes["num_experts_per_tok"] = experts
    model = tiny.make(family, **changes)
    if family != "t5":
        return model
    weights = parameters(model)
    queries = ("attn.q.weight", "cross.q.weight")
    changed = {path: x / 3 for path, x in weights.items() if path.endswith(queries)}
    changed["decoder.norm.weight"] = weights["decoder.norm.weight"] * 5
    return with_parameters(model, changed)


def dequantized(model: Any, quantized: Any) -> Any:
    """The float model with the values of the quantized one."""
    layers = {path: module_at(quantized, path) for path in formats_of(quantized)}
    return with_parameters(
        model, {f"{path}.weight": tiny.values(layer) for path, layer in layers.items()}
    )


UNTIED = ("llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "gemma2", "phi3", "gptj")


@pytest.mark.by_default("mistral-int8")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_logits(name, family):
    model = calm(family, tie_word_embeddings=family not in UNTIED)
    quantized = quantize_model(model, name)
    plain, out = tiny.logits(model), tiny.logits(quantized)
    std = plain.std()
    assert std >= 1
    assert np.abs(out - tiny.logits(dequantized(model, quantized))).max() < 2e-3 * std
    assert 1e-3 < np.sqrt(np.mean((out - plain) ** 2)) / std < ERROR[name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    jaxllm.save_hf(path, tiny.cached("llama"))
    return path


@pytest.mark.ci
@pytest.mark.parametrize("name", FORMATS)
def test_everything_decodes_as_a_call_does(folder, tmp_path, name):
    model, _ = jaxllm.load(folder, quantize=name)
    prompt = tiny.ids(1, 5)
    out = jaxllm.generate(model, prompt, max_new_tokens=6, min_new_tokens=6)
    sequence = np.asarray(out.sequences)
    steps = np.asarray(model(sequence).logits)[0, 4:-1].copy()
    greedy = sequence[0, 5:].tolist() == steps.argmax(-1).tolist()
    steps[:, model.config.eos_token_ids] = -np.inf
    assert sequence[0, 5:].tolist() == steps.argmax(-1).tolist()
    arguments: dict[str, Any] = {"max_new_tokens": 6, "min_new_tokens": 6}
    streamed = np.concatenate([np.asarray(t) for t in jaxllm.stream(model, prompt, **arguments)])
    assert streamed.ravel().tolist() == sequence[0, 5:].tolist()
    (row,) = BatchGenerator(model, slots=2).generate([{"input_ids": prompt[0], **arguments}])
    assert row.output_ids[0] == sequence[0, 5:].tolist()
    scores = jaxllm.score(model, prompt.tolist(), sequence[:, 5:].tolist())
    assert scores.is_greedy == [greedy]

    jaxllm.save_orbax(tmp_path / "saved", model)
    again, _ = jaxllm.load_orbax(tmp_path / "saved")
    assert formats_of(again) == formats_of(model)
    for path, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(model)[path], err_msg=path)


def test_what_is_quantized(folder):
    plain, _ = jaxllm.load(folder)
    model, _ = jaxllm.load(folder, quantize="int8")
    expected = parameters(quantize_model(plain, "int8"))
    for path, x in parameters(model).items():
        np.testing.assert_array_equal(x, expected[path], err_msg=path)
    assert expected["lm_head.matrix.values"].dtype == jnp.int8
    kept, _ = jaxllm.load(folder, quantize="int8", quantize_embeddings=False)
    assert not {"lm_head", "backbone.embed"} & formats_of(kept).keys()
    assert len(formats_of(kept)) == len(formats_of(model)) - 2


def test_what_refuses_quantized_weights(folder, tmp_path):
    model, _ = jaxllm.load(folder, quantize="int8")
    with pytest.raises(UnsupportedError, match=r"save_hf: .*quantized weights; use save_orbax"):
        jaxllm.save_hf(tmp_path, model)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(InputError, match="training: the weights are quantized"):
        TrainState.create(model, optax.sgd(0.1))
    for refuse in (add_lora, lambda model: quantize_model(model, "int8")):
        with pytest.raises(InputError, match="quantized; load it without quantize="):
            refuse(model)
    with pytest.raises(InputError, match=r"resize_token_embeddings.*quantized"):
        model.resize_token_embeddings(60)
    with pytest.raises(InputError, match="quantize: unknown 'int3'; known: int8, int4, keep"):
        jaxllm.load(folder, quantize="int3")
    with pytest.raises(InputError, match=r"allow_nonfinite cannot be combined with quantize"):
        jaxllm.load(folder, quantize="int8", allow_nonfinite=True)


MESH = """
import sys
import jax, numpy as np
import tiny_meshes
import jaxllm
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import parameter_sharding
jaxllm.save_hf(sys.argv[1], tiny_meshes.make("llama"))
prompt = np.array([[3, 4, 5, 6], [7, 8, 9, 10]])
for name in sys.argv[2:]:
    here, _ = jaxllm.load(sys.argv[1], quantize=name)
    mesh = tiny_meshes.mesh(data=2, fsdp=2, tensor=2)
    there, _ = jaxllm.load(sys.argv[1], quantize=name, mesh=mesh)
    for path, x in parameters(there).items():
        assert x.sharding == parameter_sharding(path, x.shape, mesh), path
        np.testing.assert_array_equal(x, parameters(here)[path])
    leaf = {"int8": "values", "int4": "groups"}[name]
    values = parameters(there)[f"backbone.stack.blocks.0.attn.o.matrix.{leaf}"]
    shards = 4 if name == "int8" else 2  # rows of 32 are one group of int4
    assert values.addressable_shards[0].data.size == values.size // shards, values.sharding
    tokens = [jaxllm.generate(m, prompt, max_new_tokens=8).sequences for m in (here, there)]
    np.testing.assert_array_equal(*tokens)
print("done")
"""


@pytest.mark.ci
@pytest.mark.parametrize("name", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_on_a_mesh(tmp_path, name):
    on_devices(MESH, str(tmp_path), name)


@pytest.mark.ci
@pytest.mark.parametrize(("name", "bits"), [("int4", 4)])
def test_planned_bytes(name, bits):
    config = tiny.CONFIGS["llama"] | {"hidden_size": 128, "intermediate_size": 256}
    plain, quantized = (
        jaxllm.plan(config, "cpu", batch=1, prompt=4, new=4, quantize=q, program="decode").programs[
            0
        ]
        for q in (None, name)
    )
    ratio = quantized.weight_bytes / plain.weight_bytes
    assert bits / 16 < ratio < bits / 16 + 0.1
