"""jaxllm export of checkpoints: the folder that is written gives the logits of the source."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from memory_model import CONFIG, MB
from paths import DATA
from weight_formats import (
    FLAX,
    copied,
    write_flax,
    write_flax_shards,
    write_torch,
    write_torch_shards,
)

import jaxllm
from jaxllm.checkpoint.safetensors import SafetensorsFile
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.cli.main import main

PARITY, GGUF = DATA / "parity", DATA / "gguf"
REFERENCE = DATA / "reference"


def same_model(folder: Path, source: Path) -> None:
    """Checks that two checkpoints have the same weights, forward pass and settings."""
    (ours, tokenizer), (theirs, other_tokenizer) = jaxllm.load(folder), jaxllm.load(source)
    assert type(ours) is type(theirs)
    assert ours.config == theirs.config
    assert ours.generation_config == theirs.generation_config
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    tokens = tiny.ids(1, 6, vocab=min(50, ours.config.vocab_size))
    if hasattr(ours, "lm_head") or hasattr(ours, "generate"):
        np.testing.assert_array_equal(tiny.logits(ours, tokens), tiny.logits(theirs, tokens))
    if other_tokenizer is None:
        assert tokenizer is None
    else:
        assert tokenizer.encode("A b c") == other_tokenizer.encode("A b c")


def names(folder: Path) -> set[str]:
    with SafetensorsFile(folder / "model.safetensors") as file:
        assert file.metadata == {"format": "pt"}
        return set(file.names())


SOURCES = {
    "llama": (REFERENCE / "tiny-llama", "LlamaForCausalLM"),
    "gpt2": (REFERENCE / "tiny-gpt2", "GPT2LMHeadModel"),
    "gpt2 without a head": (PARITY / "gpt2_hub_layout", "GPT2LMHeadModel"),
    "t5": (REFERENCE / "tiny-t5", "T5ForConditionalGeneration"),
    "t5 with a head": (PARITY / "t5_v11", "T5ForConditionalGeneration"),
    "t5 encoder": (PARITY / "t5_encoder", "T5EncoderModel"),
    "mt5": (PARITY / "mt5", "MT5ForConditionalGeneration"),
    "tied mt5": (DATA / "t5_heads" / "mt5_tied_v4", "MT5ForConditionalGeneration"),
    "bart": (PARITY / "bart_full", "BartForConditionalGeneration"),
    "marian": (PARITY / "marian_full", "MarianMTModel"),
    "xglm": (PARITY / "xglm_full", "XGLMForCausalLM"),
    "experts": (PARITY / "mixtral_window", "MixtralForCausalLM"),
    "classifier": (PARITY / "llama_cls_single", "LlamaForSequenceClassification"),
    "gguf": (GGUF / "llama.gguf", "LlamaForCausalLM"),
    "gguf in parts": (GGUF / "qwen2-00001-of-00003.gguf", "Qwen2ForCausalLM"),
    "gguf with experts": (GGUF / "families" / "mixtral.gguf", "MixtralForCausalLM"),
}
T5X = ("t5_1_0", "t5_1_1_bfloat16", "mt5_tied")
TORCH = [name for name, (path, _) in SOURCES.items() if path.is_dir()]


@pytest.mark.parametrize("name", SOURCES)
def test_checkpoints_of_all_kinds(name, tmp_path, capsys):
    source, model_class = SOURCES[name]
    assert main(["export", str(source), str(tmp_path / "out")]) == 0
    out = f"{tmp_path}/out: open it with transformers.{model_class}.from_pretrained("
    assert capsys.readouterr().out.startswith(out)
    same_model(tmp_path / "out", source)
    assert names(tmp_path / "out")
    # Once more gives the same files.
    assert main(["export", str(tmp_path / "out"), str(tmp_path / "again")]) == 0
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.filterwarnings("ignore:.*Flax class did not read")  # of these models' configs
@pytest.mark.parametrize("write", [write_flax, write_flax_shards, write_torch, write_torch_shards])
@pytest.mark.parametrize("name", TORCH)
def test_folders_of_flax_and_torch(name, write, tmp_path, capsys):
    source, model_class = SOURCES[name]
    write(tmp_path / "old", copied(source, tmp_path / "old"))
    assert main(["export", str(tmp_path / "old"), str(tmp_path / "out")]) == 0
    assert f"transformers.{model_class}" in capsys.readouterr().out
    same_model(tmp_path / "out", source)


@pytest.mark.parametrize("name", T5X)
def test_checkpoints_of_t5x(name, tmp_path, capsys):
    with tarfile.open(DATA / "t5x" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    assert main(["export", str(tmp_path / name), str(tmp_path / "out")]) == 0
    assert "T5ForConditionalGeneration" in capsys.readouterr().out
    same_model(tmp_path / "out", tmp_path / name)
    # transformers decides by these whether the head is tied and its input scaled.
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    tied = "lm_head.weight" not in names(tmp_path / "out")
    assert (config["tie_word_embeddings"], config["scale_decoder_outputs"]) == (tied, tied)


def test_the_file_that_is_read_is_named(tmp_path, capsys):
    write_flax(tmp_path / "flax", copied(REFERENCE / "tiny-gpt2", tmp_path / "flax"))
    shutil.copy(REFERENCE / "tiny-gpt2" / "model.safetensors", tmp_path / "flax")
    assert main(["export", str(tmp_path / "flax" / FLAX), str(tmp_path / "one")]) == 0
    assert main(["export", str(tmp_path / "flax"), str(tmp_path / "two")]) == 0
    said = capsys.readouterr().err
    assert re.findall("reading the weights from .*", said) == [
        f"reading the weights from model.safetensors, not from {FLAX}"
    ]
    same_model(tmp_path / "one", tmp_path / "two")


def test_copies_of_a_tensor_are_written_once(tmp_path):
    """torch's files have the embeddings of T5 under each of their names."""
    folder = tmp_path / "t5"
    tensors = copied(REFERENCE / "tiny-t5", folder)
    shared = tensors["shared.weight"]
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    write_torch(folder, {**tensors, **dict.fromkeys(copies, shared)})
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert names(tmp_path / "out").isdisjoint(copies)
    same_model(tmp_path / "out", REFERENCE / "tiny-t5")


def test_what_the_tensors_decide_is_written_to_the_config(tmp_path):
    """A head of its own beside a config that calls it tied, as Flax classes of Llama write it."""
    folder = tmp_path / "llama"
    tensors = copied(REFERENCE / "tiny-llama", folder)
    head = np.flip(tensors["model.embed_tokens.weight"], 0)
    write_flax(folder, {**tensors, "lm_head.weight": head})
    config = json.loads((folder / "config.json").read_text())
    del config["architectures"]
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    assert written["architectures"] == ["LlamaForCausalLM"]
    same_model(tmp_path / "out", folder)


@pytest.mark.filterwarnings("default:.*did not read")
def test_fields_that_the_flax_class_ignored_are_named(tmp_path, capsys):
    folder = tmp_path / "llama"
    write_flax(folder, copied(REFERENCE / "tiny-llama", folder))
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    assert "did not read rope_theta" in capsys.readouterr().err
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["rope_theta"] == 500


def test_a_field_that_follows_from_another_is_written(tmp_path):
    """mT5 without a head is tied, and whether a tied head is scaled would follow from that."""
    folder = tmp_path / "mt5"
    tensors = copied(PARITY / "mt5", folder)
    del tensors["lm_head.weight"]
    write_flax(folder, tensors)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["tie_word_embeddings"] is True
    same_model(tmp_path / "out", folder)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_dtype_can_be_chosen(dtype, tmp_path):
    source = REFERENCE / "tiny-llama"
    assert main(["export", str(source), str(tmp_path / "out"), "--dtype", dtype]) == 0
    with open_weights(tmp_path / "out") as written, open_weights(source) as original:
        for name in original.names():
            values = written.read(name)
            assert values.dtype.name == dtype
            np.testing.assert_array_equal(values, original.read(name).astype(values.dtype))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == dtype


def test_errors_leave_nothing(tmp_path, capsys):
    folder = tmp_path / "llama"
    tensors = copied(REFERENCE / "tiny-llama", folder)
    (name, first), *rest = tensors.items()

    def error(*arguments: object) -> str:
        before = sorted(tmp_path.iterdir())
        assert main(["export", *map(str, arguments)]) == 2
        assert sorted(tmp_path.iterdir()) == before
        return capsys.readouterr().err

    assert "neither model.safetensors nor" in error(folder, tmp_path / "out")
    write_flax(folder, dict(rest))
    assert f"{FLAX}: the tensors do not fit" in error(folder, tmp_path / "out")
    write_flax(folder, {**tensors, name: np.full_like(first, 1e9)})
    wide = error(folder, tmp_path / "out", "--dtype", "float16")
    assert "holds 1e+09, which float16 cannot" in wide
    assert "exists already; name a new folder" in error(folder, folder)
    assert "not the folder of a run" in error(folder, tmp_path / "out", "--adapter")
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert "holds a LoRA adapter, not a model" in error(tmp_path / "adapter", tmp_path / "out")


MEASURE = """
import re, sys
from jaxllm.checkpoint.hub import resolve
from jaxllm.cli.main import main
import jaxllm.saving, jax.numpy as jnp
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
jnp.ones((1000, 1000)).block_until_ready()
before = peak()
assert main(["export", *sys.argv[1:]]) == 0
print(before, peak())
"""


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory(tmp_path):
    """The largest tensor and 128 MB; the model has 250 MB."""
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    size, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    shapes = {"self_attn.q_proj": (size, size), "self_attn.k_proj": (size, size)}
    shapes |= {"self_attn.v_proj": (size, size), "self_attn.o_proj": (size, size)}
    shapes |= {"mlp.gate_proj": (inner, size), "mlp.up_proj": (inner, size)}
    shapes |= {"mlp.down_proj": (size, inner)}
    shapes |= {"input_layernorm": (size,), "post_attention_layernorm": (size,)}
    tensors = {
        f"model.layers.{layer}.{name}.weight": rng.standard_normal(shape, np.float32)
        for layer in range(CONFIG["num_hidden_layers"])
        for name, shape in shapes.items()
    }
    embedding = rng.standard_normal((CONFIG["vocab_size"], size), np.float32)
    tensors |= {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(size, "f")}
    write_flax(folder, tensors)
    run = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "out")]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    before, peak = map(int, done.stdout.splitlines()[-1].split())
    print(f"peak {(peak - before) // MB} MB, largest tensor {embedding.nbytes // MB} MB")
    assert peak - before < embedding.nbytes + 128 * MB
