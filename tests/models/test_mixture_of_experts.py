"""Models with a mixture of experts: losses of routers, files, quantization, LoRA, meshes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from devices import on_devices
from safetensors.numpy import load_file, save_file

import jaxllm
from jaxllm.checkpoint.load_parameters import StackedTensors
from jaxllm.checkpoint.peft import load_adapter, save_adapter
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.common.errors import CheckpointError, InputError, UnsupportedError
from jaxllm.models.expert_use import used_shares
from jaxllm.models.lora import LoraConfig, add_lora, lora_layers, module_at
from jaxllm.models.losses import load_balancing_loss
from jaxllm.models.quantize import formats_of, quantize_model, with_matrices
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.planning.abstract import with_experts
from jaxllm.training.dpo import DPOLoss
from jaxllm.training.evaluation import evaluate
from jaxllm.training.losses import ROUTER_LOSS, CausalLoss
from jaxllm.training.state import TrainState
from jaxllm.training.step import make_train_step

both = pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
EXPERT = "backbone.stack.blocks.1.mlp.expert_"


def batch_of(rows: int = 4) -> dict[str, np.ndarray]:
    ids = tiny.ids(rows, 10)
    mask = np.ones_like(ids)
    mask[0, :3], mask[1, 7:] = 0, 0
    return {"input_ids": ids, "attention_mask": mask, "labels": np.where(mask == 1, ids, -100)}


def test_the_loss_of_even_routers_is_the_number_of_experts_of_a_token() -> None:
    """The least that there is. A router that chooses the same for all has more."""
    logits = jnp.eye(4)[jnp.arange(40) % 4] + jnp.eye(4)[(jnp.arange(40) + 1) % 4]
    every = jnp.ones(40, bool)
    assert float(load_balancing_loss([logits], 2, every)) == pytest.approx(2)
    assert float(load_balancing_loss([9 * logits[:1].repeat(40, 0)], 2, every)) > 3.9
    # Tokens that are not counted change nothing.
    counted = jnp.arange(60) < 40
    more = jnp.concatenate([logits, 9 * logits[:1].repeat(20, 0)])
    assert float(load_balancing_loss([more], 2, counted)) == pytest.approx(2)


@both
def test_the_loss_of_routers_is_added(family: str) -> None:
    """To that of labels, with the config's weight, if the config asks for it."""
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.25}
    batch = batch_of()
    with_routers = tiny.make(family, **fields)(**batch)
    without = tiny.make(family, **fields | {"output_router_logits": False})(**batch)
    assert without.aux_loss is None
    assert without.router_logits is None
    layers = 2 if family == "mixtral" else 1
    assert len(with_routers.router_logits) == layers
    np.testing.assert_allclose(
        with_routers.loss, without.loss + 0.25 * with_routers.aux_loss, rtol=1e-6
    )
    np.testing.assert_array_equal(with_routers.logits, without.logits)


def test_training_adds_the_loss_of_routers_and_reports_it() -> None:
    model, batch = tiny.cached("mixtral"), batch_of()
    out = model(**batch)
    added = model.config.router_aux_loss_coef * float(out.aux_loss)
    optimizer = optax.sgd(0.1)
    step = make_train_step(optimizer, CausalLoss())
    state = TrainState.create(tiny.make("mixtral"), optimizer)
    state, metrics = step(state, batch)
    assert float(metrics["loss"]) == pytest.approx(float(out.loss), rel=1e-5)
    assert float(metrics[ROUTER_LOSS]) == pytest.approx(added, rel=1e-5)
    routers = [path for path in parameters(model) if path.endswith("router.weight")]
    after = state.params
    assert all(np.abs(after[path] - parameters(model)[path]).max() > 1e-4 for path in routers)
    result = evaluate(model, [batch], CausalLoss())
    assert result.loss == pytest.approx(float(out.loss), rel=1e-5)
    assert np.log(result.perplexity) == pytest.approx(float(out.loss) - added, rel=1e-5)
    assert result.metrics()[f"eval_{ROUTER_LOSS}"] == pytest.approx(added, rel=1e-5)


@pytest.mark.ci
def test_packed_rows_count_no_padding() -> None:
    model = tiny.cached("mixtral")
    batch = {"input_ids": tiny.ids(1, 10), "segment_ids": np.array([[1] * 4 + [2] * 3 + [0] * 3])}
    whole = model(**batch)
    kept = model(**{name: x[:, :7] for name, x in batch.items()})
    np.testing.assert_allclose(whole.aux_loss, kept.aux_loss, rtol=1e-6)


def test_dpo_raises_for_a_loss_of_routers() -> None:
    batch = {"reference_logps": np.zeros((1, 2))}
    with pytest.raises(UnsupportedError, match="output_router_logits: DPO adds no loss"):
        DPOLoss()(tiny.cached("mixtral"), batch)


@pytest.mark.ci
@both
@pytest.mark.parametrize("options", [{"scan_layers": True}, {"remat": True}, {"remat": "dots"}])
def test_scanned_and_recomputed_layers(family: str, options: dict[str, Any]) -> None:
    """Also where layers with and without experts alternate."""
    from jaxllm.models.build_options import Options

    fields = {"num_hidden_layers": 4, "output_router_logits": True, "router_aux_loss_coef": 0.3}
    batch = batch_of()
    losses = [
        jax.jit(jax.value_and_grad(lambda model: model(**batch).loss))(
            tiny.make(family, options=Options(**given), **fields)
        )
        for given in ({}, options)
    ]
    np.testing.assert_allclose(losses[0][0], losses[1][0], rtol=1e-6)
    first, second = (parameters(gradients) for _, gradients in losses)
    scale = max(float(jnp.abs(x).max()) for x in first.values())
    for path, gradient in first.items():
        np.testing.assert_allclose(second[path], gradient, atol=1e-5 * scale, err_msg=path)


@both
def test_a_file_has_a_tensor_for_each_expert(family: str, tmp_path: Path) -> None:
    """Under transformers' names, and the same bytes in shards and in a half-precision file."""
    model = tiny.make(family)
    jaxllm.save_hf(tmp_path / "whole", model)
    name = {
        "mixtral": "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
    }[family]
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    np.testing.assert_array_equal(tensors[name], parameters(model)[f"{EXPERT}down.weight"][3])
    # A file of bfloat16, in any order of tensors, that is loaded as float32.
    half = {key: np.asarray(x, jnp.bfloat16) for key, x in reversed(tensors.items())}
    folder = tmp_path / "half"
    folder.mkdir()
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    again = jaxllm.load(folder, dtype="float32")[0]
    for count, size in enumerate((10**9, 20_000)):
        saved = tmp_path / f"saved{count}"
        jaxllm.save_hf(saved, again, max_shard_bytes=size)
        shards = list(saved.glob("*.safetensors"))
        assert (len(shards) > 2) == bool(count)
        found = {key: x for shard in shards for key, x in load_file(shard).items()}
        assert found.keys() == half.keys()
        assert all(found[key].tobytes() == half[key].tobytes() for key in half)


@pytest.mark.parametrize(
    ("fields", "change", "message"),
    [
        ({}, ("3.w1", None), "missing .*experts.3.w1.weight"),
        ({"num_local_experts": 3}, ("", None), "unexpected .*experts.3.w1.weight"),
        ({"num_local_experts": 5}, ("", None), "missing .*experts.4.w1.weight"),
        ({"num_local_experts": 2**26}, ("", None), r"missing .*experts.4.w\d.weight"),
        ({}, ("2.w1", np.zeros((3, 32), np.float32)), r"experts.2.w1.weight is float32 \[3, 32\]"),
        ({"intermediate_size": 40}, ("", None), r"experts.0.w2.weight has shape \[32, 48\], but"),
    ],
)
def test_experts_that_do_not_fit(
    fields: dict[str, Any], change: tuple[str, Any], message: str, tmp_path: Path
) -> None:
    jaxllm.save_hf(tmp_path, tiny.cached("mixtral"))
    tensors = load_file(tmp_path / "model.safetensors")
    changed, value = change
    name = f"model.layers.0.block_sparse_moe.experts.{changed}.weight"
    if name in tensors:
        del tensors[name]
    if value is not None:
        tensors[name] = value
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        jaxllm.load(tmp_path, config=fields)


def test_a_slice_reads_its_experts_only(tmp_path: Path) -> None:
    jaxllm.save_hf(tmp_path, tiny.cached("mixtral"))
    name = "model.layers.0.block_sparse_moe.experts.{e}.w1.weight"
    source = open_weights(tmp_path)
    stacked, reads = StackedTensors(source, {name: 4}), []
    read = source.read
    source.read = lambda name, index=(): (reads.append(name), read(name, index))[1]  # type: ignore
    whole = stacked.read(name)
    assert len(reads) == 4
    reads.clear()
    part = stacked.read(name, (slice(1, 3), slice(10, 20), slice(0, 32)))
    assert reads == [name.replace("{e}", number) for number in "12"]
    np.testing.assert_array_equal(part, whole[1:3, 10:20])


@pytest.mark.ci
@both
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_experts(family: str, kind: str, tmp_path: Path) -> None:
    """Loading quantizes each expert as `quantize_model` does, and keeps the router."""
    model = tiny.make(family, hidden_size=64, intermediate_size=64)
    quantized = quantize_model(model, kind, embeddings=False)
    formats = formats_of(quantized)
    assert formats[f"{EXPERT}gate"] == formats[f"{EXPERT}down"] == kind
    assert "backbone.stack.blocks.1.mlp.router" not in formats
    jaxllm.save_hf(tmp_path / "hf", model)
    loaded = jaxllm.load(tmp_path / "hf", quantize=kind, quantize_embeddings=False)[0]
    for path, x in parameters(quantized).items():
        np.testing.assert_array_equal(parameters(loaded)[path], x, err_msg=path)
    # The same as a float model of the matrices' values, as far as int8 products go.
    layers = {path: module_at(quantized, path) for path in formats if EXPERT in path}
    values = {f"{path}.weight": tiny.values(layer) for path, layer in layers.items()}
    matrices = {path: layer.matrix for path, layer in layers.items()}
    only_experts = with_matrices(with_parameters(model, values), matrices)
    expected = tiny.logits(with_parameters(model, values))
    actual = tiny.logits(only_experts)
    np.testing.assert_allclose(actual, expected, atol=2e-3 * expected.std())
    jaxllm.save_orbax(tmp_path / "orbax", quantized)
    again = jaxllm.load_orbax(tmp_path / "orbax")[0]
    np.testing.assert_array_equal(tiny.logits(again), tiny.logits(quantized))


@both
def test_lora_leaves_experts_and_routers_out(family: str, tmp_path: Path) -> None:
    """As PEFT's all-linear does; targets that name them raise, and so do adapters of others."""
    model = tiny.cached(family)
    assert not [path for path in lora_layers(add_lora(model)) if ".expert_" in path]
    expert = {"mixtral": "w1", "qwen3_moe": "up_proj"}[family]
    for targets in ((expert,), ("mlp.expert_up",), ("q_proj", "gate"), (r"mlp\..*",)):
        with pytest.raises(InputError, match="adapters of experts and of routers are not"):
            add_lora(model, LoraConfig(targets=targets))
    with pytest.raises(InputError, match=r"^modules_to_save: .*adapters of experts"):
        add_lora(model, LoraConfig(modules_to_save=(expert,)))
    save_adapter(tmp_path, add_lora(model, LoraConfig(targets=("q_proj",))))
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    a, b = np.zeros((8, 32), np.float32), np.zeros((48, 8), np.float32)
    layer = "base_model.model.model.layers.1.mlp.experts.0.up_proj"
    tensors |= {f"{layer}.lora_A.weight": a, f"{layer}.lora_B.weight": b}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="experts with LoRA are not implemented"):
        load_adapter(model, tmp_path)


def test_shares_of_experts_that_tokens_use() -> None:
    """1 - (1 - k / E)^tokens, which a simulation of random choices confirms."""
    model = tiny.cached("qwen3_moe")  # 3 of 6 experts in layer 1
    shares = used_shares(model, 3)
    rng = np.random.default_rng(0)
    used = [len({e for _ in range(3) for e in rng.permutation(6)[:3]}) / 6 for _ in range(4000)]
    assert shares[f"{EXPERT}up.weight"] == pytest.approx(float(np.mean(used)), abs=0.01)
    assert shares[f"{EXPERT}up.weight"] == 1 - 0.5**3
    assert {share for path, share in shares.items() if ".expert_" not in path} == {1.0}
    assert used_shares(model)[f"{EXPERT}down.weight"] == 0.5
    # Of a program: parameters that it does not read stay out, and a table's rows stay few.
    assert with_experts([0.1, 1.0, 0.0], [0.875, 1.0, 0.875]) == [0.875, 1.0, 0.0]


@pytest.mark.ci
def test_a_plan_charges_the_experts_that_are_used() -> None:
    """A decode step of few rows reads few experts, a prefill nearly all."""
    from jaxllm.planning import lower

    model = tiny.make("mixtral", num_local_experts=32, num_hidden_layers=1)
    (decode,) = lower(model, "decode", batch=2, prompt=16, new=2)
    (prefill,) = lower(model, "prefill", batch=2, prompt=16, new=2)
    sizes = {path: x.nbytes for path, x in parameters(model).items()}
    experts = sum(size for path, size in sizes.items() if ".expert_" in path)
    share = 1 - (1 - 2 / 32) ** 2
    unread = decode.weight_bytes - experts - (decode.read_weight_bytes - share * experts)
    assert 0 <= unread <= sizes["backbone.embed.weight"]
    assert prefill.read_weight_bytes - decode.read_weight_bytes > 0.7 * experts


ON_A_MESH = """
import jax, jax.numpy as jnp, numpy as np, jaxllm, tiny
from jaxllm.models.quantize import quantize_model
from jaxllm.models.weights import parameters
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import make_mesh, use_mesh

mesh = make_mesh(data=2, fsdp=2, tensor=2)
for family, fields in (
    ("mixtral", {}),
    ("qwen3_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.5}),
    ("qwen3_moe", {"num_experts": 5, "moe_intermediate_size": 25}),  # nothing divides
):
    model = tiny.make(family, **fields)
    placed = put_tree(model, mesh)
    x = parameters(placed)["backbone.stack.blocks.1.mlp.expert_up.weight"]
    if not fields.get("num_experts"):
        assert x.sharding.shard_shape(x.shape) == (x.shape[0] // 2, x.shape[1] // 2, x.shape[2])
    for rows in (4, 3):
        ids = tiny.ids(rows)
        mask = np.ones_like(ids)
        mask[0, :3] = 0
        loss = jax.jit(jax.value_and_grad(lambda m: m(ids, mask, labels=ids).loss))
        expected, gradients = loss(model)
        with use_mesh(mesh):
            actual, others = loss(placed)
        np.testing.assert_allclose(actual, expected, rtol=1e-5)
        gradients, others = parameters(gradients), parameters(others)
        scale = max(float(jnp.abs(x).max()) for x in gradients.values())
        for path, x in gradients.items():
            np.testing.assert_allclose(others[path], x, atol=1e-5 * scale, err_msg=path)
        options = {"max_new_tokens": 6, "do_sample": False}
        one = jaxllm.generate(model, ids, mask, **options).sequences
        np.testing.assert_array_equal(jaxllm.generate(placed, ids, mask, **options).sequences, one)
    jaxllm.save_hf(family, model, overwrite=True)
    for quantize in (None, "int8", "int4"):
        loaded = jaxllm.load(family, mesh=mesh, quantize=quantize)[0]
        plain = jaxllm.load(family, quantize=quantize)[0]
        ids = tiny.ids(4)
        expected = tiny.logits(plain, ids)
        with use_mesh(mesh):
            actual = tiny.logits(loaded, ids)
        np.testing.assert_allclose(actual, expected, atol=(1e-4 if quantize is None else 5e-3))
"""


@pytest.mark.ci
def test_experts_on_a_mesh(tmp_path: Path) -> None:
    """Losses, gradients, generation and loading are the same on 1 and 8 devices."""
    on_devices(f"import os; os.chdir({str(tmp_path)!r})" + ON_A_MESH, devices=8)


@pytest.mark.ci
def test_configs_without_experts_are_dense() -> None:
    model = tiny.make("qwen3_moe", num_experts=0, output_router_logits=True)
    assert not [path for path in parameters(model) if ".expert_" in path]
    assert model(tiny.ids(), labels=tiny.ids()).aux_loss is None
    assert dataclasses.replace(model.config, num_experts=6).has_experts(1)
