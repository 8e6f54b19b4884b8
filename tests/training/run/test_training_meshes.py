"""Runs on eight devices in three meshes, and on one: the same losses, and one can go on as another.

Sums are made in another order, so losses agree to 1e-5 of theirs; the data and the keys are equal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from devices import on_devices
from tiny_runs import measured, preference_fields, saved, write_recipe

MESHES = {
    "data": {"data": 8},
    "fsdp": {"data": 2, "fsdp": 4},
    "tensor": {"data": 4, "tensor": 2},
}
RUN = """
import json, sys
from pathlib import Path
from jaxllm.common.compiling import enable_compile_cache
from jaxllm.training.run.recipe import read_recipe
from jaxllm.training.run.run import train

recipe, programs, runs = sys.argv[1:]
enable_compile_cache(programs)
for overrides, resume in json.loads(runs):
    train(read_recipe(Path(recipe), overrides), resume=resume, quiet=True)
"""


def run(recipe: Path, programs: Path, *runs: Any, devices: int) -> None:
    on_devices(RUN, recipe, programs, json.dumps(runs), devices=devices)


def assert_close(folder: Path, other: Path) -> None:
    """Steps, tokens and learning rates are equal; losses and gradients within rounding."""
    lines, others = measured(folder), measured(other)
    assert len(lines) == len(others)
    for line, expected in zip(lines, others, strict=True):
        assert line.keys() == expected.keys()
        near = {"loss": 1e-5, "grad_norm": 1e-3}
        for name in line:
            assert line[name] == pytest.approx(expected[name], rel=near.get(name, 0), abs=0), name


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def recipe_in(folder: Path) -> Path:
    data = {"path": str(folder / "rows.jsonl"), "format": "text", "max_length": 32, "packing": True}
    return write_recipe(folder, data=data, batch_size=16, accumulation=2)


def to(folder: Path, steps: int, mesh: dict[str, int], resume: bool = False) -> Any:
    """Overrides that bring the run in a folder to a step, and whether it is one that goes on."""
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    return {"output_dir": str(folder), "max_steps": steps, **sizes}, resume


@pytest.mark.slow
def test_two_by_four_devices_go_on_as_one(tmp_path: Path, programs: Path):
    recipe, one, other = recipe_in(tmp_path), tmp_path / "one", tmp_path / "other"
    run(recipe, programs, to(other, 3, MESHES["fsdp"]), devices=8)
    runs = to(one, 5, {"data": 1}), to(other, 5, {"data": 1}, True)
    run(recipe, programs, *runs, devices=1)
    assert_close(other, one)
    assert_same_place(other, one)


@pytest.mark.slow
def test_meshes(tmp_path: Path, programs: Path):
    """In each mesh and on one device; then each goes on as another."""
    recipe, one = recipe_in(tmp_path), tmp_path / "one"
    run(recipe, programs, to(one, 6, {"data": 1}), devices=1)
    first = [to(tmp_path / name, 4, mesh) for name, mesh in MESHES.items()]
    second = [to(tmp_path / "data", 6, MESHES["fsdp"], True)]
    second += [to(tmp_path / "fsdp", 6, MESHES["tensor"], True)]
    run(recipe, programs, *first, *second, devices=8)
    run(recipe, programs, to(tmp_path / "tensor", 6, {"data": 1}, True), devices=1)
    for name in MESHES:
        assert_close(tmp_path / name, one)
        assert_same_place(tmp_path / name, one)


@pytest.mark.slow
def test_dpo(tmp_path: Path, programs: Path):
    """Its references and its steps; LoRA's factors are replicated, the other weights sharded."""
    fields = preference_fields(tmp_path) | {"batch_size": 8}
    recipe, one = write_recipe(tmp_path, **fields), tmp_path / "one"
    run(recipe, programs, to(one, 4, {"data": 1}), devices=1)
    meshes = [to(tmp_path / name, 4, mesh) for name, mesh in MESHES.items()]
    run(recipe, programs, *meshes, devices=8)
    for name in MESHES:
        for line, expected in zip(measured(tmp_path / name), measured(one), strict=True):
            for metric, value in expected.items():
                assert line[metric] == pytest.approx(value, rel=1e-4, abs=1e-4), (name, metric)


def assert_same_place(folder: Path, other: Path) -> None:
    """Step, key and the data's position are equal."""
    (arrays, position), (expected, there) = saved(folder), saved(other)
    assert position == there
    assert (arrays["step"], arrays["key"]) == (expected["step"], expected["key"])
