"""Randomly damaged files: restored arrays are correct, or the step is refused by name."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from run_states import bits, like, meta, state

from jaxllm.checkpoint.orbax import RunCheckpoints

KINDS = ("flip", "flips", "zeros", "truncate", "delete", "swap", "older", "garbage", "empty")


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    with RunCheckpoints(folder) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), meta(step))
    return folder


def damage(folder: Path, kind: str, rng: random.Random) -> str:
    """Spoils one file of step 2 (or swaps two); which one."""
    files = sorted(p for p in (folder / "2").rglob("*") if p.is_file())
    # Half of the time one of those that restoring needs, which are a few among many.
    vital = [p for p in files if p.parent.name in ("record", "arrays") and p.suffix != ".txt"]
    vital += sorted((folder / "2" / "arrays" / "d").iterdir())
    vital += [max(files, key=lambda p: p.stat().st_size)]
    path = rng.choice(vital if rng.random() < 0.5 else files)
    content = bytearray(path.read_bytes())
    index = rng.randrange(len(content) or 1)
    match kind:
        case "flip" | "flips" if content:
            for _ in range(1 if kind == "flip" else 20):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "zeros":
            content[index : index + 512] = bytes(len(content[index : index + 512]))
        case "truncate":
            del content[index:]
        case "garbage":
            content[index : index + 64] = rng.randbytes(len(content[index : index + 64]))
        case "empty":
            content.clear()
        case "swap":
            other = rng.choice(files)
            content, mine = bytearray(other.read_bytes()), content
            other.write_bytes(mine)
        case "older":
            older = sorted(p for p in (folder / "1").rglob("*") if p.is_file())
            content = bytearray(rng.choice(older).read_bytes())
    path.write_bytes(content)
    if kind == "delete":
        path.unlink()
    return f"{kind} {path.relative_to(folder)}"


def outcomes(sound: Path, folder: Path, seeds: range) -> dict[str, int]:
    """Counts: step 2 came back whole; it was refused and step 1 came back."""
    expected = {step: bits(state(step)) for step in (1, 2)}
    counted = {"whole": 0, "refused": 0}
    for seed in seeds:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder)
        what = damage(folder, KINDS[seed % len(KINDS)], random.Random(seed))
        problems: list[str] = []
        with RunCheckpoints(folder, writable=False, on_problem=problems.append) as checkpoints:
            restored = checkpoints.restore(target=like(state(0)))
        assert restored.meta == meta(restored.step), what
        assert bits(restored.arrays) == expected[restored.step], what
        if restored.step == 2:
            assert problems == [], what
            counted["whole"] += 1
        else:
            assert len(problems) == 1, what
            assert f"{folder / '2'}: cannot be restored: " in problems[0], what
            counted["refused"] += 1
    return counted


@pytest.mark.ci
def test_sixty_damaged_files(sound, tmp_path):
    counted = outcomes(sound, tmp_path / "run", range(60))
    assert counted["refused"] > 20
    assert counted["whole"] > 10  # not all files matter


@pytest.mark.slow
def test_five_hundred_damaged_files(sound, tmp_path):
    counted = outcomes(sound, tmp_path / "run", range(1000, 1500))
    assert counted["refused"] > 200


@pytest.mark.ci
def test_digests_find_damage_that_orbax_misses(sound, tmp_path):
    """Without them some of these would pass: they are refused for their digests alone."""
    by_digest = []
    for seed in range(100, 130):
        folder = tmp_path / str(seed)
        shutil.copytree(sound, folder)
        damage(folder, "flip", random.Random(seed))
        problems: list[str] = []
        with RunCheckpoints(folder, writable=False, on_problem=problems.append) as checkpoints:
            checkpoints.restore(target=like(state(0)))
        by_digest += [line for line in problems if "not what was saved; arrays: " in line]
    assert by_digest
