"""Sinks: copies of a run's metrics for TensorBoard and Weights & Biases.

metrics.jsonl is the authoritative record. Like the log, sinks are opened with the step at which a
run resumes, and show no step twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

from jaxllm.common.optional_packages import require
from jaxllm.training.monitor.metrics_log import is_scalar, iterate_metrics
from jaxllm.training.output_files import write_text

# Otherwise W&B sends the command line with its secrets, and data about the machine.
QUIET = {"x_disable_meta": True, "x_disable_machine_info": True, "x_disable_stats": True}


class Sink(Protocol):
    """Receives the metrics of steps; `MetricsLog` implements it as well."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Adds the metrics of a step."""
        ...

    def close(self) -> None: ...


def tensorboard_package() -> Any:
    return require("tensorboardX", extra="tensorboard", purpose="TensorBoard files")


def wandb_package() -> Any:
    return require("wandb", extra="wandb", purpose="Weights & Biases logs")


class TensorBoardSink:
    """Writes OUTPUT/tensorboard, for ``tensorboard --logdir OUTPUT``.

    Writes only numbers, including NaN and infinity. A resumed run writes another file: it tells
    TensorBoard to drop the earlier ones (`purge_step`) and repeats the steps of metrics.jsonl, so
    that steps still queued at a kill are not lost.

    Args:
        folder: folder of the run, with metrics.jsonl.
        resume_at: step at which the run resumes.

    Raises:
        MissingExtraError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | PathLike[str], *, resume_at: int | None = None) -> None:
        module = tensorboard_package()
        folder = Path(folder)
        self._writer = module.SummaryWriter(
            str(folder / "tensorboard"),
            purge_step=None if resume_at is None else 0,
            flush_secs=10,
        )
        record = folder / "metrics.jsonl"
        if resume_at is not None and record.exists():
            for row in iterate_metrics(record):
                if row["step"] > resume_at:
                    break
                self.log(row.pop("step"), row)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        for name, value in metrics.items():
            if is_scalar(value):
                self._writer.add_scalar(name, float(value), step)

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs to Weights & Biases; ``mode="offline"`` (or WANDB_MODE=offline) needs no network.

    The run's id is kept in OUTPUT/wandb_id, so that a resumed run continues the same W&B run. W&B
    keeps the first value of a step, so no step appears twice. Offline, each start has its own
    folder in OUTPUT/wandb; send them in order with ``wandb sync --append``.

    Console output, code, command line and machine data are not sent.

    Args:
        folder: folder of the run.
        config: config of the run card, without secrets.
        mode: "online", "offline" or "disabled"; None: from the environment variable.
        resume_at: step at which the run resumes.

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(
        self,
        folder: str | PathLike[str],
        *,
        config: Mapping[str, Any] | None = None,
        project: str = "jaxllm",
        mode: str | None = None,
        resume_at: int | None = None,
    ) -> None:
        module = wandb_package()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        id_file = folder / "wandb_id"
        if resume_at is None or not id_file.exists():
            write_text(id_file, secrets.token_hex(6))
        self._run = module.init(
            project=project,
            name=folder.resolve().name,
            dir=str(folder),
            id=id_file.read_text(encoding="utf-8").strip(),
            resume=None if resume_at is None or mode == "offline" else "allow",
            config=dict(config or {}),
            mode=mode,
            settings=module.Settings(
                console="off", disable_git=True, save_code=False, silent=True, **QUIET
            ),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        plain = {k: float(v) if is_scalar(v) else v for k, v in metrics.items() if v is not None}
        self._run.log(plain, step=step)

    def close(self) -> None:
        self._run.finish()
