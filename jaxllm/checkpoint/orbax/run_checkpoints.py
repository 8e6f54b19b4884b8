"""Checkpoints of a run, safe against kills, full disks and damaged files.

See docs/checkpoints.md.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import jax

from jaxllm.checkpoint.orbax import steps as steps_on_disk
from jaxllm.checkpoint.orbax.leaves import (
    Leaf,
    bits_like,
    bits_of,
    check_arrays,
    check_target,
    digests,
    flatten,
    from_bits,
)
from jaxllm.checkpoint.orbax.steps import Record, read_record, replace_record, seal
from jaxllm.common.errors import (
    CheckpointError,
    InputError,
    JaxLLMError,
    MissingFileError,
    RunError,
    listed,
)
from jaxllm.common.files import RunLock, expanded
from jaxllm.parallel.processes import in_all_processes

T = TypeVar("T")
OnSaved = Callable[[int, float, int], None]
OnProblem = Callable[[str], None]

# Errors that do not mean damaged files: permissions, open files, memory.
TRANSIENT = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
TRANSIENT_CODES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")  # TensorStore's names


class Restored(NamedTuple):
    """A restored step; `arrays` has the structure, dtypes and shardings of the target."""

    arrays: Any
    meta: Any
    step: int


class RunCheckpoints:
    """The checkpoints of one run in a folder: `folder/STEP/` each.

    A step is written atomically: arrays, meta and a digest of every array. `restore` compares the
    digests, so that damaged files are refused instead of giving wrong weights.

        with RunCheckpoints("out/checkpoints", keep=3, on_saved=report) as checkpoints:
            checkpoints.save(step, state, {"data": position})     # returns soon
            state, meta, step = checkpoints.restore(target=state)

    With several processes, all make the same calls, on a shared folder.

    Args:
        folder: a writer creates it if it does not exist.
        keep: how many of the last steps to keep, besides the best one.
        mode: whether the best metric is the smallest ("min") or the largest ("max").
        writable: False: only reads, without a lock, also while a run writes.
        on_saved: called as ``on_saved(step, seconds, bytes)`` from a background thread, once a
            step is on disk under its final name.
        on_problem: called with a sentence about a step that was skipped, or could not be deleted
            (from a background thread). None: a warning of the logger "jaxllm".

    Raises:
        RunError: another process writes to the folder; or its name is not in UTF-8.
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
        self.folder = expanded(folder).absolute()
        try:
            str(self.folder).encode()
        except UnicodeEncodeError:
            raise RunError(
                f"{self.folder}: Orbax takes names in UTF-8 alone; use another folder"
            ) from None
        self.keep, self.mode, self.writable = keep, mode, writable
        self._on_saved = on_saved
        self._on_problem = on_problem or logging.getLogger("jaxllm").warning
        self._refused: dict[int, str] = {}  # damaged steps, with the reasons
        self._pending: tuple[int, concurrent.futures.Future[None]] | None = None
        self._lock: RunLock | None = None
        if writable:
            in_all_processes(self._lock_folder, RunError)
            self._orbax = steps_on_disk.async_checkpointer()
            self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoints")

    def _lock_folder(self) -> None:
        if jax.process_index() == 0:
            self._lock = RunLock(self.folder)
            steps_on_disk.clean(self.folder)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Waits for the pending save and unlocks the folder. A second call does nothing.

        Raises:
            CheckpointError: the pending save failed.
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

    def steps(self) -> list[int]:
        """The committed steps, in order.

        The first process deletes expired ones, which the others may still see for a moment.
        """
        return steps_on_disk.complete(self.folder)

    def latest(self) -> int | None:
        """The last committed step. Only `restore` checks whether it is damaged."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The undamaged step with the best metric; None if no step has a metric.

        Steps whose metric was measured on something else than the newest one's are left out.
        """
        metrics = self._metrics()
        return steps_on_disk.best(
            {step: x for step, x in metrics.items() if step not in self._refused}, self.mode
        )

    def _metrics(self) -> dict[int, float | None]:
        records, steps = {}, self.steps()
        for step in steps:
            with contextlib.suppress(JaxLLMError):  # `restore` reports the reason
                records[step] = read_record(self.folder / str(step))
        return dict.fromkeys(steps) | steps_on_disk.comparable(records)

    def save(
        self,
        step: int,
        arrays: object,
        meta: object,
        *,
        metric: float | None = None,
        measured_on: str | None = None,
    ) -> None:
        """Starts a save, after the previous one is done. Returns once the arrays are copied.

        Args:
            step: number of the step, and name of its folder.
            arrays: a pytree of jax.Arrays (numbers, booleans, typed PRNG keys), sharded or not.
                They may be donated afterwards.
            meta: any JSON value: data position, config, versions.
            metric: decides which step is the best; one that is not finite is never the best.
            measured_on: what the metric was measured on, such as a digest of the data.

        Raises:
            CheckpointError: the *previous* save failed in the background; this one cannot start; or
                there is an undamaged step of this number. Earlier steps are intact in every case.
        """
        if not self.writable:
            raise RunError(f"{self.folder}: opened for reading, or closed")
        if step < 0:
            raise InputError(f"step: expected 0 or more, found {step}")
        self.wait()
        started = time.perf_counter()
        path = self.folder / str(step)
        damaged = path.exists() and step not in self.steps()
        if path.exists() and not damaged and step not in self._refused:
            raise CheckpointError(f"{path}: there is a checkpoint of this step already")
        leaves = flatten(arrays)
        check_arrays(leaves)
        bits = {name: bits_of(leaf) for name, leaf in leaves.items()}
        digest_of = digests(bits)
        described = {
            name: Leaf(str(leaf.dtype), tuple(leaf.shape), digest_of[name])
            for name, leaf in leaves.items()
        }
        record = seal(Record(step, meta, finite_or_none(metric), described, measured_on))
        try:
            in_all_processes(lambda: self._make_room(step, damaged), CheckpointError)
            steps_on_disk.start_saving(self._orbax, path, bits, record)
        except Exception as failure:
            raise self._not_saved(step, failure) from failure
        self._pending = step, self._worker.submit(self._finish, step, started)

    def _make_room(self, step: int, is_damaged: bool) -> None:
        """Renames damaged steps, so that later ones can have their names; their files stay."""
        if jax.process_index() == 0:
            for damaged in {*([step] if is_damaged else []), *self._refused}:
                steps_on_disk.set_aside(self.folder, damaged)
            steps_on_disk.check_creatable(self.folder, step)
        self._refused.clear()

    def wait(self) -> None:
        """Waits until the pending save is on disk.

        Raises:
            CheckpointError: it failed; `on_saved` was not called, and earlier steps are intact.
        """
        if self._pending is None:
            return
        step, future = self._pending
        concurrent.futures.wait([future])  # after an interrupt it is still pending
        self._pending = None
        failure = future.exception()
        if failure is not None and step in self.steps():  # raised by `on_saved`, after the commit
            raise failure
        if failure is not None:
            raise self._not_saved(step, failure) from failure

    def _not_saved(self, step: int, failure: BaseException) -> CheckpointError:
        # The old checkpointer would raise this failure again after later saves.
        with contextlib.suppress(Exception):
            self._orbax.close()
        self._orbax = steps_on_disk.async_checkpointer()
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the folder itself may be what failed
                steps_on_disk.clean(self.folder)
        rest = "the steps before it are intact" if self.steps() else "there is no other step"
        return CheckpointError(
            f"{self.folder}: step {step} was not saved ({sentence(failure)}); {rest}"
        )

    def _finish(self, step: int, started: float) -> None:
        """Runs in the background: waits for the commit, calls `on_saved`, deletes expired steps."""
        self._orbax.wait_until_finished()
        path = self.folder / str(step)
        read_record(path)
        if self._on_saved is not None:
            self._on_saved(step, time.perf_counter() - started, steps_on_disk.size(path))
        self.delete_expired(step)

    def delete_expired(self, newest: int | None = None) -> None:
        """Deletes the steps that are not to be kept, as after each save.

        Keeps `newest`, by default the last step.
        A run that is killed between a save and this leaves one too many.
        """
        if jax.process_index() != 0:
            return
        metrics = self._metrics()
        newest = max(metrics, default=None) if newest is None else newest
        kept = {newest, steps_on_disk.best(metrics, self.mode), *sorted(metrics)[-self.keep :]}
        for step in sorted(metrics.keys() - kept):
            try:
                steps_on_disk.remove(self.folder, step)
            except OSError as failure:
                self._on_problem(f"{self.folder / str(step)}: not deleted ({sentence(failure)})")

    def restore(
        self, step: int | None = None, target: object = None, *, subset: bool = False
    ) -> Restored:
        """Reads a step onto the shardings of `target`, and checks every array's digest.

        Args:
            step: None: the last undamaged one; skipped steps are reported to `on_problem`.
            target: a pytree of arrays or jax.ShapeDtypeStruct, with the shardings to restore onto
                (any mesh and number of processes); without a sharding: the first device.
            subset: allow the step to have arrays that the target lacks; they are not read.

        Raises:
            MissingFileError: there is no such step, or none at all.
            CheckpointError: the arrays of the step are not those of the target; or all steps are
                damaged, with the reason for each.
        """
        self.wait()
        targets = flatten(target)
        like = {name: bits_like(leaf) for name, leaf in targets.items()}
        records = self._sound_records(step)
        while True:
            record = next(records)
            path = self.folder / str(record.step)
            leaves = {n: x for n, x in record.leaves.items() if n in targets or not subset}
            check_target(str(path), leaves, targets)
            bits = self._attempt(record.step, lambda p=path: steps_on_disk.read_arrays(p, like))
            if bits is None:
                continue
            if self._attempt(record.step, lambda b=bits, x=leaves: verify(b, x)) is None:
                continue
            arrays = [from_bits(bits[name], leaf) for name, leaf in targets.items()]
            structure = jax.tree_util.tree_structure(target)
            return Restored(structure.unflatten(arrays), record.meta, record.step)

    def read(self, step: int | None = None) -> Record:
        """Reads a step without its arrays: `meta`, `metric`, `leaves`.

        For example for the config, from which a target is built. Arguments and errors are those of
        `restore`.
        """
        self.wait()
        return next(self._sound_records(step))

    def _sound_records(self, step: int | None) -> Iterator[Record]:
        """The undamaged record of a step, or of all steps from the last one on; then raises."""
        steps = in_all_processes(lambda: steps_on_disk.numbered(self.folder), CheckpointError)
        if not steps or step not in (None, *steps):
            existing = f"; there are {', '.join(map(str, steps))}" if steps else ""
            missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise MissingFileError(f"{self.folder}: {missing}{existing}")
        candidates = steps[::-1] if step is None else [step]
        for number in candidates:
            path = self.folder / str(number)
            record = self._attempt(number, lambda p=path: read_record(p))
            if record is not None:
                yield record
        reasons = "; ".join(f"step {number}: {self._refused[number]}" for number in candidates)
        raise CheckpointError(f"{self.folder}: no checkpoint can be restored: {reasons}")

    def _attempt(self, step: int, act: Callable[[], T]) -> T | None:
        """The result of `act`; None if the step is damaged, which is reported.

        Other errors are raised, in every process: skipping an undamaged step, or giving its name
        to another, would lose it.
        """
        path = self.folder / str(step)
        result, damage = in_all_processes(lambda: attempt(act, path), RunError)

        def checked() -> T | None:
            if damage is not None:
                raise damage
            return result

        try:
            return in_all_processes(checked, CheckpointError)
        except (CheckpointError, MissingFileError, ValueError) as failure:
            self._refused[step] = reason = sentence(failure)
            self._on_problem(f"{path}: cannot be restored: {reason}")
            return None

    def amend(
        self,
        step: int,
        meta: Mapping[str, Any],
        *,
        metric: float | None,
        measured_on: str | None = None,
    ) -> None:
        """Adds fields to the meta of a committed step and sets its metric, for late evaluations.

        The record is replaced atomically; the arrays are not touched.
        """
        if not self.writable:
            raise RunError(f"{self.folder}: opened for reading, or closed")
        self.wait()

        def write() -> None:
            if jax.process_index() == 0:
                path = self.folder / str(step)
                record = read_record(path)
                changed = dataclasses.replace(
                    record,
                    meta={**record.meta, **meta},
                    metric=finite_or_none(metric),
                    measured_on=measured_on,
                )
                replace_record(path, changed)

        in_all_processes(write, CheckpointError)


def finite_or_none(metric: float | None) -> float | None:
    """The metric as a float, or None if it is not finite."""
    return float(metric) if metric is not None and math.isfinite(metric) else None


def attempt(act: Callable[[], T], path: Path) -> tuple[T | None, Exception | None]:
    """The result of `act`, or the error that shows that files are damaged or missing.

    Raises:
        CheckpointError: the files cannot be read now, but may be undamaged.
    """
    try:
        return act(), None
    except (CheckpointError, MissingFileError) as failure:  # from the record and the digests
        cause = failure.__cause__
        if isinstance(cause, OSError) and cause.errno in TRANSIENT:
            raise
        return None, failure
    except ValueError as failure:  # TensorStore's
        if str(failure).startswith(TRANSIENT_CODES):
            raise CheckpointError(f"{path}: cannot be read ({sentence(failure)})") from failure
        return None, failure


def verify(bits: Mapping[str, jax.Array], leaves: Mapping[str, Leaf]) -> bool:
    """True, or raises CheckpointError with the names of arrays whose digests differ."""
    damaged = [name for name, found in digests(dict(bits)).items() if found != leaves[name].digest]
    if damaged:
        raise CheckpointError(f"not what was saved; arrays: {listed(damaged)}")
    return True


def sentence(failure: BaseException) -> str:
    """The first line of an error, shortened; its class name if it has no message."""
    lines = str(failure).strip().splitlines() or [type(failure).__name__]
    line = re.sub(r" \[(tensorstore_spec|source locations)=.*", "", lines[0])
    # TensorStore's messages end with the most specific cause.
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-250:]}"
