"""``jaxllm doctor``: what an installation has and what it lacks, as a table for a bug report."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

import jaxllm
from jaxllm.cli.process import Parser, backend_failure, command, one_line
from jaxllm.common.optional_packages import install_command

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
EXTRAS = {
    "train": ("grain", "jaxllm train"),
    "grammar": ("llguidance", "answers that match a JSON schema, a regex or a grammar"),
    "parquet": ("pyarrow", "Parquet files and data frames"),
    "datasets": ("datasets", "rows of Hugging Face data sets"),
    "serve": ("uvicorn", "jaxllm serve"),
    "ray": ("ray", "batch jobs and training on several machines"),
    "eval": ("lm-eval", "jaxllm eval --tasks"),
    "metrics": ("rouge-score", "ROUGE and BLEU in evaluations of a training run"),
    "plot": ("matplotlib", "charts of a training run"),
    "tensorboard": ("tensorboardX", "TensorBoard logs of a training run"),
    "wandb": ("wandb", "logging a training run to Weights & Biases"),
    "verify": ("torch", "jaxllm verify"),
    "plan-tpu": ("libtpu", "jaxllm plan for TPUs"),
    "plan-gpu": ("jax-cuda12-plugin", "jaxllm plan for GPUs"),
}
"""Extra -> a package that it installs, and what the extra is for."""

Section = dict[str, str]


def _parser(program: str) -> Parser:
    parser = Parser(program, description="Show what this installation has and what it lacks.")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    devices, works = _devices()
    report = {
        "versions": _versions(),
        "machine": _machine(),
        "devices": devices,
        "storage": _storage(),
        "extras": _extras(),
    }
    if arguments.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n\n".join(_table(name, rows) for name, rows in report.items()))
    return 0 if works else 1


def _table(title: str, rows: Section) -> str:
    """A section with its names and values in two columns.

    >>> print(_table("machine", {"cores": "2", "memory": "24 GB"}))
    machine
      cores   2
      memory  24 GB
    """
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:{width}}  {value}" for name, value in rows.items())])


def _versions() -> Section:
    return {
        "jaxllm": jaxllm.__version__,
        "Python": sys.version.split()[0],
        **{name: _version(name) or "missing" for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _machine() -> Section:
    from jaxllm.common.hardware import cpu_name

    memory = psutil.virtual_memory()
    return {
        "system": platform.platform(),
        "CPU": cpu_name(),
        "cores": str(os.cpu_count()),
        "memory": f"{memory.total / 1e9:.1f} GB, {memory.available / 1e9:.1f} GB available",
    }


def _devices() -> tuple[Section, bool]:
    """JAX's devices and what could be better, and whether JAX can start."""
    import jax

    from jaxllm.common.hardware import KERNELS_GAIN, cpu_kernels, unseen_accelerators

    failure = backend_failure()  # a plugin that cannot be loaded, no driver
    if failure is not None:
        return {"JAX": f"cannot start: {one_line(failure)}"}, False
    rows: Section = {}
    for device in jax.devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = "" if limit is None else f", {limit / 1e9:.1f} GB"
        rows[f"{device.platform} {device.id}"] = f"{device.device_kind}{memory}"
    for number, cure in enumerate(unseen_accelerators(), start=1):
        rows[f"missing {number}"] = cure
    version = _version("jaxllm-cpu-kernels")
    states = {
        "used": f"version {version}{_instruction_set()}",
        "off": "switched off by JAXLLM_CPU_KERNELS=0",
        "missing": f"not installed; {KERNELS_GAIN}",
    }
    rows["CPU kernels"] = states[cpu_kernels()]
    return rows, True


def _instruction_set() -> str:
    """What the kernels compute with, such as ``, AVX2``; empty if they do not say."""
    if find_spec("jaxllm_cpu_kernels") is None:
        return ""
    package = import_module("jaxllm_cpu_kernels")
    # Kernels that an older clone has built lack the function.
    return f", {package.instruction_set()}" if hasattr(package, "instruction_set") else ""


def _storage() -> Section:
    from jaxllm.checkpoint.hub import smollm2
    from jaxllm.common.compiling import default_folder
    from jaxllm.common.errors import MissingFileError

    folder = default_folder()
    files = [path for path in folder.glob("*") if path.is_file()] if folder.is_dir() else []
    size = sum(path.stat().st_size for path in files)
    try:
        model = _short(smollm2())
    except MissingFileError as error:
        model = str(error)
    return {
        "compiled programs": f"{_short(folder)}: {len(files)} files, {size / 1e6:.0f} MB",
        "model smollm2": model,
    }


def _short(path: Path) -> str:
    """A path with the home folder as ``~``."""
    try:
        return str(Path("~") / path.relative_to(Path.home()))
    except (ValueError, RuntimeError):  # elsewhere, or no home
        return str(path)


def _extras() -> Section:
    rows: Section = {}
    for extra, (package, purpose) in EXTRAS.items():
        version = _version(package)
        state = f"missing, {install_command(extra)}" if version is None else "installed"
        rows[extra] = f"{state}: {purpose}"
    return rows


main = command(_parser, _run, "jaxllm doctor")
"""Returns 1 if JAX cannot start."""
