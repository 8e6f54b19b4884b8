"""The steps of a run on disk: which there are, which to keep, and how one goes away."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

from jaxllm.checkpoint.orbax.step_record import RECORD_FILE

LEFTOVER = re.compile(r"\d+\.(orbax-checkpoint-tmp.*|deleting)")


def numbered(folder: Path) -> list[int]:
    """Every folder that has a step's name, in order, be it complete or not."""
    if not folder.is_dir():
        return []
    names = [path.name for path in folder.iterdir() if path.is_dir()]
    return sorted(int(n) for n in names if n.isdecimal() and n.isascii() and n == str(int(n)))


def complete(folder: Path) -> list[int]:
    """The steps that were committed, in order. An empty folder named 9 is none."""
    return [step for step in numbered(folder) if (folder / str(step) / RECORD_FILE).is_file()]


def best(metrics: Mapping[int, float | None], mode: str) -> int | None:
    """The step of the least metric (mode "min") or the largest ("max"); the later of equal ones.

    >>> best({1: 0.5, 2: 0.25, 3: None, 4: 0.25}, "min")
    4
    """
    sign = 1 if mode == "max" else -1
    known = [(sign * metric, step) for step, metric in metrics.items() if metric is not None]
    return max(known)[1] if known else None


def superfluous(steps: Collection[int], *, keep: int, always: Collection[int | None]) -> list[int]:
    """The steps that are neither among the last `keep` nor in `always`."""
    return [step for step in sorted(steps)[:-keep] if step not in always]


def remove(folder: Path, step: int) -> None:
    """Renames first: a step that is half deleted must not look like one that is corrupt."""
    doomed = folder / f"{step}.deleting"
    (folder / str(step)).rename(doomed)
    shutil.rmtree(doomed)


def set_aside(folder: Path, step: int) -> None:
    """Takes its name from a damaged step: ``9`` becomes ``9.damaged``, for the user to look at."""
    path, aside = folder / str(step), folder / f"{step}.damaged"
    if path.exists():
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)


def clean(folder: Path) -> None:
    """Removes what killed saves and deletions left behind. For the one writer only."""
    for path in folder.iterdir():
        if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)


def size(folder: Path) -> int:
    """Bytes of all files below."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
