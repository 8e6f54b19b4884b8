"""Runs on eight devices in three meshes, and on one: the same losses, and one can go on as another.

Sums are made in another order, so losses agree to 1e-5 of theirs; the data and the keys are equal.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from devices import on_devices
from tiny_runs import measured, saved, write_recipe

MESHES = {
    "data": {"data": 8},
    "fsdp": {"data": 2, "fsdp": 4},
    "tensor": {"data": 4, "tensor": 2},
}
RUN = """
import json, sys
from pathlib import Path
from jaxllm.cli import compile_cache
from jaxllm.training.recipe_file import read_recipe
from jaxllm.training.run import train

recipe, programs, runs = sys.argv[1:]
compile_cache.enable(Path(programs))
for overrides, resume in json.loads(runs):
    train(read_recipe(Path(recipe), overrides), resume=resume, quiet=True)
"""


def run(recipe: Path, programs: Path, *runs: tuple[dict[str, object], bool], devices: int) -> None:
    on_devices(RUN, recipe, programs, json.dumps(runs), devices=devices)


def assert_close(folder: Path, other: Path) -> None:
    """Steps, tokens and learning rates are equal; losses and gradients within rounding."""
    lines, others = measured(folder), measured(other)
    assert len(lines) == len(others)
    for line, expected in zip(lines, others, strict=True):
        assert {**line, **expected} == {**expected}
        near = {"loss": 1e-5, "grad_norm": 1e-3}
        for name in line:
            assert line[name] == pytest.approx(expected[name], rel=near.get(name, 0), abs=0), name


def test_meshes(tmp_path: Path, program_folder: Path):
    """Four steps in each mesh and on one device; the run of two by four then goes on elsewhere."""
    data = {"path": str(tmp_path / "rows.jsonl"), "format": "text", "max_length": 32}
    recipe = write_recipe(
        tmp_path, data=data | {"packing": True}, batch_size=16, accumulation=2, max_steps=4
    )

    def to(name: str, steps: int, mesh: dict[str, int], resume: bool = False):
        out = {"output_dir": str(tmp_path / name), "max_steps": steps}
        return out | {f"mesh.{axis}": size for axis, size in mesh.items()}, resume

    run(recipe, program_folder, to("one", 6, {"data": 1}), devices=1)
    first = [to(name, 4, mesh) for name, mesh in MESHES.items()]
    run(recipe, program_folder, *first, to("fsdp", 6, MESHES["tensor"], True), devices=8)
    run(recipe, program_folder, to("tensor", 6, {"data": 1}, True), devices=1)
    for name in ("fsdp", "tensor"):
        assert_close(tmp_path / name, tmp_path / "one")
        arrays, position = saved(tmp_path / name)
        expected, there = saved(tmp_path / "one")
        assert position == there
        assert (arrays["step"], arrays["key"]) == (expected["step"], expected["key"])
    (tmp_path / "four").mkdir()
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines(keepends=True)[:4]
    (tmp_path / "four" / "metrics.jsonl").write_text("".join(lines))
    assert_close(tmp_path / "data", tmp_path / "four")
