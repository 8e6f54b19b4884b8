"""`benchmarks/accelerator.py`: a CPU measured as a device, the record of all cases, and plans where
there is no device."""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from paths import ROOT

from jaxllm.planning import abstract_model

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
    assert len(report["checks"]) == 6
    assert all(check["passed"] for check in report["checks"])
    assert all(check["difference"] > 0 for check in report["checks"][4:])  # bfloat16
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


@pytest.mark.slow
def test_a_record(benchmark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "record.json"
    options = ["--small", "--device", "cpu", "--hf", "none", "--families", "opt"]
    assert benchmark.main([*options, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert [check["name"].partition(":")[0] for check in report["checks"]] == ["opt"] * 3
    cases = importlib.import_module("record_cases").CASES
    assert [case["name"] for case in report["cases"]] == [f"{case.name} (small)" for case in cases]
    for case in report["cases"]:
        assert case["jaxllm"]["step_seconds"] != 0
        assert case["jaxllm"]["floor_seconds"] > 0
    # Two of the small cases are the same.
    assert [case["jaxllm"]["programs"] > 0 for case in report["cases"]].count(True) == 9
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + len(cases)


@pytest.mark.ci
def test_the_checks_of_the_kernel_of_decode_steps(
    benchmark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU both sides are the reference, in float32 and in bfloat16."""
    checks = importlib.import_module("device_checks")
    cases = {"wide": (2, 2, 4, 1, 128, 80, True, False), "beams": (2, 1, 1, 4, 64, 72, True, True)}
    monkeypatch.setattr(checks, "STEP_CASES", cases | {"cross": (2, 2, 1, 4, 64, 64, False, False)})
    found = [
        check for name in checks.STEP_CASES for check in checks.step_checks(name, jax.devices()[0])
    ]
    assert [check.name.partition(": ")[2] for check in found] == 3 * ["output", "keys", "values"]
    assert all(check.passed for check in found)
    assert 0 < found[0].difference < checks.STEP_TOLERANCE
    monkeypatch.setattr(checks, "TOKENS", 68)
    model = checks.small_model("t5", jax.devices()[0], "float32")
    ids = np.random.default_rng(0).integers(3, 1000, (checks.ROWS, 68)).astype(np.int32)
    mask = checks.padding_mask(ids)
    inputs = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "attention_mask": mask}
    whole = np.asarray(model(ids, **inputs).logits)[:, -checks.STEPS :]
    np.testing.assert_allclose(checks.cached_logits(model, ids), whole, atol=1e-4)


@pytest.mark.slow
def test_a_record_of_implementations_of_attention(benchmark: Any, tmp_path: Path) -> None:
    file, names = tmp_path / "record.json", ["blockwise", "xla"]
    options = ["--small", "--device", "cpu", "--families", "opt", "--attn-implementation", *names]
    assert benchmark.main([*options, "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    assert {check["name"].partition(":")[0] for check in report["checks"]} == {
        f"opt, {name}" for name in names
    }
    assert len(report["cases"]) == 6  # one prefill and two training steps
    for case, name in zip(report["cases"], 3 * names, strict=True):
        assert case["name"].endswith(f"(small), {name}")
        assert case["jaxllm"]["step_seconds"] > 0
    with pytest.raises(SystemExit):
        benchmark.main(["llama8b", "--attn-implementation", *names])


@pytest.mark.ci
def test_a_record_keeps_the_choices_of_kernels_and_no_programs(
    benchmark: Any, tmp_path: Path
) -> None:
    kept = importlib.import_module("record").keep_tuning(tmp_path)
    code = """if True:
        import jax
        from jax._src import compiler
        jax.jit(lambda x: x + 1)(1)
        options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
        print(options.executable_build_options.debug_options.xla_gpu_per_fusion_autotune_cache_dir)
    """
    environment = {k: v for k, v in os.environ.items() if "XLA_CACHES" not in k}
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | kept,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(output.stdout.strip()).parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_what_is_missing_in_a_record_is_listed(benchmark: Any) -> None:
    record = importlib.import_module("record")
    own = {"step_seconds": 0.005, "tokens_per_second": 200.0, "floor_seconds": 0.004, "slots": None}
    own |= {"whole_tokens_per_second": 150.0, "compile_seconds": 9.0, "programs": 2}
    peer = {"step_seconds": 0.02, "tokens_per_second": 50.0, "whole_tokens_per_second": 40.0}
    cases = [
        {"name": "a", "goal": 0.8, "jaxllm": own, "transformers": peer},
        {"name": "b", "goal": 0.8, "jaxllm": own, "transformers": {"error": "no memory"}},
        {"name": "c", "goal": 0.8, "jaxllm": {"left_out": "needs about 9 GB"}},
        {"name": "d", "goal": 0.8},
    ]
    columns = "5.00 ms | 200 | 150 | 4.00 ms | 80% | 80%: 5.00 ms | 9.0 s, 2 programs"
    assert list(record.table(cases))[2:] == [
        f"| a | {columns} | 20.00 ms | 40 | 4.0 |",
        f"| b | {columns} | failed, no memory |  |  |",
        "",
        "- c: left out, needs about 9 GB",
        "- d: left out, the time is over",
    ]
    assert record.succeeded({"cases": cases, "checks": [{"passed": True}]})
    cases[3]["jaxllm"] = {"error": "no memory"}
    assert not record.succeeded({"cases": cases, "checks": [{"passed": True}]})


WORKER = """
import json, sys, time
print(json.dumps({"version": "1"}), flush=True)
for line in sys.stdin:
    case = json.loads(line)
    if case["name"] == "dies":
        sys.exit(3)
    time.sleep(case["rows"])
    print(json.dumps({"error": "none"}), flush=True)
"""


def test_a_worker_that_dies_is_started_again(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = importlib.import_module("record")
    Case = importlib.import_module("record_cases").Case
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    cases = [(Case(name=name, kind="decode", rows=0), 0.0) for name in ("a", "dies", "b")]
    cases.append((Case(name="late", kind="decode", rows=0), 100.0))
    clock = record.Clock(60.0)
    engine = record.Engine("peer", sys.executable, str(worker))
    answers = engine.measure(cases, clock)
    assert list(answers) == ["a", "dies", "b"]
    assert answers["a"] == answers["b"] == {"error": "none"}
    assert "the worker died" in answers["dies"]["error"]
    assert clock.skipped == ["peer: late"]
    # A case that goes on after the end of the time is stopped.
    monkeypatch.setattr(record, "GRACE", 0.0)
    engine = record.Engine("peer", sys.executable, str(worker))
    answers = engine.measure([(Case(name="long", kind="decode", rows=60), 0.0)], record.Clock(1.0))
    assert answers == {"long": {"left_out": "the time is over"}}


@pytest.mark.ci
def test_floors_of_a_record(benchmark: Any) -> None:
    """Those of docs/performance.md: what an H200 reads in a step of Llama-8B."""
    speed = importlib.import_module("device_speed")
    cases = importlib.import_module("record_cases").CASES
    model = abstract_model(cases[0].config())
    reads, bandwidth = speed.Reads.of(model), speed.data_sheet_bandwidth("NVIDIA H200")
    steps = [
        1e3 * reads.step(case.rows, case.beams, case.prompt, 0.75 * case.new) / bandwidth
        for case in cases[:2]
    ]
    assert steps == pytest.approx([3.14, 4.19], abs=0.005)
    assert speed.data_sheet_bandwidth("NVIDIA A100-SXM4-80GB") == 2.039e12
    assert speed.data_sheet_bandwidth("NVIDIA H100 PCIe") is None
    assert speed.data_sheet_bandwidth("abacus") is None


@pytest.mark.parametrize("options", [["--batches", "1"], [".", "--small"], [".", "--hf", "none"]])
def test_options_of_the_other_mode_are_errors(
    benchmark: Any, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main(options)
    assert "MODEL" in capsys.readouterr().err
