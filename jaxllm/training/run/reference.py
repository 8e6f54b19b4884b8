"""Reference log-probabilities of a DPO run: computed at its start, read again when it resumes."""

from __future__ import annotations

import dataclasses
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float32

from jaxllm.common.errors import RunError
from jaxllm.parallel.processes import in_all_processes
from jaxllm.training.data import EvalBatches, Source
from jaxllm.training.data.reference import reference_logps
from jaxllm.training.output_files import replacing_file
from jaxllm.training.run.evaluations import eval_batch_size
from jaxllm.training.run.setup import Setup, rows_progress

FILE = "reference_logps.npz"


def with_reference(
    setup: Setup, folder: Path, *, stored: bool, say: Callable[[str], None]
) -> Setup:
    """The setup of a DPO run with reference log-probabilities in its data; others are unchanged.

    The reference is the model of the setup, before its state is restored: with LoRA the base model,
    since new adapters change nothing. The first process writes the numbers to `FILE`.

    Args:
        stored: read what an earlier start of the run stored; data that are new since then are
            computed. A missing file is computed again: `Batches.restore` compares digests.

    Raises:
        RunError: the file cannot be read or written.
    """
    if setup.recipe.dpo is None:
        return setup
    path = folder / FILE
    earlier = read_logps(path) if stored else {}
    train = setup.batches.in_order(eval_batch_size(setup.recipe))
    results: dict[str, Float32[np.ndarray, "N 2"]] = {}

    def with_logps(name: str, source: Source, epoch: EvalBatches) -> Source:
        digest = epoch.examples.digest
        if digest not in earlier:
            earlier[digest] = computed(setup, epoch, f"reference of the {name} data", say)
        results[digest] = earlier[digest]
        return source.with_reference(earlier[digest])

    examples = with_logps("training", setup.batches.examples, train)
    batches = setup.batches.with_examples(examples)
    eval_batches = setup.eval_batches
    if eval_batches is not None:
        examples = with_logps("evaluation", eval_batches.examples, eval_batches)
        eval_batches = dataclasses.replace(eval_batches, examples=examples)
    in_all_processes(
        lambda: write_logps(path, results) if jax.process_index() == 0 else None, RunError
    )
    return dataclasses.replace(setup, batches=batches, eval_batches=eval_batches)


def computed(
    setup: Setup, epoch: EvalBatches, what: str, say: Callable[[str], None]
) -> Float32[np.ndarray, "N 2"]:
    """Computes the log-probabilities of an epoch, and reports how long it took."""
    start = time.perf_counter()
    progress = rows_progress(say, what, done_as="pairs are computed")
    logps = reference_logps(setup.state.model, epoch, setup.mesh, progress)
    say(f"{what}: {len(logps):,} pairs in {time.perf_counter() - start:.1f} s")
    return logps


def read_logps(path: Path) -> dict[str, Any]:
    """Log-probabilities by the digest of their examples; empty if there is no file.

    Raises:
        RunError: the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RunError(
            f"{path}: cannot be read ({error}); move it away, and the run computes it again"
        ) from None


def write_logps(path: Path, logps: dict[str, Float32[np.ndarray, "N 2"]]) -> None:
    """Writes the file of `read_logps` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as half, half.open("wb") as file:
        np.savez(file, **logps)  # pyright: ignore[reportArgumentType]
