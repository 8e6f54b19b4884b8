"""Agreement between the processes of a distributed run; no communication if there is only one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")


def in_all_processes(act: Callable[[], T], error: type[Exception]) -> T:
    """Runs `act` in every process, waits for all, and returns this process's result.

    If it fails in one process it raises in all, so that none waits for the others later: the
    original exception where it failed, `error` in the other processes.
    """
    failure, result = None, None
    try:
        result = act()
    except Exception as exception:
        failure = exception
    if jax.process_count() > 1:
        fine = multihost_utils.process_allgather(np.array(failure is None))
        if failure is None and not fine.all():
            failed = np.flatnonzero(~fine)[0]
            raise error(f"it failed in process {failed}")
    if failure is not None:
        raise failure
    return result  # pyright: ignore[reportReturnType]


def gather_rows(act: Callable[[], np.ndarray], error: type[Exception]) -> list[np.ndarray]:
    """Runs `act` in every process and returns the arrays of all, which may differ in length.

    If it fails in one process it raises in all, as `in_all_processes`.
    """
    rows = in_all_processes(act, error)
    if jax.process_count() == 1:
        return [rows]
    counts = multihost_utils.process_allgather(np.int32(len(rows)))
    padded = np.zeros((int(counts.max()), *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    gathered = np.asarray(multihost_utils.process_allgather(padded))
    return [part[:count] for part, count in zip(gathered, counts, strict=True)]
