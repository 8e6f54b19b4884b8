"""Errors that count as damage when restoring; amended records."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest
from run_states import bits, like, meta, state

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.orbax.run_checkpoints import attempt
from jaxllm.common.errors import CheckpointError, MissingFileError, RunError

STEP = Path("run/7")


def raising(failure: BaseException, cause: BaseException | None = None):
    def act():
        raise failure from cause

    return act


@pytest.mark.parametrize(
    "failure",
    [
        MissingFileError("no such file"),
        CheckpointError("not what was saved"),
        ValueError("DATA_LOSS: Error opening"),
        ValueError('NOT_FOUND: Error opening "zarr" driver'),
    ],
)
def test_damage_errors(failure):
    assert attempt(raising(failure), STEP) == (None, failure)


def test_io_error_counts_as_damage():
    failure = CheckpointError("cannot be read")
    assert attempt(raising(failure, OSError(errno.EIO, "")), STEP) == (None, failure)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ENOMEM])
def test_transient_os_errors_are_not_damage(number):
    with pytest.raises(CheckpointError, match="cannot be read"):
        attempt(raising(CheckpointError("cannot be read"), OSError(number, "")), STEP)


@pytest.mark.parametrize("code", ["PERMISSION_DENIED", "RESOURCE_EXHAUSTED"])
def test_transient_tensorstore_errors_are_not_damage(code):
    with pytest.raises(CheckpointError, match=rf"run/7: cannot be read \({code}: Error"):
        attempt(raising(ValueError(f"{code}: Error [tensorstore_spec='...']")), STEP)


@pytest.mark.parametrize("failure", [MemoryError(), RuntimeError("a device"), KeyError("a bug")])
def test_other_errors_are_raised(failure):
    with pytest.raises(type(failure)):
        attempt(raising(failure), STEP)


@pytest.mark.ci
def test_best_step_is_not_a_damaged_one(tmp_path):
    problems: list[str] = []
    with RunCheckpoints(tmp_path, on_problem=problems.append) as checkpoints:
        for step, metric in ((1, 0.5), (2, 0.25)):
            checkpoints.save(step, state(step), meta(step), metric=metric)
        checkpoints.wait()
        assert checkpoints.best() == 2
        for path in (tmp_path / "2" / "arrays" / "d").iterdir():
            path.write_bytes(b"")
        assert checkpoints.restore(target=like(state(0))).step == 1
        assert checkpoints.best() == 1
    assert len(problems) == 1


def test_amend_record(tmp_path):
    with RunCheckpoints(tmp_path) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state(step), meta(step), metric=2.0 if step == 1 else None)
        checkpoints.amend(2, {"evaluated": True}, metric=1.0)
        assert checkpoints.best() == 2
        restored = checkpoints.restore(2, like(state(0)))
        assert restored.meta == meta(2) | {"evaluated": True}
        assert bits(restored.arrays) == bits(state(2))
        checkpoints.amend(2, {}, metric=math.nan)
        assert checkpoints.best() == 1
        with pytest.raises(MissingFileError):
            checkpoints.amend(3, {}, metric=1.0)
    with (
        RunCheckpoints(tmp_path, writable=False) as reading,
        pytest.raises(RunError, match="opened for reading"),
    ):
        reading.amend(2, {}, metric=1.0)
