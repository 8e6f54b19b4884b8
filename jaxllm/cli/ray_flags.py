"""Options of ``--engine ray``."""

from __future__ import annotations

import argparse

from jaxllm.common.errors import InputError

RAY = "ray"


def add_ray_flags(parser: argparse.ArgumentParser, worker: str) -> None:
    """Adds ``--engine``, ``--address``, and the number and resources of workers.

    Args:
        worker: what the cluster runs, "actor" or "worker"; part of the options' names.
    """
    group = parser.add_argument_group("a Ray cluster")
    group.add_argument("--engine", choices=(RAY,), help=f"run in {worker}s of a Ray cluster")
    group.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="of the cluster; auto: the one of this node (default: RAY_ADDRESS, or a new one here)",
    )
    group.add_argument(f"--{worker}s", type=int, metavar="N", help=f"number of {worker}s")
    group.add_argument(
        f"--{worker}-resources",
        type=amounts,
        metavar="AMOUNTS",
        help=f"what each {worker} takes, such as GPU=1 or TPU=4 (default: CPU=1)",
    )


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
    names = ("address", f"{worker}s", f"{worker}_resources")
    if arguments.engine is None:
        for name in names:
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag}: has no effect without --engine ray")
        return
    count = getattr(arguments, f"{worker}s")
    if count is None:
        raise InputError(f"--{worker}s: --engine ray needs the number of {worker}s")
    if count < 1:
        raise InputError(f"--{worker}s: expected 1 or more, found {count}")
