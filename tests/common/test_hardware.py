"""Accelerators that a machine has and JAX does not see, and the line about devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.common import hardware

FILES = {
    "dev/nvidia0": "gpu",
    "proc/driver/nvidia/gpus/0000:00:04.0/information": "gpu",
    "dev/accel0": "tpu",
    "sys/bus/pci/devices/0000:00:05.0/vendor": "tpu",
}


def put(root: Path, name: str, text: str = "0x1ae0\n") -> None:
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize(("name", "kind"), FILES.items())
def test_accelerators_are_found(tmp_path: Path, name: str, kind: str):
    put(tmp_path, name)
    assert hardware.accelerators(tmp_path) == {kind}


def test_other_devices_are_none(tmp_path: Path):
    put(tmp_path, "sys/bus/pci/devices/0000:00:05.0/vendor", "0x8086\n")
    put(tmp_path, "dev/nvidiactl")  # stands for no GPU
    assert hardware.accelerators(tmp_path) == set()


def test_an_unseen_accelerator_comes_with_a_cure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path, "dev/nvidia0")
    put(tmp_path, "dev/accel0")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert hardware.unseen_accelerators(tmp_path) == []  # somebody wants the CPU
    monkeypatch.delenv("JAX_PLATFORMS")
    gpu, tpu = hardware.unseen_accelerators(tmp_path)
    assert ".[cuda12]" in gpu
    assert ".[tpu]" in tpu


def test_missing_kernels_are_mentioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", "0")
    (line,) = hardware.device_report(tmp_path)
    assert line.startswith("devices: ")
    assert "kernels" not in line
    monkeypatch.delenv("JAXLLM_CPU_KERNELS")
    monkeypatch.setattr(hardware, "find_spec", lambda name: None)
    _, hint = hardware.device_report(tmp_path)
    assert "make kernels" in hint
    assert ".[cpu]" in hint
