"""Options of commands that run on several devices or in several processes."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.common.errors import InputError
from jaxllm.parallel.sharding import AXES, make_mesh


def add_device_flags(parser: argparse.ArgumentParser) -> None:
    """``--mesh``, and `add_process_flags`."""
    add_process_flags(parser)
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="SIZES",
        help="spread the model: data=2,tensor=4; one of data, fsdp, tensor may be -1: what is left",
    )


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """What finds the other processes."""
    group = parser.add_argument_group("several processes")
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="where process 0 listens; all processes say it"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator")
    group.add_argument("--process-id", type=int, metavar="I", help="this one: 0 to N - 1")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="several processes that the cluster (SLURM, MPI, a TPU pod, Kubernetes) has started",
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """The sizes of ``data=2,tensor=4``.

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
    """Finds the other processes, if the command line says that there are some.

    Comes before anything that counts devices.

    Raises:
        InputError: options that contradict each other, or no cluster.
    """
    given = {
        "--coordinator": arguments.coordinator,
        "--num-processes": arguments.num_processes,
        "--process-id": arguments.process_id,
    }
    missing = [flag for flag, value in given.items() if value is None]
    if arguments.distributed and len(missing) < len(given):
        raise InputError("--distributed asks the cluster; give it or --coordinator, not both")
    if arguments.distributed:
        try:
            jax.distributed.initialize()
        except (ValueError, RuntimeError) as failure:
            raise InputError(
                f"--distributed: no cluster told this process of the others ({failure}); say it "
                "with --coordinator HOST:PORT --num-processes N --process-id I"
            ) from failure
    elif not missing:
        count, index = arguments.num_processes, arguments.process_id
        if count < 1 or not 0 <= index < count:
            raise InputError(f"--process-id: expected 0 to {count - 1}, found {index}")
        if ":" not in arguments.coordinator:
            raise InputError(f"--coordinator: expected HOST:PORT, found {arguments.coordinator!r}")
        jax.distributed.initialize(arguments.coordinator, count, index)
    elif len(missing) < len(given):
        raise InputError(
            f"--coordinator, --num-processes and --process-id belong together; {missing[0]} is "
            "missing"
        )
    if arguments.distributed or not missing:
        sys.excepthook = _leave_at_once
        # JAX's notice of preemption has taken this signal, and does nothing but remember it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_at_once(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """How a process that crashes ends. JAX would have it wait minutes for the others, which may
    wait for it; a supervisor has to see it go."""
    sys.__excepthook__(kind, error, trace)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)


def mesh_of_arguments(arguments: argparse.Namespace) -> Mesh | None:
    """The mesh of ``--mesh``; several processes without it: all devices on ``data``.

    Sizes that are not named are 1, and ``data`` what is left.
    """
    if arguments.mesh is None:
        return make_mesh() if jax.process_count() > 1 else None
    return make_mesh(**arguments.mesh)


def own_mesh(arguments: argparse.Namespace) -> Mesh | None:
    """As `mesh_of_arguments`, of the devices of this process alone, of which all are used."""
    devices = jax.local_devices()
    if arguments.mesh is None:
        return make_mesh(devices=devices) if len(devices) > 1 else None
    try:
        return make_mesh(devices=devices, **arguments.mesh)
    except InputError as error:
        if jax.process_count() == 1:
            raise
        raise InputError(
            f"--input: each process has a mesh of its own {len(devices)} devices; {error}"
        ) from None


def leads() -> bool:
    """Whether this process is the one that prints and writes what all of them know."""
    return jax.process_index() == 0
