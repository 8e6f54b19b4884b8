"""What every family of the registry can do: train, save, shard, quantize, and be found in the docs.

A family that is added to the registry is tested here without a change of this file; it needs a tiny
config in `tests/support/tiny.py`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from devices import on_devices

import jaxllm
from jaxllm.checkpoint.peft import load_adapter, save_adapter
from jaxllm.models.lora import LoraConfig, add_lora, lora_layers, merge_lora
from jaxllm.models.quantize import FLOAT_LAYERS, formats_of, quantize_model
from jaxllm.models.registry import FAMILIES
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.parallel.sharding import logical_axes
from jaxllm.training.losses import TokenLoss
from jaxllm.training.monitor.flops import model_flops

MODELS = Path(__file__).parents[2] / "docs" / "models.md"
every_family = pytest.mark.parametrize("family", FAMILIES)


def config_of(family: str) -> dict[str, Any]:
    """The family's tiny config; mT5 and umT5 have T5's."""
    base = family if family in tiny.CONFIGS else "t5"
    return {**tiny.CONFIGS[base], "model_type": family}


def model_of(family: str, **changes: Any) -> Any:
    return tiny.make(config_of(family), **changes)


def batch_of(model: Any) -> dict[str, Any]:
    batch = {"input_ids": tiny.ids(3, 12), "labels": tiny.ids(3, 12, seed=1)}
    batch["labels"][0, 5:] = -100
    return batch


@pytest.mark.by_default("gemma2", "t5")
@every_family
def test_the_loss_is_the_same_in_all_forms(family: str) -> None:
    """Of a call, of training, and of training in chunks of columns, as are its gradients."""
    model = model_of(family)
    batch = batch_of(model)
    labels = np.asarray(batch["labels"])

    def called(model: Any) -> Any:
        return model(batch["input_ids"], labels=labels).loss

    def trained(model: Any, max_logits: int) -> Any:
        inputs = {"input_ids": batch["input_ids"]}
        shifted = labels
        if model.is_encoder_decoder:
            inputs["decoder_input_ids"] = model.shift_right(labels)
        else:
            shifted = np.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=-100)
        sums = TokenLoss(max_logits=max_logits).of_model(model, inputs, shifted, None)
        return sums.loss / sums.count

    expected, gradients = jax.value_and_grad(called)(model)
    for max_logits in (10**6, 3 * model.config.vocab_size * 4):
        actual, others = jax.value_and_grad(trained)(model, max_logits)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        scale = max(float(jnp.abs(gradient).max()) for gradient in parameters(gradients).values())
        for path, gradient in parameters(gradients).items():
            other = parameters(others)[path]
            np.testing.assert_allclose(other, gradient, atol=1e-5 * scale, err_msg=path)


@pytest.mark.by_default("gemma2", "t5")
@every_family
def test_every_matrix_is_sharded_and_quantized(family: str) -> None:
    model = model_of(family)
    quantized = formats_of(quantize_model(model, "int8"))
    for path, x in parameters(model).items():
        if x.ndim >= 2 and path.endswith(".weight"):
            assert len(logical_axes(path)) == x.ndim, path
            layer = path.removesuffix(".weight")
            assert (layer in quantized) != (layer.rpartition(".")[2] in FLOAT_LAYERS), path
    assert jnp.isfinite(tiny.logits(quantize_model(model, "int8"))).all()


@pytest.mark.by_default("gemma2", "t5")
@every_family
def test_lora_on_every_projection(family: str, tmp_path: Path) -> None:
    model = model_of(family)
    adapted = add_lora(model, LoraConfig(rank=2))
    layer = r".*\.((attn|cross|mlp)\.(q|k|v|o|gate|up|down)|project_(in|out))"
    matrix = re.compile(rf"{layer}\.weight")
    assert {f"{path}.weight" for path in lora_layers(adapted)} == {
        path for path in parameters(model) if matrix.fullmatch(path)
    }
    lora = {path: x + 0.1 for path, x in parameters(adapted).items() if ".lora_" in path}
    random = with_parameters(adapted, lora)
    save_adapter(tmp_path / "adapter", random)
    again = load_adapter(model, tmp_path / "adapter")
    expected = tiny.logits(random)
    np.testing.assert_allclose(tiny.logits(again), expected, atol=1e-5 * expected.std())
    merged = merge_lora(adapted)
    assert parameters(merged).keys() == parameters(model).keys()
    np.testing.assert_allclose(tiny.logits(merged), tiny.logits(model), atol=1e-5)


@pytest.mark.by_default("gemma2", "t5")
@every_family
def test_saved_files_are_read_again(family: str, tmp_path: Path) -> None:
    """Hugging Face's, of which a second saving is equal to the byte, and Orbax's."""
    model = model_of(family)
    jaxllm.save_hf(tmp_path / "first", model)
    again = jaxllm.load(tmp_path / "first")[0]
    jaxllm.save_hf(tmp_path / "second", again)
    for name in ("config.json", "model.safetensors"):
        first, second = ((tmp_path / folder / name).read_bytes() for folder in ("first", "second"))
        assert first == second
    jaxllm.save_orbax(tmp_path / "orbax", model)
    restored = jaxllm.load_orbax(tmp_path / "orbax")[0]
    for path, x in parameters(model).items():
        np.testing.assert_array_equal(parameters(again)[path], x)
        np.testing.assert_array_equal(parameters(restored)[path], x)
    saved = json.loads((tmp_path / "first" / "config.json").read_text())["model_type"]
    assert saved == ("t5" if family == "mt5" else family)  # the same architecture


@every_family
def test_flops_count_the_matrices_of_each_token(family: str) -> None:
    """6 for each element, except of positions and untied embeddings, which are looked up. Of
    experts those that a token goes to count."""
    model = model_of(family)
    fields = tiny.CONFIGS.get(family, {})
    experts = fields.get("num_experts", fields.get("num_local_experts", 1))
    chosen = fields.get("num_experts_per_tok", 1)
    sizes = {path: x.size for path, x in parameters(model).items() if path.endswith(".weight")}
    looked_up = ("positions.weight", "table.weight")
    embeddings = ("embed.weight", "shared.weight")
    head = None if model.lm_head is not None else jax.tree.leaves(model.embedding)[0]
    counted = sum(
        size
        for path, size in sizes.items()
        if parameters(model)[path].ndim == 2
        and not path.endswith(looked_up)
        and (parameters(model)[path] is head or not path.endswith(embeddings))
    )
    counted += sum(size for path, size in sizes.items() if ".expert_" in path) * chosen // experts
    flops = model_flops(model)
    assert flops.per_token + flops.per_source_token == pytest.approx(6 * counted)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["gemma2", *tiny.FAMILIES])
def test_a_plan_for_this_machine(family: str) -> None:
    """Whose floor counts the matrices that are read in a step."""
    plan = jaxllm.plan(config_of(family), "cpu", batch=2, prompt=4, new=4, program="decode")
    (program,) = plan.programs
    assert program.peak_bytes > program.weight_bytes
    assert program.weight_bytes >= sum(x.size for x in parameters(model_of(family)).values())


ON_A_MESH = """
import jax, numpy as np, tiny
from jaxllm.models.registry import FAMILIES
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import make_mesh, use_mesh
from test_every_family import model_of

mesh = make_mesh(data=2, fsdp=2, tensor=2)
for family in FAMILIES:
    model = model_of(family)
    expected = tiny.logits(model, tiny.ids(4))
    with use_mesh(mesh):
        actual = tiny.logits(put_tree(model, mesh), tiny.ids(4))
    np.testing.assert_allclose(actual, expected, atol=1e-4, err_msg=family)
"""


@pytest.mark.ci
def test_every_family_on_a_mesh() -> None:
    folder = str(Path(__file__).parent)
    on_devices(f"import sys; sys.path.insert(0, {folder!r})" + ON_A_MESH, devices=8)


def test_every_family_is_documented() -> None:
    rows = re.findall(r"^\| (`[^|]*) \| ", MODELS.read_text(), flags=re.MULTILINE)
    documented = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(FAMILIES) <= documented
