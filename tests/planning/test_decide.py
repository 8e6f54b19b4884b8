"""`decide`: bounds of all meshes of a topology, without its compiler."""

from __future__ import annotations

import json
import math
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import jax
import pytest
import tiny
from paths import ROOT

import jaxllm
from jaxllm.cli.main import main
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.planning import abstract_model, decide, find_topology
from jaxllm.planning.topology import CHIPS, Topology

LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
PARAMETERS = 8_030_261_248
"""Of Llama-3.1-8B, as its card says."""


def test_meshes_of_an_8b_model() -> None:
    decision = decide(LLAMA_8B, "v5e:2x4", prompt=896, new=128)
    assert decision.devices == 8
    assert decision.checkpoint_bytes == 2 * PARAMETERS
    assert decision.load_seconds == 16.1
    by_mesh = {tuple(bounds.mesh.values()): bounds for bounds in decision.meshes}
    assert by_mesh.keys() == {(8, 1, 1), (4, 1, 2), (2, 1, 4), (1, 1, 8)}
    assert by_mesh[8, 1, 1].rows == 0  # 16 GB do not fit a chip of 15.75 GiB
    assert decision.meshes[-1] is by_mesh[8, 1, 1]
    rates = [bounds.requests_per_s for bounds in decision.meshes]
    assert rates == sorted(rates, reverse=True)
    assert decision.best is decision.meshes[0]
    bounds, chip = by_mesh[1, 1, 8], CHIPS["v5e"]
    assert chip.memory_bytes is not None
    assert chip.bandwidth is not None
    # Keys and values of 1,024 columns, of one of 8 heads, in bfloat16.
    cache = 1024 * 2 * 32 * 128 * 2
    assert cache < bounds.row_bytes < 1.01 * cache
    assert bounds.weight_bytes + bounds.rows * bounds.row_bytes <= 0.9 * chip.memory_bytes
    # All weights but the embedding, of which a step reads the rows of its tokens only.
    read = bounds.weight_bytes - 128256 * 4096 * 2 / 8
    seconds = (read + bounds.rows * bounds.row_bytes) / chip.bandwidth
    assert bounds.step_us == pytest.approx(seconds * 1e6, rel=1e-3)
    sent = 64 * 2 * 7 / 8 * bounds.rows * 4096 * 2  # two all-reduces a layer
    assert bounds.collective_us == pytest.approx(sent / 90e9 * 1e6, rel=1e-3)
    total = (bounds.step_us + bounds.collective_us) / 1e6
    assert bounds.tokens_per_s == pytest.approx(bounds.rows / total, rel=1e-3)
    assert bounds.requests_per_s < bounds.tokens_per_s / 128


def test_weights_are_gathered_where_they_fit_in_no_other_way() -> None:
    config = LLAMA_8B | {"num_key_value_heads": 4, "num_hidden_layers": 150}
    decision = decide(config, "v5e:2x4", prompt=896, new=128)
    best, chip = decision.best, CHIPS["v5e"]
    assert best is not None
    assert chip.bandwidth is not None
    assert best.mesh == {"data": 1, "fsdp": 2, "tensor": 4}
    plain = [bounds for bounds in decision.meshes if bounds.mesh["fsdp"] == 1]
    assert [bounds.rows for bounds in plain] == [0, 0, 0]
    # A step receives half of all weights but the embedding, and reads them whole.
    embedding = 128256 * 4096 * 2 / 8
    received = best.weight_bytes - embedding
    rows = best.rows / 2
    reduced = 300 * 2 * 3 / 4 * rows * 4096 * 2  # two all-reduces a layer, over `tensor`
    assert best.collective_us == pytest.approx((received + reduced) / 90e9 * 1e6, rel=1e-2)
    read = 2 * received + rows * best.row_bytes
    assert best.step_us == pytest.approx(read / chip.bandwidth * 1e6, rel=1e-2)


def test_training_of_all_weights_and_of_lora() -> None:
    full = decide(LLAMA_8B, "v5e:2x4", batch=8, prompt=1024).training
    assert full is not None
    assert full.state_bytes == pytest.approx(16 * PARAMETERS / 8, rel=1e-2)
    logits = 1024 * 128256 * 2
    assert full.activation_bytes == 1024 * 4096 * 32 * 2 + 2 * logits  # and their gradient
    assert not full.fits
    flops = 6 * (PARAMETERS - 128256 * 4096) * 8192 + 12 * 32 * 4096 * 8 * 1024**2 / 2
    assert full.step_us == pytest.approx(flops / (8 * 197e12) * 1e6, rel=1e-2)
    lora = decide(LLAMA_8B, "v5e:2x4", batch=8, prompt=1024, lora_rank=16).training
    assert lora is not None
    assert lora.fits
    assert 2 * PARAMETERS / 8 < lora.state_bytes < 2.3 * PARAMETERS / 8
    assert lora.tokens_per_s > full.tokens_per_s


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_has_bounds(family: str) -> None:
    decision = decide(tiny.CONFIGS[family], "h200:2", prompt=8, new=8)
    best = decision.best
    assert best is not None
    model = abstract_model(tiny.CONFIGS[family])
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(model))
    assert decision.checkpoint_bytes == held
    assert min(best.step_us, best.tokens_per_s, best.requests_per_s) > 0
    assert all(math.prod(bounds.mesh.values()) == 2 for bounds in decision.meshes)
    quantized = decide(tiny.CONFIGS[family], "h200:2", prompt=8, new=8, quantize="int8")
    assert quantized.best is not None
    assert quantized.best.weight_bytes != best.weight_bytes
    assert quantized.training is None


@pytest.mark.parametrize("name", ["a100", "a100-40gb:8", "l4:2", "h100:4", "h200", "b200:8"])
def test_gpus_have_bounds_without_a_compiler(name: str) -> None:
    decision = decide(tiny.CONFIGS["gpt2"], name, prompt=8, new=8)
    assert decision.devices == int(name.partition(":")[2] or 1)
    assert decision.best is not None


def test_many_devices_take_no_longer() -> None:
    decision = decide(tiny.CONFIGS["gpt2"], "v5p:1000x1000x1000", prompt=8, new=8)
    assert decision.devices == 10**9
    assert decision.best is not None


def test_wrong_inputs() -> None:
    config = tiny.CONFIGS["gpt2"]
    with pytest.raises(UnsupportedError, match="'cpu'; name a TPU or GPU"):
        decide(config, "cpu")
    with pytest.raises(UnsupportedError, match=r"compiles no programs for H200.*--bounds"):
        find_topology("h200")
    sizes = {"prompt": 8, "new": 8}
    with pytest.raises(InputError, match="lora_rank: quantized weights are not trained"):
        decide(config, "l4", quantize="int8", lora_rank=4, **sizes)
    with pytest.raises(InputError, match="lora_rank: expected an integer from 1 on, found 0"):
        decide(config, "l4", lora_rank=0, **sizes)
    with pytest.raises(UnsupportedError, match="expected l4 or a number of them"):
        decide(config, "l4:2x2")
    with pytest.raises(InputError, match="expected sizes of axes or 'auto', found 'best'"):
        jaxllm.plan(config, "cpu", mesh="best", program="decode")
    with pytest.raises(InputError, match="lora_rank: has an effect on a training step only"):
        jaxllm.plan(config, "cpu", lora_rank=4, program="decode")


def test_lora_in_the_training_step() -> None:
    sizes: dict[str, Any] = {"batch": 2, "prompt": 6, "program": "train", "dtype": "float32"}
    (full,) = jaxllm.plan(tiny.CONFIGS["llama"], "cpu", **sizes).programs
    (lora,) = jaxllm.plan(tiny.CONFIGS["llama"], "cpu", lora_rank=2, **sizes).programs
    moments = full.argument_bytes - lora.argument_bytes
    assert 1.6 * full.weight_bytes < moments < 2 * full.weight_bytes
    assert lora.weight_bytes > full.weight_bytes


def test_the_command_says_what_to_do(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    command = ["plan", str(path), "--topology", "a100:4", "--prompt", "1024"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("Generate on 4 x A100 80GB with --mesh data=4: at most ")
    assert "Loading reads 16.1 GB" in captured.out
    assert "Train all weights with --mesh fsdp=4" in captured.out
    assert "jaxllm knows no compiler for A100 80GB" in captured.err
    assert main([*command, "--bounds", "--json", "--lora-rank", "8"]) == 0
    actual = json.loads(capsys.readouterr().out)["decision"]
    assert actual["meshes"][0]["mesh"] == {"data": 4, "fsdp": 1, "tensor": 1}
    assert actual["training"]["lora_rank"] == 8
    assert main(["plan", str(path), "--topology", "l4", "--bounds"]) == 0
    assert capsys.readouterr().out.startswith("Generate on 1 x L4 with --mesh data=1: at most ")
    path.write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": 64}))
    assert main(["plan", str(path), "--topology", "l4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The weights do not fit: ")
    assert "the weights fit on none of the meshes" in captured.err
    assert main([*command, "--bounds", "--mesh", "tensor=2"]) == 2
    assert "leave out --mesh" in capsys.readouterr().err
    assert main([*command, "--program", "decode"]) == 2
    assert "compiles no programs for A100 80GB" in capsys.readouterr().err


def test_the_command_ranks_the_meshes_once(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args[1])
        return decide(*args, **options)

    # This machine's CPU in place of a GPU, whose compiler may be missing.
    described = Topology("h100", CHIPS["h100"], tuple(jax.devices("cpu")[:1]))
    planner = sys.modules["jaxllm.planning.plan"]
    monkeypatch.setattr(planner, "find_topology", lambda name: described)
    for module in (planner, import_module("jaxllm.cli.plan")):
        monkeypatch.setattr(module, "decide", counted)
    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["gpt2"]))
    command = ["plan", str(tmp_path), "--topology", "h100", "--program", "decode", "--json"]
    assert main([*command, "--batch", "2", "--prompt", "5", "--new", "3", "--slots", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert calls == ["h100"]
    assert found["programs"][0]["mesh"] == found["decision"]["meshes"][0]["mesh"]


def test_a_plan_refuses_a_decision_about_other_devices() -> None:
    decision = decide(tiny.CONFIGS["gpt2"], "h100:2", prompt=8, new=8)
    with pytest.raises(InputError, match="about h100:2, and the topology is cpu"):
        jaxllm.plan(tiny.CONFIGS["gpt2"], "cpu", mesh=decision, program="decode")


def test_an_encoder_has_bounds_of_nothing(tmp_path: Path, capsys: Any) -> None:
    raw = tiny.CONFIGS["t5"] | {"architectures": ["T5EncoderModel"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["plan", str(tmp_path), "--topology", "l4"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The model has no language-model head, and does not generate.")
    assert "Train" not in captured.out
    assert captured.err.endswith("no programs are compiled: the model does not generate\n")
    with pytest.raises(InputError, match="lora_rank: a T5EncoderModel is not trained"):
        decide(raw, "l4", lora_rank=4)


def test_a_classifier_has_bounds_of_training_alone(tmp_path: Path, capsys: Any) -> None:
    raw = tiny.CONFIGS["llama"] | {"architectures": ["LlamaForSequenceClassification"]}
    decision = decide(raw, "l4:2", prompt=8, new=8)
    assert (decision.meshes, decision.best) == ((), None)
    assert decision.training is not None
    assert decision.training.fits
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert main(["plan", str(tmp_path), "--topology", "l4", "--prompt", "8", "--new", "8"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("The model has no language-model head")
    assert "add --program train" in captured.err


def test_the_documentation_names_every_figure() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    decision = decide(tiny.CONFIGS["gpt2"], "l4", prompt=8, new=8)
    named = {*decision.to_dict(), *vars(decision.meshes[0]), *vars(decision.training)}
    assert [name for name in sorted(named) if f"`{name}`" not in text] == []
