"""Checkpoints that survive kills, full disks and rotten files: see docs/checkpoints.md."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from jaxllm.checkpoint.orbax import files as orbax_files
from jaxllm.checkpoint.orbax import step_folders as steps_on_disk
from jaxllm.checkpoint.orbax.digest import digests
from jaxllm.checkpoint.orbax.leaves import Leaf, bits_of, check_arrays, flatten
from jaxllm.checkpoint.orbax.restore import OnProblem, Restored, StepReader, sentence
from jaxllm.checkpoint.orbax.step_record import Record, read_record, replace_record, seal
from jaxllm.common.errors import CheckpointError, InputError, JaxLLMError, RunError
from jaxllm.common.run_lock import RunLock
from jaxllm.parallel.processes import together

OnSaved = Callable[[int, float, int], None]


class RunCheckpoints:
    """The checkpoints of one run in a folder: `folder/STEP/` each.

    A step is atomic: it holds the arrays, the meta and a digest of every array, or is not there.
    `restore` compares the digests, so damaged files are refused and never become wrong weights.

        with RunCheckpoints("out/checkpoints", keep=3, on_saved=report) as checkpoints:
            checkpoints.save(step, state, {"data": position})     # returns soon
            state, meta, step = checkpoints.restore(target=state)

    In a run of several processes all of them make the same calls, on a folder they share.

    Args:
        folder: made if it is not there (by a writer).
        keep: how many of the last steps stay; the best one stays besides.
        mode: whether a small ("min") or a large ("max") metric is good.
        writable: False: for reading beside a run that goes on. Takes no lock.
        on_saved: called as ``on_saved(step, seconds, bytes)`` once a step is on disk under its
            name, and never otherwise; from a background thread.
        on_problem: called with a sentence that names a step and why it is passed over, or could
            not be deleted (from a background thread). None: a warning of the logger "jaxllm".

    Raises:
        RunError: Another process writes to the folder.
        UnsupportedError: orbax-checkpoint is not installed.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        keep: int = 3,
        mode: Literal["min", "max"] = "min",
        writable: bool = True,
        on_saved: OnSaved | None = None,
        on_problem: OnProblem | None = None,
    ) -> None:
        if keep < 1:
            raise InputError(f"keep: expected at least 1, found {keep}")
        if mode not in ("min", "max"):
            raise InputError(f"mode: expected 'min' or 'max', found {mode!r}")
        self.folder = Path(folder).expanduser().absolute()
        self.keep, self.mode, self.writable = keep, mode, writable
        self._on_saved = on_saved
        self._on_problem = on_problem or logging.getLogger("jaxllm").warning
        self._reader = StepReader(self.folder, self._on_problem)
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self._lock: RunLock | None = None
        if writable:
            together(self._take, RunError)
            self._orbax = orbax_files.async_checkpointer()
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")

    def _take(self) -> None:
        if jax.process_index() == 0:
            self._lock = RunLock(self.folder)
            steps_on_disk.clean(self.folder)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the save under way, and lets go of the folder. A second call does nothing.

        Raises:
            CheckpointError: The save under way failed.
        """
        if not self.writable:
            return
        try:
            self.wait()
        finally:
            self.writable = False
            self._worker.shutdown()
            self._orbax.close()
            if self._lock is not None:
                self._lock.release()

    # Which steps there are.

    def steps(self) -> list[int]:
        """The committed steps, in order."""
        return steps_on_disk.complete(self.folder)

    def latest(self) -> int | None:
        """The last committed step. Whether its files are sound, only `restore` finds out."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The step with the best metric, but for those that were found damaged; None if no step
        has one."""
        found = self._metrics()
        sound = {step: metric for step, metric in found.items() if step not in self._reader.refused}
        return steps_on_disk.best(sound, self.mode)

    def _metrics(self) -> dict[int, float | None]:
        metrics = {}
        for step in self.steps():
            try:
                metrics[step] = read_record(self.folder / str(step)).metric
            except JaxLLMError:  # `restore` names what is wrong with it
                metrics[step] = None
        return metrics

    # Saving.

    def save(self, step: int, arrays: Any, meta: Any, *, metric: float | None = None) -> None:
        """Starts to save a step, after the one before is through. Returns once all is copied.

        Args:
            step: its number, which names its folder.
            arrays: a pytree of jax.Arrays (numbers, booleans, typed PRNG keys), sharded or not.
                They may be donated afterwards.
            meta: whatever JSON holds: data position, config, versions.
            metric: what the best step is chosen by; one that is not finite is never the best.

        Raises:
            CheckpointError: The save *before* failed in the background; this one cannot begin; or
                there is a sound step of this number. Earlier steps are intact in every case.
        """
        if not self.writable:
            raise RunError(f"{self.folder}: opened for reading, or closed")
        if step < 0:
            raise InputError(f"step: expected 0 or more, found {step}")
        self.wait()
        started = time.perf_counter()
        path = self.folder / str(step)
        damaged = path.exists() and step not in self.steps()
        if path.exists() and not damaged and step not in self._reader.refused:
            raise CheckpointError(f"{path}: there is a checkpoint of this step already")
        leaves = flatten(arrays)
        check_arrays(leaves)
        bits = {name: bits_of(leaf) for name, leaf in leaves.items()}
        found = digests(bits)
        described = {
            name: Leaf(str(leaf.dtype), tuple(leaf.shape), found[name])
            for name, leaf in leaves.items()
        }
        record = seal(Record(step, meta, finite(metric), described))
        stored = {name: leaf for name, leaf in bits.items() if leaf.size}
        try:
            together(lambda: self._set_aside([step] if damaged else []), CheckpointError)
            orbax_files.start_saving(self._orbax, path, stored, record)
        except Exception as failure:
            raise self._not_saved(step, failure) from failure
        self._pending = step, self._worker.submit(self._finish, step, started)

    def _set_aside(self, damaged: list[int]) -> None:
        """Damaged steps lose their names, which later ones may need, but not their files."""
        if jax.process_index() == 0:
            for step in {*damaged, *self._reader.refused}:
                steps_on_disk.set_aside(self.folder, step)
        self._reader.refused.clear()

    def wait(self) -> None:
        """Waits until the save under way is on disk.

        Raises:
            CheckpointError: It failed; it was not reported as saved, and earlier steps are intact.
        """
        if self._pending is None:
            return
        step, future = self._pending
        concurrent.futures.wait([future])  # an interrupt leaves it pending
        self._pending = None
        failure = future.exception()
        if failure is not None and step in self.steps():  # what follows the commit: the callback
            raise failure
        if failure is not None:
            raise self._not_saved(step, failure) from failure

    def _not_saved(self, step: int, failure: BaseException) -> CheckpointError:
        # The old one goes on to raise what is left of this failure, after sound saves too.
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._orbax = orbax_files.async_checkpointer()
        if jax.process_index() == 0:
            steps_on_disk.clean(self.folder)
        return CheckpointError(
            f"{self.folder}: step {step} was not saved ({sentence(failure)}); the steps before it "
            "are intact"
        )

    def _finish(self, step: int, started: float) -> None:
        """In the background: waits for the commit, reports it, then deletes what is superseded."""
        self._orbax.wait_until_finished()
        path = self.folder / str(step)
        read_record(path)
        if self._on_saved is not None:
            self._on_saved(step, time.perf_counter() - started, steps_on_disk.size(path))
        if jax.process_index() == 0:
            self._retire(step)

    def _retire(self, newest: int) -> None:
        metrics = self._metrics()
        best = steps_on_disk.best(metrics, self.mode)
        doomed = steps_on_disk.superfluous(metrics, keep=self.keep, always=(newest, best))
        for step in doomed:
            try:
                steps_on_disk.remove(self.folder, step)
            except OSError as failure:
                self._on_problem(f"{self.folder / str(step)}: not deleted ({sentence(failure)})")

    # Restoring.

    def restore(
        self, step: int | None = None, target: Any = None, *, subset: bool = False
    ) -> Restored:
        """Reads a step onto the shardings of `target`, and checks every array's digest.

        Args:
            step: None: the last one that is sound; those passed over are named to `on_problem`.
            target: a pytree of arrays or jax.ShapeDtypeStruct, with the shardings to restore onto
                (any mesh and number of processes); without a sharding: the first device.
            subset: the step may hold arrays that the target does not, which are not read.

        Raises:
            MissingFileError: There is no such step, or none at all.
            CheckpointError: The arrays of the step are not those of the target; or no step is
                sound, with the reason for each.
        """
        self.wait()
        return self._reader.restore(step, target, subset=subset)

    def read(self, step: int | None = None) -> Record:
        """What a step says of itself, without its arrays: `meta`, `metric`, `leaves`.

        For whoever has to know the config before there can be a target. Arguments and errors are
        those of `restore`.
        """
        self.wait()
        return self._reader.read(step)

    def amend(self, step: int, meta: Mapping[str, Any], *, metric: float | None) -> None:
        """Adds fields to the meta of a committed step, and sets its metric: of what is found late.

        The record is replaced at once or not at all; the arrays are not touched.

        Raises:
            CheckpointError: There is no sound record, or it cannot be written.
        """
        if not self.writable:
            raise RunError(f"{self.folder}: opened for reading, or closed")
        self.wait()

        def write() -> None:
            if jax.process_index() == 0:
                path = self.folder / str(step)
                record = read_record(path)
                changed = dataclasses.replace(
                    record, meta={**record.meta, **meta}, metric=finite(metric)
                )
                replace_record(path, changed)

        together(write, CheckpointError)


def finite(metric: float | None) -> float | None:
    """A metric that steps can be compared by."""
    return float(metric) if metric is not None and math.isfinite(metric) else None
