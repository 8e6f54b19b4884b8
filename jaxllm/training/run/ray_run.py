"""`train_on_ray`: a recipe trained by the workers of a Ray cluster, through Ray Train."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.common.compiling import enable_compile_cache
from jaxllm.common.errors import InputError, RunError
from jaxllm.common.optional_packages import require
from jaxllm.parallel.processes import connect, environment
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import check_new, folder_of, train

SHUTDOWN_SECONDS = "5"
"""Time that the workers of a failed attempt have to disconnect, before Ray ends them."""


@dataclasses.dataclass(frozen=True)
class RayWorkers:
    """Workers of a Ray cluster.

    Args:
        count: number of workers. One for each host, with all its devices, is best.
        resources: what each takes of the cluster, such as ``{"GPU": 8}`` or ``{"TPU": 4}``.
        address: as `jaxllm.parallel.processes.connect`.
        restarts: number of times that all start again after one of them is lost.
        topology, accelerator_type: of a TPU slice, as Ray names them: "4x4", "TPU-V6E".
    """

    count: int
    resources: Mapping[str, float]
    address: str | None = None
    restarts: int = 3
    topology: str | None = None
    accelerator_type: str | None = None

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise InputError(f"--restarts: expected 0 or more, found {self.restarts}")
        if "TPU" not in self.resources and (self.topology or self.accelerator_type):
            raise InputError("--topology, --accelerator-type: only with TPU in --worker-resources")


def train_on_ray(
    recipe: Recipe,
    workers: RayWorkers,
    *,
    resume: bool = False,
    quiet: bool = False,
    keep_programs: bool = True,
) -> int:
    """Runs `jaxllm.training.run.train` in all workers, as the processes of one run.

    Returns the last step.

    The folder of the run, data and model are on file systems that all nodes share, at the same
    paths. If a worker or its node is lost, Ray ends the others and starts all again, and the run
    resumes from its last checkpoint.

    Args:
        resume, quiet: as `train`.
        keep_programs: keep compiled programs in the folder of the commands.

    Raises:
        RunError: the workers failed more than `workers.restarts` times.
        JaxLLMError: as `train`, and as `connect`.
    """
    folder = folder_of(recipe)
    if not resume:
        check_new(folder)
    connect(workers.address, workers.resources, workers.count, show_output=not quiet)
    ray_train = require("ray.train", extra="ray", purpose="clusters")
    config = {
        "recipe": recipe,
        "quiet": quiet,
        "keep_programs": keep_programs,
        "folder": os.getcwd(),
    }
    os.environ.setdefault("JAX_DISTRIBUTED_SHUTDOWN_TIMEOUT_S", SHUTDOWN_SECONDS)
    try:
        result = trainer(workers, folder, config).fit()
    except ray_train.TrainingFailedError as failure:
        # The last line of what the first worker raised, or of Ray's message.
        failures = getattr(failure, "worker_failures", None) or {0: failure}
        why = str(failures[min(failures)]).strip().split("\n")[-1]
        raise RunError(f"{folder}: {why}; continue with --resume") from failure
    return result.return_value


def trainer(workers: RayWorkers, folder: Path, config: Mapping[str, Any]) -> Any:
    """The trainer of Ray that calls `run_worker` in each worker, connected with the others."""
    ray_train = require("ray.train", extra="ray", purpose="clusters")
    jax_train = require("ray.train.v2.jax", extra="ray", purpose="clusters")
    resources = dict(workers.resources)
    use_tpu, use_gpu = "TPU" in resources, "GPU" in resources
    variables = environment()
    if not (use_tpu or use_gpu):
        variables["JAX_PLATFORMS"] = "cpu"
    return jax_train.JaxTrainer(
        run_worker,
        train_loop_config=dict(config),
        # Ray connects the processes of JAX where one of these is set; which devices they have
        # follows from JAX_PLATFORMS, so that `use_gpu` does it for CPUs too.
        jax_config=jax_train.JaxConfig(use_tpu=use_tpu, use_gpu=not use_tpu),
        scaling_config=ray_train.ScalingConfig(
            num_workers=workers.count,
            use_gpu=use_gpu,
            use_tpu=use_tpu,
            resources_per_worker=resources,
            topology=workers.topology,
            accelerator_type=workers.accelerator_type,
        ),
        run_config=ray_train.RunConfig(
            storage_path=str(folder.resolve() / "ray"),
            failure_config=ray_train.FailureConfig(max_failures=workers.restarts),
            worker_runtime_env={"env_vars": variables},
        ),
    )


def run_worker(config: Mapping[str, Any]) -> int:
    """The run in one worker; returns its last step."""
    # Ray gives each worker a folder; paths of the recipe are those of the command.
    try:
        os.chdir(config["folder"])
    except OSError as failure:
        raise RunError(
            f"{config['folder']}: {failure.strerror} on a node of the cluster; run the command in "
            "a folder that all nodes share"
        ) from None
    # Ray shows the log of every library.
    for name in ("absl", "jax"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if config["keep_programs"]:
        enable_compile_cache()
    # The command has checked that the run is new, or may be resumed.
    return train(config["recipe"], resume=True, quiet=config["quiet"]).step
