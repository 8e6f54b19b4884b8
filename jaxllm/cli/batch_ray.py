"""The engine that answers the rows of a job on a Ray cluster (``--engine ray``)."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jaxllm.batch.job.inputs import Source
from jaxllm.batch.job.inputs.openai_requests import OpenAIRequests
from jaxllm.batch.job.job import RowEngine
from jaxllm.batch.job.ray_engine import RayEngine
from jaxllm.cli.batch_engines import constraint, load_engine
from jaxllm.cli.devices import local_mesh
from jaxllm.cli.model_flags import keep_programs
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.progress import Reporter

DEFAULT_RESOURCES: Mapping[str, float] = {"CPU": 1}


def actor_platform(arguments: argparse.Namespace) -> str:
    """Platform of the actors, by what they take of the cluster."""
    names = (arguments.actor_resources or DEFAULT_RESOURCES).keys()
    return "tpu" if "TPU" in names else "gpu" if "GPU" in names else "cpu"


def ray_engine(
    arguments: argparse.Namespace, source: Source, clock: CompileClock, dtype: str
) -> RayEngine:
    """The engine of ``--engine ray`` for the rows of a job.

    Args:
        dtype: compute dtype in all actors, which would choose it by their own devices.

    Raises:
        JaxLLMError: there is no such cluster.
    """
    # An actor has another working directory.
    absolute: dict[str, Any] = {"dtype": dtype}
    if arguments.model is not None and Path(arguments.model).exists():
        absolute["model"] = str(Path(arguments.model).absolute())
    if arguments.compile_cache is not None:
        absolute["compile_cache"] = arguments.compile_cache.absolute()
    load = partial(
        load_in_actor,
        argparse.Namespace(**{**vars(arguments), **absolute}),
        constraint(arguments),
        isinstance(source, OpenAIRequests),
    )
    return RayEngine(
        load,
        clock,
        actors=arguments.actors,
        resources=arguments.actor_resources or DEFAULT_RESOURCES,
        address=arguments.address,
    )


def load_in_actor(
    arguments: argparse.Namespace, constraint: Mapping[str, Any], are_requests: bool
) -> Callable[[], RowEngine]:
    """`load_engine` in an actor, on all devices that Ray lets it see."""
    reporter = Reporter(quiet=True)
    keep_programs(arguments, reporter)
    return load_engine(arguments, constraint, are_requests, local_mesh(arguments), reporter)
