"""PEFT's adapter files: parity with PEFT, round trips, and invalid files."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from compiling import compiled_as_users
from flax import nnx
from paths import DATA
from torch_bytes import Part, legacy_file, state_pickle, whole, zip_file

import jaxllm
from jaxllm.checkpoint.peft import (
    MAGNITUDE,
    PREFIX,
    A,
    B,
    load_adapter,
    parse_peft_config,
    save_adapter,
    weight_entries,
)
from jaxllm.checkpoint.safetensors import SafetensorsFile, write_safetensors
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    InputError,
    JaxLLMError,
    MissingFileError,
    NonFiniteError,
    UnsupportedError,
)
from jaxllm.models.llama import LlamaForSequenceClassification
from jaxllm.models.lora import LoraConfig, add_lora, lora_layers, merge_lora
from jaxllm.models.registry import FAMILIES, architecture_of
from jaxllm.models.weights import parameters, with_parameters

CASES = sorted(path.name for path in (DATA / "peft").iterdir() if path.is_dir())
SLOW = ("t5_dora", "t5_rslora", "llama_dora", "gpt2_rslora")  # others of the kind run by default


@functools.cache
def base_of(case: str) -> Any:
    config = json.loads((DATA / "peft" / case / "adapter_config.json").read_text())
    model, _ = jaxllm.load(DATA / "conformance/models" / config["base_model_name_or_path"])
    if config["task_type"] != "SEQ_CLS":
        return model
    settings = type(model.config).from_dict(
        {**json.loads(model.card.origin.config), "num_labels": 3}
    )
    classifier = LlamaForSequenceClassification(settings, rngs=nnx.Rngs(0))
    body = {path: x for path, x in parameters(model).items() if path != "lm_head.weight"}
    return with_parameters(classifier, body)


@functools.cache
def adapted(case: str) -> Any:
    return load_adapter(base_of(case), DATA / "peft" / case)


@functools.cache
def reference(case: str) -> dict[str, np.ndarray]:
    return dict(np.load(DATA / "peft" / f"{case}.npz"))


def inputs(case: str) -> dict[str, np.ndarray]:
    return {name: reference(case)[name] for name in ("input_ids", "labels")}


@functools.cache
def run(case: str) -> tuple[Any, Any]:
    """Logits, and the gradient of the loss, from one program."""

    def loss(model):
        out = model(**inputs(case))
        return out.loss, out.logits

    lowered = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(adapted(case))
    (_, logits), grads = compiled_as_users(lowered)(adapted(case))
    return logits, grads


plain_logits = jax.jit(lambda model, inputs: model(**inputs).logits)


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    with SafetensorsFile(folder / "adapter_model.safetensors") as file:
        return {name: file.read(name) for name in file.names()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


@pytest.mark.ci
@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=pytest.mark.slow) if c in SLOW else c for c in CASES],
)
def test_logits_are_those_of_peft(case):
    logits, _ = run(case)
    np.testing.assert_allclose(logits, reference(case)["logits"], atol=1e-4)


@pytest.mark.by_default("llama_lora", "llama_saved")
@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize("case", CASES)
def test_merged_logits_are_those_of_peft(case):
    logits = plain_logits(merge_lora(adapted(case)), inputs(case))
    np.testing.assert_allclose(logits, reference(case)["merged"], atol=1e-4)


def gradients(case: str) -> dict[str, np.ndarray]:
    """The gradients of the loss, put together as PEFT's tensors."""
    model = adapted(case)
    _, grads = run(case)
    actual, entries, params = {}, weight_entries(model), parameters(grads)
    for name, entry in entries.items():
        paths = entry.modules
        if f"{paths[0]}.lora_a" in params:
            actual[f"{name}.{A}"] = params[f"{paths[0]}.lora_a"]
            actual[f"{name}.{B}"] = jnp.concatenate([params[f"{path}.lora_b"] for path in paths])
            if f"{paths[0]}.lora_magnitude" in params:
                rows = [params[f"{path}.lora_magnitude"] for path in paths]
                actual[f"{name}.{MAGNITUDE}"] = jnp.concatenate(rows)
        elif paths[0] in model.card.modules_to_save:
            actual[entry.tensor] = params[entry.parameters[0]]
    return {PREFIX + name: np.asarray(x) for name, x in actual.items()}


@pytest.mark.by_default("llama_saved")
@pytest.mark.usefixtures("highest_precision")
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_peft(case):
    prefix = "grad:"
    expected = {k.removeprefix(prefix): x for k, x in reference(case).items() if prefix in k}
    actual = gradients(case)
    assert expected
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        np.testing.assert_allclose(
            actual[name], grad, atol=5e-4 * np.abs(grad).max(), rtol=1e-3, err_msg=name
        )


@pytest.mark.in_ci("llama_classifier")
@pytest.mark.parametrize("case", CASES)
def test_round_trip_gives_the_same_files(case, tmp_path):
    source = DATA / "peft" / case
    save_adapter(tmp_path, adapted(case), base_model="base")
    theirs, ours = tensors_of(source), tensors_of(tmp_path)
    theirs = {name: x for name, x in theirs.items() if "base_layer" not in name}
    assert ours.keys() == theirs.keys()
    for name, x in theirs.items():
        np.testing.assert_array_equal(ours[name], x, err_msg=name)
    old, new = (parse_peft_config(config_of(path)) for path in (source, tmp_path))
    for field in ("use_rslora", "use_dora", "lora_dropout", "task_type"):
        assert getattr(old, field) == getattr(new, field)
    for name in {name.removeprefix(PREFIX).split(".lora_")[0] for name in ours if "lora_" in name}:
        assert old.rank_of(name) == new.rank_of(name)
        assert old.alpha_of(name) == new.alpha_of(name)
        assert new.targets(name)
    assert config_of(tmp_path)["fan_in_fan_out"] == config_of(source)["fan_in_fan_out"]


def trained(model: Any) -> Any:
    rng = np.random.default_rng(0)
    return with_parameters(
        model,
        {
            path: x + 0.2 * rng.standard_normal(x.shape).astype(np.float32)
            for path, x in parameters(model).items()
            if "lora_" in path
        },
    )


@pytest.mark.ci
@pytest.mark.parametrize("options", [{}, {"rslora": True}, {"dora": True, "rslora": True}], ids=str)
@pytest.mark.parametrize("targets", ["all-linear", "attn.(q|v)", "attn.(k|v)"])
@pytest.mark.parametrize("share_a", [True, False])
def test_gpt2_qkv_in_one_layer(share_a, options, targets, tmp_path):
    """A c_attn of the rank, or with an A for each part of several times the rank, scale kept."""
    base = tiny.cached("gpt2")
    config = LoraConfig(rank=2, alpha=3, targets=targets, **options)
    model = trained(add_lora(base, config, share_a=share_a))
    save_adapter(tmp_path, model)
    parts = 1 if share_a else 3 if targets == "all-linear" else 2
    a = tensors_of(tmp_path)[f"{PREFIX}transformer.h.1.attn.c_attn.{A}"]
    assert a.shape == (2 * parts, 32)
    again = load_adapter(base, tmp_path)
    path = "backbone.stack.blocks.1.attn.v"
    assert lora_layers(again)[path].scale == pytest.approx(lora_layers(model)[path].scale)
    np.testing.assert_allclose(tiny.logits(again), tiny.logits(model), atol=1e-4)


@pytest.mark.parametrize("dora", [False, True])
def test_fused_layer_whose_parts_differ_in_size(dora, tmp_path):
    """Phi-3's qkv_proj has more rows of queries than of keys."""
    base = tiny.cached("phi3")
    save_adapter(tmp_path, trained(add_lora(base, LoraConfig(rank=2, dora=dora))))
    b = tensors_of(tmp_path)[f"{PREFIX}model.layers.1.self_attn.qkv_proj.{B}"]
    assert b.shape[0] == 64
    layers = lora_layers(load_adapter(base, tmp_path))
    rows = [layers[f"backbone.stack.blocks.1.attn.{x}"].lora_b[...] for x in "qkv"]
    np.testing.assert_array_equal(np.concatenate(rows), b)
    assert [len(x) for x in rows] == [32, 16, 16]


@pytest.mark.by_default("bloom-False")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_rows_of_an_adapter_are_in_the_order_of_the_file(family, dora, tmp_path):
    """A merged tensor of the file is the base's plus B times A, both as they are in files."""
    base = tiny.cached(family)
    model = trained(add_lora(base, LoraConfig(rank=2, alpha=6, dora=dora, targets="attn.(q|k|v)")))
    save_adapter(tmp_path, model)
    saved = tensors_of(tmp_path)
    names = ("q_proj", "k_proj") if family == "gptj" else ("query_key_value",)
    for name in names:
        layer = "attn" if family == "gptj" else "self_attention"
        path = f"transformer.h.1.{layer}.{name}"
        a, b = (saved[f"{PREFIX}{path}.{x}"] for x in (A, B))
        weight, merged = (file_tensor(x, f"{path}.weight") for x in (base, merge_lora(model)))
        updated = weight + 3 * b @ a
        if dora:
            magnitude = saved[f"{PREFIX}{path}.{MAGNITUDE}"]
            updated *= (magnitude / np.linalg.norm(updated, axis=1))[:, None]
        np.testing.assert_allclose(merged, updated, atol=1e-5)
    again = load_adapter(base, tmp_path)
    np.testing.assert_allclose(tiny.logits(again), tiny.logits(model), atol=1e-4)


def file_tensor(model: Any, name: str) -> np.ndarray:
    """A tensor as it is written to a file."""
    model_type, _ = architecture_of(model)
    own = parameters(model)
    entries = FAMILIES[model_type].table(model.config).for_model(own)
    entry = next(entry for entry in entries if entry.tensor == name)
    return entry.join([np.asarray(own[path]) for path in entry.parameters])


@pytest.mark.ci
def test_target_modules_use_short_names(tmp_path):
    base = tiny.cached("gpt2")
    full, short = tmp_path / "whole", tmp_path / "short"
    save_adapter(full, add_lora(base, LoraConfig(targets="attn.c_proj")))
    assert config_of(full)["target_modules"] == [f"transformer.h.{i}.attn.c_proj" for i in range(2)]
    save_adapter(short, add_lora(base, LoraConfig(targets=("c_proj", "c_attn"))))
    assert config_of(short)["target_modules"] == ["c_attn", "c_proj"]


def test_saving_without_lora_is_an_error(tmp_path):
    with pytest.raises(InputError, match="no LoRA"):
        save_adapter(tmp_path, tiny.cached("llama"))


@pytest.mark.by_default("gpt2-wte")
@pytest.mark.parametrize(("family", "module"), [("gpt2", "wte"), ("t5", "shared")])
def test_tied_embedding_in_modules_to_save_is_an_error(family, module, tmp_path):
    model = add_lora(tiny.cached(family), LoraConfig(modules_to_save=module))
    with pytest.raises(UnsupportedError, match="merge_lora"):
        save_adapter(tmp_path, model)


def test_part_of_a_fused_layer_in_modules_to_save_is_an_error(tmp_path):
    model = add_lora(tiny.cached("gpt2"), LoraConfig(targets="mlp.up", modules_to_save="attn.q"))
    with pytest.raises(UnsupportedError, match=r"c_attn.*only a part"):
        save_adapter(tmp_path, model)


GOOD = {"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4, "lora_alpha": 8}


def test_config_patterns():
    config = parse_peft_config(
        {**GOOD, "rank_pattern": {"^model.layers.1.q_proj": 2}, "alpha_pattern": {"q_proj": 0.5}}
    )
    assert config.rank_of("model.layers.1.q_proj") == 2
    assert config.rank_of("base.model.layers.1.q_proj") == 4
    assert config.alpha_of("model.layers.1.q_proj") == 0.5
    assert config.alpha_of("model.layers.1.v_proj") == 8
    assert not config.narrowed
    assert parse_peft_config({**GOOD, "layers_to_transform": 0}).narrowed


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("peft_type", "IA3", UnsupportedError),
        ("bias", "all", UnsupportedError),
        ("init_lora_weights", "pissa", UnsupportedError),
        ("lora_bias", True, UnsupportedError),
        ("use_qalora", True, UnsupportedError),
        ("layer_replication", [[0, 2]], UnsupportedError),
        ("target_parameters", ["w"], UnsupportedError),
        ("ensure_weight_tying", True, UnsupportedError),
        ("a_field_of_tomorrow", {"on": 1}, UnsupportedError),
        ("rank_pattern", {"(a+)+b": 2}, UnsupportedError),
        ("rank_pattern", {"q": 0}, ConfigError),
        ("rank_pattern", {"q": None}, ConfigError),
        ("alpha_pattern", {"q": None}, ConfigError),
        ("rank_pattern", [1], ConfigError),
        ("alpha_pattern", {"q": "8"}, ConfigError),
        ("alpha_pattern", {"q\\": 8}, ConfigError),
        ("r", 0, ConfigError),
        ("r", 2.0, ConfigError),
        ("r", True, ConfigError),
        ("lora_alpha", "8", ConfigError),
        ("lora_alpha", 10**400, ConfigError),
        ("lora_dropout", 1.0, ConfigError),
        ("use_dora", 1, ConfigError),
        ("use_rslora", "true", ConfigError),
        ("task_type", 3, ConfigError),
        ("target_modules", [], ConfigError),
        ("target_modules", None, ConfigError),
        ("target_modules", [3], ConfigError),
        ("modules_to_save", "score", ConfigError),
        ("modules_to_save", [""], ConfigError),
    ],
)
def test_config_errors_name_the_field(field, value, error):
    with pytest.raises(error, match=f"^{field}"):
        parse_peft_config({**GOOD, field: value})


def test_unknown_fields_are_named_all_at_once_and_can_be_ignored(folder):
    change(folder, field_of_tomorrow={"on": 1}, other_field=2)
    words = r"field_of_tomorrow \(.*\), other_field \(2\): .*config="
    with pytest.raises(UnsupportedError, match=words):
        load_adapter(base_of("llama_lora"), folder)
    ignored = {"field_of_tomorrow": None, "other_field": None}
    assert lora_layers(load_adapter(base_of("llama_lora"), folder, config=ignored))


def test_an_adapter_of_mlx_is_named():
    raw = {"fine_tune_type": "lora", "num_layers": 16, "lora_parameters": {"rank": 8}}
    with pytest.raises(UnsupportedError, match=r"an adapter of MLX.*mlx_lm\.fuse"):
        parse_peft_config(raw)


def test_saving_over_an_adapter(tmp_path):
    model = add_lora(tiny.cached("llama"), LoraConfig(targets="attn.q"))
    save_adapter(tmp_path, model)
    with pytest.raises(CheckpointError, match=r"there is an adapter already.*overwrite=True"):
        save_adapter(tmp_path, model)
    save_adapter(tmp_path, model, overwrite=True)


def test_fields_that_are_off_pass_if_they_are_listed():
    off = {"a_field_of_tomorrow": None, "use_qalora": False, "loftq_config": {}, "eva_config": 1}
    off |= {"unsloth_fixed": True, "lorap_emb_lr": 1e-6}
    assert parse_peft_config({**GOOD, **off}) == parse_peft_config(GOOD)
    for unknown in ({"_note": "x"}, {"a_field_of_tomorrow": False}, {"use_qalora": True}):
        with pytest.raises(UnsupportedError, match=next(iter(unknown))):
            parse_peft_config({**GOOD, **unknown})


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(DATA / "peft" / "llama_lora", tmp_path, dirs_exist_ok=True)
    return tmp_path


def change(folder: Path, tensors: dict[str, Any] | None = None, **config: Any) -> None:
    """Other tensors (None takes one away) and other fields of the config."""
    changed = {**tensors_of(folder), **(tensors or {})}
    kept = {name: np.array(x) for name, x in changed.items() if x is not None}
    write_safetensors(folder / "adapter_model.safetensors", kept)
    (folder / "adapter_config.json").write_text(json.dumps({**config_of(folder), **config}))


LAYER = f"{PREFIX}model.layers.0.self_attn.q_proj"
ZEROS = np.zeros((2, 48), np.float32)


@pytest.mark.parametrize(
    ("tensors", "config", "error", "words"),
    [
        ({f"{LAYER}.{A}": None}, {}, CheckpointError, r"q_proj\.lora_A\.weight is missing"),
        (
            {f"{LAYER}.{A}": None, f"{LAYER}.{B}": None},
            {},
            CheckpointError,
            "target_modules names its module",
        ),
        ({f"{LAYER}.{A}": ZEROS.T}, {}, CheckpointError, r"shape \[48, 2\]"),
        ({f"{LAYER}.{A}": ZEROS + np.nan}, {}, NonFiniteError, "q_proj"),
        ({f"{LAYER}.{A}": ZEROS.astype(np.int32)}, {}, UnsupportedError, "int32"),
        ({f"{LAYER}.{MAGNITUDE}": ZEROS[0]}, {}, CheckpointError, "unexpected"),
        ({f"{PREFIX}model.norm.weight": ZEROS[0]}, {}, CheckpointError, "unexpected"),
        ({f"{PREFIX}model.embed_tokens.lora_embedding_A": ZEROS}, {}, CheckpointError, "embedd"),
        ({"model.x": ZEROS}, {}, CheckpointError, "names begin with"),
        ({f"{LAYER}.base_layer.weight": ZEROS}, {}, CheckpointError, "another base"),
        ({}, {"target_modules": ["v_proj", "down_proj"]}, CheckpointError, "does not name it"),
        ({}, {"r": 3}, CheckpointError, r"imply \[3, 48\]"),
        ({}, {"use_dora": True}, CheckpointError, "lora_magnitude_vector is missing"),
        ({}, {"modules_to_save": ["norm"]}, CheckpointError, "is missing"),
        ({}, {"modules_to_save": ["pooler"]}, CheckpointError, "no module"),
        ({}, {"task_type": "SEQ_CLS"}, UnsupportedError, "task_type"),
    ],
)
def test_contradictory_files(folder, tensors, config, error, words):
    change(folder, tensors, **config)
    with pytest.raises(error, match=words):
        load_adapter(base_of("llama_lora"), folder)


def test_regular_expressions_of_a_file_are_not_run(folder):
    change(folder, target_modules="(.*)*.*(.*)*x")
    assert lora_layers(load_adapter(base_of("llama_lora"), folder))


def test_narrowed_targets(folder):
    gone = {name: None for name in tensors_of(folder) if "layers.1." in name}
    change(folder, gone, layers_to_transform=0)
    assert len(lora_layers(load_adapter(base_of("llama_lora"), folder))) == 3


def test_an_adapter_of_an_excluded_layer(folder):
    change(folder, layers_to_transform=[0])  # PEFT would leave out what the file has of layer 1
    with pytest.raises(CheckpointError, match="layers_to_transform excludes its layer"):
        load_adapter(base_of("llama_lora"), folder)


@pytest.mark.parametrize(
    ("layers", "kept", "count"),
    [
        ([1], ".block.1.", 6),  # PEFT since 0.20.0 counts blocks
        ([0], ".layer.0.", 10),  # older versions count the parts of a block
    ],
)
def test_narrowed_targets_of_t5(tmp_path, layers, kept, count):
    shutil.copytree(DATA / "peft" / "t5_lora", tmp_path, dirs_exist_ok=True)
    gone = {name: None for name in tensors_of(tmp_path) if kept not in name}
    change(tmp_path, gone, layers_to_transform=layers)
    assert len(lora_layers(load_adapter(base_of("t5_lora"), tmp_path))) == count


@pytest.mark.parametrize("is_legacy", [False, True])
def test_an_adapter_of_torch(folder, is_legacy):
    expected = load_adapter(base_of("llama_lora"), folder)
    path = folder / "adapter_model.safetensors"
    with SafetensorsFile(path) as file:
        tensors = {name: np.array(file.read(name)) for name in file.names()}
    parts = {name: whole(name, values) for name, values in tensors.items()}
    storages = {name: values.tobytes() for name, values in tensors.items()}
    pickle = state_pickle(parts, is_legacy=is_legacy)
    data = (legacy_file if is_legacy else zip_file)(pickle, storages)
    path.with_suffix(".bin").write_bytes(b"not read beside safetensors")
    load_adapter(base_of("llama_lora"), folder)
    path.unlink()
    path.with_suffix(".bin").write_bytes(data)
    actual = load_adapter(base_of("llama_lora"), folder)
    jax.tree.map(np.testing.assert_array_equal, parameters(actual), parameters(expected))


def test_missing_files(folder):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: not a file that torch\.save"):
        load_adapter(base_of("llama_lora"), folder)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(MissingFileError):
        load_adapter(base_of("llama_lora"), folder)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(MissingFileError):
        load_adapter(base_of("llama_lora"), folder)


def test_tensors_that_repeat_a_small_file(folder):
    (folder / "adapter_model.safetensors").unlink()
    view = Part("0", (100_000_000,), (0,), 1)
    pickle = state_pickle({"a": view, "b": view})
    (folder / "adapter_model.bin").write_bytes(zip_file(pickle, {"0": bytes(4)}))
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin: .*have 800000000 bytes"):
        load_adapter(base_of("llama_lora"), folder)


def test_truncated_files(folder):
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        path = folder / name
        full = path.read_bytes()
        for size in range(0, len(full), len(full) // 20):
            path.write_bytes(full[:size])
            with pytest.raises(JaxLLMError):
                load_adapter(base_of("llama_lora"), folder)
        path.write_bytes(full)
    load_adapter(base_of("llama_lora"), folder)


def test_model_that_has_lora_is_refused():
    with pytest.raises(InputError, match="already"):
        load_adapter(adapted("llama_lora"), DATA / "peft" / "llama_lora")


@pytest.mark.ci
def test_half_precision_adapters_become_float32(folder):
    change(folder, {name: x.astype(jnp.bfloat16) for name, x in tensors_of(folder).items()})
    model = load_adapter(base_of("llama_lora"), folder)
    assert {layer.lora_a[...].dtype for layer in lora_layers(model).values()} == {
        np.dtype(np.float32)
    }
