"""`benchmarks/accelerator.py`: a CPU measured as a device, and plans where there is no device."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import tiny
from paths import ROOT

SMALL = "--batches 2 --prompt 4 --new 8 --prefill-rows 2 --prefill-tokens 16 --slots 2"
SMALL += " --train-rows 2 --train-tokens 16 --repeats 1 --dtype float32"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("accelerator")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    changes = {"num_hidden_layers": 1, "eos_token_id": None}
    (tmp_path / "config.json").write_text(json.dumps({**tiny.CONFIGS["llama"], **changes}))
    return tmp_path


def run(benchmark: Any, config: Path, *options: str) -> tuple[int, dict[str, Any]]:
    file = config / "figures.json"
    code = benchmark.main([str(config), "--json", str(file), *SMALL.split(), *options])
    return code, json.loads(file.read_text())


@pytest.mark.slow
def test_a_cpu_is_checked_and_measured(
    benchmark: Any, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "cpu", "--attn-implementation", "blockwise", "--families", "t5"]
    code, report = run(benchmark, config, *options)
    assert code == 0
    assert report["platform"] == "cpu"
    assert len(report["checks"]) == 5
    assert all(check["passed"] for check in report["checks"])
    assert report["checks"][4]["difference"] > 0  # bfloat16
    check_measurements(report)
    assert "batch engine, 2 slots: " in capsys.readouterr().out


@pytest.mark.ci
def test_measurements(benchmark: Any, config: Path) -> None:
    code, report = run(benchmark, config, "--device", "cpu", "--families")
    assert (code, report["checks"]) == (0, [])
    check_measurements(report)


def check_measurements(report: dict[str, Any]) -> None:
    assert report["limits"]["bandwidth"] > 1e8
    names = [measurement["name"] for measurement in report["measurements"]]
    assert names == [
        "decode, batch 2",
        "prefill, 2 x 16",
        "batch engine, 2 slots",
        "training step, 2 x 16",
    ]
    for measurement in report["measurements"]:
        assert math.isfinite(measurement["step_seconds"])
        assert "train" in measurement["name"] or measurement["tokens_per_second"] != 0
    assert report["skipped"] == []


@pytest.mark.ci
def test_a_device_whose_numbers_differ_fails(
    benchmark: Any, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = importlib.import_module("device_checks")
    wrong = checks.Check("llama: logits in float32", float("nan"), 1e-3)
    monkeypatch.setattr(benchmark, "checks", lambda *args: [wrong])
    options = ["--device", "cpu", "--families", "llama", "--minutes", "1e-9"]
    # Time is over at once: everything is left out, and said to be.
    code, report = run(benchmark, config, *options)
    assert code == 0
    assert report["skipped"][0] == "checks of llama"
    assert len(report["skipped"]) == 5
    monkeypatch.setattr(benchmark, "measurements", lambda *args: [])
    assert run(benchmark, config, *options[:-2])[0] == 1


def test_compilers_that_are_missing(
    benchmark: Any,
    config: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, report = run(benchmark, config)
    assert (code, report["plans"]) == (1, [])
    lines = capsys.readouterr().out
    assert "no accelerator" in lines
    for topology, extra in (("h100", "plan-gpu"), ("v5e:2x2", "plan-tpu")):
        assert f"{topology}: compiling for this topology needs" in lines
        assert f".[{extra}]" in lines


@pytest.mark.slow
def test_plans(benchmark: Any, config: Path) -> None:
    code, report = run(benchmark, config, "--topology", "cpu")
    assert (code, report["missing"]) == (0, [])
    names = [program["name"] for plan in report["plans"] for program in plan["programs"]]
    assert names == ["decode", "prefill", "batch.decode", "batch.prefill", "train"]
