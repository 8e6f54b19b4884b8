"""Kills a training run at file operations, resumes it, and compares it with an unbroken run.

Run as a script: FOLDER KILLS. Each run is a forked process, which starts JAX anew; so this one must
not use JAX. Orbax writes arrays by native code, which has no operations here: kills fall before and
after them.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from file_faults import KILLED, dying_at
from tiny_runs import measured, recipe, saved

from jaxllm.common.compiling import enable_compile_cache
from jaxllm.training.run.run import train

STEPS = 6


def in_child(act: Callable[[], Any]) -> int:
    """Exit code of a forked process that calls a function."""
    pid = os.fork()
    if pid == 0:
        try:
            act()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run(folder: Path, operation: int) -> int:
    """Trains until it dies at an operation; returns the number of operations if it does not."""
    enable_compile_cache(folder.parent / "programs")
    folder.mkdir(exist_ok=True)
    data = {"path": str(folder / "rows.jsonl"), "format": "text", "max_length": 32, "bucket": None}
    settings = {"checkpoints": {"every": 2, "keep": 2}, "evaluation": {"every": 3}}
    spec = recipe(folder, data=data, eval_data=dict(data), max_steps=STEPS, **settings)
    with dying_at(operation) as count:
        train(spec, resume=True, quiet=True)
    return count[0]


def result(folder: Path) -> Any:
    """Digests of the checkpoints' arrays, the metrics and the names of the files of a run."""
    steps = sorted(p.name for p in (folder / "checkpoints").iterdir() if p.is_dir())
    names = sorted(p.name for p in folder.iterdir())
    return {step: saved(folder, int(step)) for step in steps}, measured(folder), names


def check_resumed(folder: Path, expected: Path) -> None:
    run(folder, 0)
    actual, straight = result(folder / "run"), result(expected / "run")
    for ours, theirs in zip(actual, straight, strict=True):
        assert ours == theirs, (ours, theirs)


def main(folder: Path, kills: int) -> None:
    def straight() -> None:
        (folder / "operations").write_text(json.dumps(run(folder / "straight", 0)))

    assert in_child(straight) == 0
    operations = json.loads((folder / "operations").read_text())
    killed = folder / "killed"
    for kill in range(kills):
        operation = 1 + kill * operations // kills
        shutil.rmtree(killed, ignore_errors=True)
        code = in_child(lambda operation=operation: run(killed, operation))
        # The number of operations varies by a few: the last ones may not come.
        assert code == KILLED or (code == 0 and operation > 0.9 * operations), (operation, code)
        code = in_child(lambda: check_resumed(killed, folder / "straight"))
        assert code == 0, f"operation {operation} of {operations}: {code}"
    print(operations)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
