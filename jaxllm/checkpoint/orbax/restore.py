"""Finds and reads the last undamaged step of a run."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.orbax import steps as steps_on_disk
from jaxllm.checkpoint.orbax.digest import digests
from jaxllm.checkpoint.orbax.leaves import Leaf, bits_like, check_target, flatten, from_bits
from jaxllm.checkpoint.orbax.steps import Record, read_record
from jaxllm.common.errors import CheckpointError, MissingFileError, RunError, listed
from jaxllm.parallel.processes import in_all_processes

T = TypeVar("T")
OnProblem = Callable[[str], None]

# Errors that do not mean damaged files: permissions, open files, memory.
TRANSIENT = (errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
TRANSIENT_CODES = ("PERMISSION_DENIED", "RESOURCE_EXHAUSTED")  # TensorStore's names


class Restored(NamedTuple):
    """A restored step; `arrays` has the structure, dtypes and shardings of the target."""

    arrays: Any
    meta: Any
    step: int


class StepReader:
    """Reads the steps of a folder, the last one first, skipping damaged ones.

    Args:
        on_problem: called with a sentence that names a skipped step and the reason.

    Attributes:
        refused: steps that are damaged, with the reasons.
    """

    def __init__(self, folder: Path, on_problem: OnProblem) -> None:
        self.folder = folder
        self.refused: dict[int, str] = {}
        self._on_problem = on_problem

    def restore(self, step: int | None, target: object, *, subset: bool) -> Restored:
        """See `RunCheckpoints.restore`."""
        targets = flatten(target)
        problems: dict[int, str] = {}
        for number in self._candidates(step):
            path = self.folder / str(number)
            record = self._attempt(number, problems, lambda p=path: read_record(p))
            if record is None:
                continue
            leaves = {n: x for n, x in record.leaves.items() if n in targets or not subset}
            check_target(str(path), leaves, targets)
            bits = self._attempt(number, problems, lambda p=path: read_bits(p, targets))
            if bits is None:
                continue
            if self._attempt(number, problems, lambda b=bits, x=leaves: verify(b, x)) is None:
                continue
            arrays = [from_bits(bits[name], leaf) for name, leaf in targets.items()]
            structure = jax.tree_util.tree_structure(target)
            return Restored(structure.unflatten(arrays), record.meta, number)
        raise self._none_sound(problems)

    def read(self, step: int | None) -> Record:
        """See `RunCheckpoints.read`."""
        problems: dict[int, str] = {}
        for number in self._candidates(step):
            path = self.folder / str(number)
            record = self._attempt(number, problems, lambda p=path: read_record(p))
            if record is not None:
                return record
        raise self._none_sound(problems)

    def _candidates(self, step: int | None) -> list[int]:
        steps = in_all_processes(lambda: steps_on_disk.numbered(self.folder), CheckpointError)
        if step is None and steps:
            return steps[::-1]
        if step is None or step not in steps:
            existing = f"; there are {', '.join(map(str, steps))}" if steps else ""
            missing = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise MissingFileError(f"{self.folder}: {missing}{existing}")
        return [step]

    def _attempt(self, step: int, problems: dict[int, str], act: Callable[[], T]) -> T | None:
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
            problems[step] = self.refused[step] = reason = sentence(failure)
            self._on_problem(f"{path}: cannot be restored: {reason}")
            return None

    def _none_sound(self, problems: Mapping[int, str]) -> CheckpointError:
        reasons = "; ".join(f"step {step}: {reason}" for step, reason in problems.items())
        return CheckpointError(f"{self.folder}: no checkpoint can be restored: {reasons}")


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


def read_bits(path: Path, targets: Mapping[str, Any]) -> dict[str, jax.Array]:
    """The arrays from disk; arrays without elements, which Orbax does not store, are created."""
    like = {name: bits_like(leaf) for name, leaf in targets.items()}
    stored = {name: x for name, x in like.items() if x.size}
    bits = steps_on_disk.read_arrays(path, stored)
    empty = {
        n: jnp.zeros(x.shape, x.dtype, device=x.sharding) for n, x in like.items() if not x.size
    }
    return bits | empty


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
