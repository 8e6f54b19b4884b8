"""Options for several devices, several processes, and a Ray cluster."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Generator, Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.cli.process import USAGE_ERROR, add_flags, reject, signals
from jaxllm.common.errors import InputError
from jaxllm.parallel.sharding import AXES, make_mesh

CONNECT_SECONDS = 300
"""Limit of the time in which all processes must connect."""
LEAVE_SECONDS = 5
"""Limit of the time in which a process waits for the others to disconnect, too."""
NOTICE_SECONDS = 10
"""Time after which a process says that it waits for others."""

PROCESS_OPTIONS = ("coordinator", "num_processes", "process_id", "distributed")
"""Options of `add_process_flags`."""
RAY = "ray"
DEFAULT_RESOURCES: Mapping[str, float] = {"CPU": 1}
"""What a worker or actor takes of a cluster by default."""


def add_mesh_flag(parser: argparse.ArgumentParser) -> None:
    """Adds ``--mesh``."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="SIZES",
        help="shard the model over the devices, such as data=2,tensor=4; -1 takes all that remain",
    )


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--coordinator``, ``--num-processes``, ``--process-id`` and ``--distributed``."""
    group = parser.add_argument_group("several processes")
    flags = {
        "--coordinator HOST:PORT": "the address of process 0, the same in all processes",
        "--num-processes N": "the number of processes, with --coordinator",
        "--process-id I": {"type": int, "help": "the index of this process, from 0 to N - 1"},
        "--distributed": "take address and index from the cluster: SLURM, MPI, a TPU pod or "
        "Kubernetes",
    }
    add_flags(group, flags)


def mesh_sizes(text: str) -> dict[str, int]:
    """Parses mesh sizes.

    >>> mesh_sizes("data=2,tensor=4")
    {'data': 2, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if name not in AXES or not equals or name in sizes:
            raise argparse.ArgumentTypeError(
                f"expected sizes such as data=2,tensor=4 of {', '.join(AXES)}, found {text!r}"
            )
        try:
            sizes[name] = int(size)
        except ValueError:
            message = f"{name}: expected a number, found {size!r}"
            raise argparse.ArgumentTypeError(message) from None
    return sizes


def join_processes(arguments: argparse.Namespace) -> None:
    """Initialises `jax.distributed` if the command line asks for several processes.

    Must run before JAX's devices are used.

    Raises:
        InputError: the options contradict each other, or there is no cluster.
    """
    options = {
        "--coordinator": arguments.coordinator,
        "--num-processes": arguments.num_processes,
        "--process-id": arguments.process_id,
    }
    missing = [flag for flag, value in options.items() if value is None]
    if arguments.distributed and len(missing) < len(options):
        raise InputError("--distributed cannot be combined with --coordinator; remove one of them")
    # JAX's preemption service would take SIGTERM from `process` and only record it.
    jax.config.update("jax_enable_preemption_service", False)
    if arguments.distributed:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as failure:
            raise InputError(
                f"--distributed: no cluster was found ({failure}); give "
                "--coordinator HOST:PORT --num-processes N --process-id I"
            ) from failure
    elif not missing:
        count, index = arguments.num_processes, arguments.process_id
        if count < 1:
            raise InputError(f"--num-processes: expected 1 or more, found {count}")
        if not 0 <= index < count:
            raise InputError(f"--process-id: expected 0 to {count - 1}, found {index}")
        connect(arguments.coordinator, count, index)
    elif len(missing) < len(options):
        raise InputError(
            f"--coordinator, --num-processes and --process-id are used together; {missing[0]} is "
            "missing"
        )
    if arguments.distributed or not missing:
        sys.excepthook = _exit_at_once
        signals.leave = leave_processes


def connect(coordinator: str, count: int, index: int) -> None:
    """Connects this process with the others, for at most `CONNECT_SECONDS`.

    Raises:
        InputError: the address cannot be used.
    """
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"--coordinator: expected HOST:PORT, found {coordinator!r}")
    try:
        socket.getaddrinfo(host.strip("[]"), port)
    except OSError as failure:
        raise InputError(f"--coordinator: {host}: {failure.strerror}") from None
    if index == 0:  # the coordinator; JAX crashes where the port is taken
        try:
            socket.create_server(("", int(port))).close()
        except OSError as failure:
            raise InputError(
                f"--coordinator: port {port} of this host cannot be used ({failure.strerror}); "
                "give all processes another one"
            ) from None
    with connect_limit(f"{coordinator} (process {index} of {count})"):
        # JAX aborts the process at its own limit.
        limit = CONNECT_SECONDS + 60
        jax.distributed.initialize(coordinator, count, index, initialization_timeout=limit)


@contextlib.contextmanager
def connect_limit(what: str) -> Generator[None]:
    """Says what is waited for, and ends the process after `CONNECT_SECONDS`."""
    connected = threading.Event()

    def watch() -> None:
        if connected.wait(min(NOTICE_SECONDS, CONNECT_SECONDS)):
            return
        signals.say(f"waiting for the other processes at {what}, at most {CONNECT_SECONDS} s")
        if not connected.wait(CONNECT_SECONDS - NOTICE_SECONDS):
            signals.say(
                f"error: --coordinator: {what}: not all processes connected within "
                f"{CONNECT_SECONDS} s; start all of them with the same address, which must reach "
                "process 0"
            )
            os._exit(USAGE_ERROR)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        connected.set()


def leave_processes() -> bool:
    """Disconnects this process from the others, if they disconnect within `LEAVE_SECONDS`, too.

    Otherwise JAX aborts the processes that are connected when process 0 ends, and after some time
    process 0 when another one has ended.

    Returns:
        False if they did not.
    """
    has_left = threading.Event()

    def shut_down() -> None:
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.distributed.shutdown()
        has_left.set()

    threading.Thread(target=shut_down, daemon=True).start()
    return has_left.wait(LEAVE_SECONDS)


def _exit_at_once(error_type: type[BaseException], error: BaseException, trace: Any) -> None:
    """Ends a crashed process at once, so that the cluster notices. JAX would wait minutes for the
    other processes, which may be waiting for this one."""
    sys.__excepthook__(error_type, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def mesh_from_arguments(arguments: argparse.Namespace) -> Mesh | None:
    """Mesh of ``--mesh``; by default all devices on ``data`` for several processes, else None.

    Unnamed axes have size 1, except that ``data`` takes the remaining devices.
    """
    sizes = {} if jax.process_count() > 1 and arguments.mesh is None else arguments.mesh
    return None if sizes is None else make_mesh(**sizes)


def local_mesh(arguments: argparse.Namespace) -> Mesh | None:
    """Mesh of ``--mesh`` for a command of one process; by default all devices on ``data`` if there
    are several, else None."""
    sizes = {} if jax.local_device_count() > 1 and arguments.mesh is None else arguments.mesh
    return None if sizes is None else make_mesh(**sizes)


def is_main_process() -> bool:
    """True in process 0, which prints and writes results."""
    return jax.process_index() == 0


def add_ray_flags(parser: argparse.ArgumentParser, worker: str) -> None:
    """Adds ``--engine``, ``--address``, and the number and resources of workers.

    Args:
        worker: what the cluster runs, "actor" or "worker"; part of the options' names.
    """
    group = parser.add_argument_group("a Ray cluster")
    flags = {
        "--engine": {"choices": (RAY,), "help": f"run in {worker}s of a Ray cluster"},
        "--address HOST:PORT": "of the cluster; auto: the one of this node (default: RAY_ADDRESS, "
        "or a new one here)",
        f"--{worker}s N": f"number of {worker}s",
        f"--{worker}-resources AMOUNTS": {
            "type": amounts,
            "help": f"what each {worker} takes, such as GPU=1 or TPU=4 (default: CPU=1)",
        },
    }
    add_flags(group, flags)


def amounts(text: str) -> dict[str, float]:
    """Parses resources of a cluster.

    >>> amounts("GPU=1,CPU=4")
    {'GPU': 1.0, 'CPU': 4.0}
    """
    resources: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = part.strip().partition("=")
        try:
            amount = float(number)
        except ValueError:
            amount = 0.0
        if not name or not equals or name in resources or not 0 < amount < float("inf"):
            raise argparse.ArgumentTypeError(
                f"expected amounts such as GPU=1,CPU=4, found {text!r}"
            )
        resources[name] = amount
    return resources


def check_ray_flags(arguments: argparse.Namespace, worker: str) -> None:
    """Raises InputError where the number of workers is missing, or ``--engine ray`` is."""
    if arguments.engine is None:
        names = ("address", f"{worker}s", f"{worker}_resources")
        return reject(arguments, names, "has no effect without --engine ray")
    count = getattr(arguments, f"{worker}s")
    if count is None:
        raise InputError(f"--engine ray needs --{worker}s N, the number of {worker}s")
    if count < 1:
        raise InputError(f"--{worker}s: expected 1 or more, found {count}")
