"""``jaxllm doctor``: a table and JSON of the same content, without names of users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_packaging import PROJECT

from jaxllm.cli.doctor import EXTRAS, main


def test_table_and_json_agree(capsys: pytest.CaptureFixture[str]):
    assert main([]) == 0
    table = capsys.readouterr().out
    assert main(["--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["versions", "machine", "devices", "storage", "extras"]
    for rows in report.values():
        for name, value in rows.items():
            assert name in table
            if "available" not in value:
                assert value in table
    assert report["devices"]["cpu 0"] == "cpu"


def test_every_extra_is_there():
    declared = PROJECT["project"]["optional-dependencies"]
    assert set(EXTRAS) == set(declared) - {"cpu", "cuda12", "cuda13", "tpu"}
    for extra, (package, _) in EXTRAS.items():
        assert any(package in requirement for requirement in declared[extra]) or extra == "plan-tpu"


def test_the_home_folder_is_not_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = [sys.executable, "-m", "jaxllm", "doctor"]
    environment = os.environ | {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    environment.pop("JAXLLM_CACHE_DIR", None)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "~/.cache/jaxllm/xla: 0 files" in done.stdout
    assert str(tmp_path) not in done.stdout


@pytest.mark.parametrize(("name", "expected"), [("plain", "portable"), ("0", "switched off")])
def test_the_instruction_set_is_named(name: str, expected: str):
    kernels = pytest.importorskip("jaxllm_cpu_kernels")
    if not hasattr(kernels, "instruction_set"):
        pytest.skip("the installed kernels come from an older clone")
    command = [sys.executable, "-m", "jaxllm", "doctor", "--json"]
    environment = os.environ | {"JAXLLM_CPU_KERNELS": name}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert expected in json.loads(done.stdout)["devices"]["CPU kernels"]


@pytest.mark.ci
@pytest.mark.parametrize("platform", ["nonsense", "cuda"])  # JAX raises a different error for each
def test_a_backend_that_cannot_start_is_an_error(platform: str):
    command = [sys.executable, "-m", "jaxllm", "doctor"]
    environment = os.environ | {"JAX_PLATFORMS": platform}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "JAX  cannot start: " in done.stdout
    assert "Traceback" not in done.stderr
