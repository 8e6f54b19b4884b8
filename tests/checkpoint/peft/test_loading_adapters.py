"""Adapters where a model is loaded: `load(adapter=...)`, ``--adapter``, hints for other folders."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from devices import on_devices
from paths import DATA

import jaxllm
from jaxllm.checkpoint.peft import CONFIG, WEIGHTS_FILE, load_adapter, save_adapter
from jaxllm.cli.batch import job_identity
from jaxllm.cli.generate import main
from jaxllm.common.errors import CheckpointError, InputError, MissingFileError
from jaxllm.models.lora import LoraConfig, add_lora, merge_lora
from jaxllm.models.quantize import quantize_model
from jaxllm.models.weights import parameters, with_parameters

BASE = DATA / "conformance" / "models" / "s_llama_tok"
IDS = np.array([[1, 5, 9, 4, 7]])


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA for `BASE` that changes its outputs."""
    model = add_lora(jaxllm.load(BASE)[0], LoraConfig(rank=2))
    rng = np.random.default_rng(0)
    model = with_parameters(
        model,
        {
            path: jnp.asarray(rng.normal(size=x.shape), jnp.float32) if "lora_b" in path else x
            for path, x in parameters(model).items()
        },
    )
    folder = tmp_path_factory.mktemp("adapter") / "lora"
    save_adapter(folder, model)
    return folder


def logits(model) -> np.ndarray:
    return np.asarray(model(IDS).logits)


def test_the_adapter_is_merged(adapter: Path):
    base = jaxllm.load(BASE)[0]
    merged = merge_lora(load_adapter(base, adapter))
    loaded, tokenizer = jaxllm.load(BASE, adapter=adapter)
    assert tokenizer is not None
    np.testing.assert_array_equal(logits(loaded), logits(merged))
    assert np.abs(logits(loaded) - logits(base)).max() > 0.1
    assert loaded.generation_config == base.generation_config
    quantized, _ = jaxllm.load(BASE, adapter=adapter, quantize="int8")
    np.testing.assert_array_equal(logits(quantized), logits(quantize_model(merged, "int8")))


MESH = """
import sys, jax, numpy as np, jaxllm
base, adapter = sys.argv[1:]
ids = np.array([[1, 5, 9, 4, 7]] * 4)
for quantize in (None, "int8"):
    options = {"adapter": adapter, "quantize": quantize}
    alone, _ = jaxllm.load(base, **options)
    sharded, _ = jaxllm.load(base, mesh=jaxllm.make_mesh(fsdp=2, tensor=2), **options)
    np.testing.assert_allclose(alone(ids).logits, sharded(ids).logits, atol=1e-4)
    assert any(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(sharded))
print("equal")
"""


@pytest.mark.ci
def test_on_a_mesh(adapter: Path):
    assert on_devices(MESH, BASE, adapter, devices=4) == "equal\n"


def test_the_command_takes_it(adapter: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--max-new-tokens", "8", "--no-compile-cache", "--quiet", "Hello"]
    texts = []
    for flags in ([], ["--adapter", str(adapter)]):
        assert main(["--model", str(BASE), *flags, *words]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


def test_a_batch_job_compares_the_adapter(adapter: Path, tmp_path: Path):
    from jaxllm.cli.generate import _parser

    copy = tmp_path / "adapter"
    shutil.copytree(adapter, copy)

    def identity() -> dict[str, object]:
        words = ["--model", str(BASE), "--adapter", str(copy), "--input", "a", "--output", "b"]
        arguments: argparse.Namespace = _parser("generate").parse_args(words)
        return job_identity(arguments, "cpu")

    before = identity()
    data = bytearray((copy / WEIGHTS_FILE).read_bytes())
    data[-1] ^= 1
    (copy / WEIGHTS_FILE).write_bytes(data)
    changed = {name for name, value in identity().items() if before[name] != value}
    assert changed == {"adapter: model weights"}


def test_other_folders_say_what_to_do(adapter: Path, tmp_path: Path):
    with pytest.raises(MissingFileError, match=f"holds a LoRA adapter.* --adapter {adapter}"):
        jaxllm.load(adapter)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    run = tmp_path / "run"
    with pytest.raises(MissingFileError, match=f"training run, not a model.* export {run}"):
        jaxllm.load(run)
    with pytest.raises(MissingFileError, match=f"not an adapter.* export {run} OUT --adapter"):
        jaxllm.load(BASE, adapter=run)
    with pytest.raises(MissingFileError, match=r"not an adapter, which has adapter_config"):
        jaxllm.load(BASE, adapter=tmp_path)
    with pytest.raises(MissingFileError, match="nowhere: no such folder"):
        jaxllm.load(BASE, adapter=tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="holds a model, not an adapter"):
        jaxllm.load(BASE, adapter=BASE)
    with pytest.raises(InputError, match=r"^adapter: expected the folder of an adapter, found 3"):
        jaxllm.load(BASE, adapter=3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match=r"^quantize='keep': not with an adapter"):
        jaxllm.load(BASE, adapter=adapter, quantize="keep")
    with pytest.raises(InputError, match=r"^folder: expected the folder of an adapter"):
        load_adapter(adapter, jaxllm.load(BASE)[0])  # pyright: ignore[reportArgumentType]


def test_an_adapter_of_another_model_names_its_base(adapter: Path):
    other = DATA / "conformance" / "models" / "s_gpt2"
    with pytest.raises(CheckpointError, match=f"an adapter for {BASE}"):
        jaxllm.load(other, adapter=adapter)


def test_an_adapter_for_the_bundled_model_names_it_as_on_the_hub(adapter: Path, tmp_path: Path):
    model = load_adapter(jaxllm.load(BASE)[0], adapter)
    save_adapter(tmp_path / "a", model, base_model="smollm2")
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert config["base_model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
