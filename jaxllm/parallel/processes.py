"""Several processes: agreement between the processes of a run, and connection to a Ray cluster."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.common.errors import InputError
from jaxllm.common.optional_packages import require

T = TypeVar("T")
LOCAL = "local"
"""Address of a cluster that this process starts on its own machine, and that ends with it."""
PASSED_ON = ("JAX_", "JAXLLM_", "XLA_")
"""Prefixes of the environment variables that actors get from the command, on all nodes."""


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


def connect(
    address: str | None,
    resources: Mapping[str, float],
    count: int,
    *,
    show_output: bool = False,
) -> Any:
    """Connects this process with a Ray cluster (the extra `ray`), unless it is; returns `ray`.

    Args:
        address: ``HOST:PORT`` of the cluster, ``auto`` for the one that this machine is a node of,
            or None: `RAY_ADDRESS` of the environment, or else a new cluster on this machine.
        resources: what each actor takes, such as ``{"GPU": 1}``.
        count: number of actors.
        show_output: show the output of actors on stderr.

    Raises:
        InputError: there is no such cluster, or a new one lacks the resources.
        MissingExtraError: Ray is not installed.
    """
    address = address or os.environ.get("RAY_ADDRESS") or LOCAL
    if address.startswith("ray://"):
        raise InputError(
            f"--address: {address} is an address for Ray clients; run the command on a node of the "
            "cluster (ray job submit), with --address auto"
        )
    # A cluster that is started here would otherwise report its use to Ray's makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = require("ray", extra="ray", purpose="clusters")
    if ray.is_initialized():
        return ray
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(
            address=address,
            include_dashboard=False,
            log_to_driver=show_output,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment()},
        )
    except (ConnectionError, RuntimeError, ValueError) as failure:
        reason = str(failure).split("\n")[0]
        raise InputError(f"--address: {address}: no Ray cluster answers ({reason})") from failure
    finally:
        # Ray's own handler of SIGTERM exits with 15; the command's gives 143.
        signal.signal(signal.SIGTERM, handler)
    if address == LOCAL:  # elsewhere nodes may still join
        check_resources(ray.cluster_resources(), resources, count)
    return ray


def environment() -> dict[str, str]:
    """The environment variables of the command that actors get too."""
    return {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}


def check_resources(
    available: Mapping[str, float], resources: Mapping[str, float], count: int
) -> None:
    """Checks that a cluster can hold all actors, for which it would wait without end.

    >>> check_resources({"CPU": 2.0}, {"CPU": 1, "GPU": 1}, 2)
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: GPU: 2 actors of 1 each are more than the 0 of this machine
    """
    for name, amount in resources.items():
        if count * amount > available.get(name, 0):
            raise InputError(
                f"{name}: {count} actors of {amount:g} each are more than the "
                f"{available.get(name, 0):g} of this machine"
            )
