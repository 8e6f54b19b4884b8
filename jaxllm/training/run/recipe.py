"""What a run is made of: the fields of a file in configs/."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from jaxllm.common.errors import ConfigError
from jaxllm.training.data import DataConfig
from jaxllm.training.evaluation.generation_metrics import check_metrics
from jaxllm.training.lora import LoraConfig
from jaxllm.training.optimizers import OptimizerConfig

Dtype = Literal["float32", "bfloat16", "float16"]
BUNDLED, BYTES = "smollm2", "bytes"


def at_least(least: float, where: object, *names: str) -> None:
    """Checks numbers that may also be None."""
    for name in names:
        value = getattr(where, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}: expected {least} or more, found {value}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSource:
    """The model to start from, and its tokenizer.

    Args:
        path: a Hugging Face folder, a .gguf file, a Hub id, or "smollm2" (the bundled model).
        config: an object as in config.json, in place of `path`: a new model with random weights.
        architecture: a class name in place of the one that the config names.
        num_labels: a classifier is made of the language model at `path`, with this many outputs.
        problem_type: of that classifier; None: one label of several, or a regression for one.
        overrides: fields of the checkpoint's config to change, such as dropout rates.
        tokenizer: a folder or Hub id, "smollm2", or "bytes" (ids are bytes; for new models). None:
            the model's own.
        dtype: to compute in; None: as `jaxllm.load` chooses. What is trained is kept in float32.
        remat: compute activations again in the backward pass, block by block: less memory.
        attn_implementation: eager, xla or cudnn.
    """

    path: str | None = None
    config: Mapping[str, Any] | None = None
    architecture: str | None = None
    num_labels: int | None = None
    problem_type: str | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokenizer: str | None = None
    dtype: Dtype | None = None
    remat: bool = False
    attn_implementation: Literal["eager", "xla", "cudnn"] = "eager"

    def __post_init__(self):
        if (self.path is None) == (self.config is None):
            raise ConfigError("path, config: give one of the two")
        if self.config is not None:
            for name in ("num_labels", "problem_type", "overrides"):
                if getattr(self, name):
                    raise ConfigError(f"{name}: belongs to a checkpoint; say it in config")
            if self.tokenizer is None:
                raise ConfigError('tokenizer: a new model needs one, such as "bytes"')
        if self.problem_type is not None and self.num_labels is None:
            raise ConfigError("problem_type: has no effect without num_labels")
        at_least(1, self, "num_labels")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluating on the full set of `eval_data`.

    Args:
        every: steps between evaluations; there is one at the last step, too. None: only that.
        at_start: one before the first step, too, as a line of step 0.
        batch_size: rows at once; None: those of training.
        metrics: of generated texts (exact_match, normalized_exact_match, rouge, bleu, chrf);
            none: nothing is generated.
        rows: how many rows to generate for; None: all.
        samples: how many answers the report shows, before and after.
        fields: of `jaxllm.generate`, such as ``{max_new_tokens: 64}``.
    """

    every: int | None = None
    at_start: bool = False
    batch_size: int | None = None
    metrics: tuple[str, ...] = ()
    rows: int | None = None
    samples: int = 5
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        at_least(1, self, "every", "batch_size", "rows")
        at_least(0, self, "samples")
        check_metrics(self.metrics)
        if not self.metrics and (self.fields or self.rows):
            raise ConfigError("fields, rows: have no effect without metrics")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Saving.

    Args:
        every: steps between checkpoints; the last step and the best evaluation are saved besides.
        keep: how many of the last ones stay, beside the best one.
        metric: of the evaluation, which the best is chosen by.
        mode: whether a small or a large one is good.
    """

    every: int = 500
    keep: int = 2
    metric: str = "eval_loss"
    mode: Literal["min", "max"] = "min"

    def __post_init__(self):
        at_least(1, self, "every", "keep")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Devices along each axis; `data` -1: all that are left. See docs/devices.md."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole run.

    Args:
        model, data, optimizer, lora, evaluation, checkpoints, mesh: see their classes.
        eval_data: what to evaluate on. None: no evaluation.
        output_dir: the run's folder.
        max_steps: where to stop. The schedule's length is `optimizer.schedule_steps`.
        batch_size: rows of one optimizer step, over all devices and micro-batches.
        accumulation: micro-batches that the rows are computed in, one after the other.
        seed: of new weights, of the data's order, and of dropout.
        trainable: regexes of the parameters' paths that are trained; none: all of them.
        label_smoothing, z_loss: see `jaxllm.training.losses.TokenLoss`.
        ema_decay: keep a moving average of the weights, which is evaluated and exported.
        skip_limit: so many batches in a row without a finite gradient stop the run.
        log_every: steps between lines where there is no terminal; slow steps have one each half
            minute.
        tensorboard: write event files; needs the extra `tensorboard`.
        wandb: a project's name on Weights & Biases; needs the extra `wandb`.
    """

    model: ModelSource
    data: DataConfig
    eval_data: DataConfig | None = None
    output_dir: str | None = None
    max_steps: int = 1000
    batch_size: int = 8
    accumulation: int = 1
    seed: int = 0
    trainable: tuple[str, ...] = ()
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    ema_decay: float | None = None
    skip_limit: int = 10
    evaluation: Evaluation = dataclasses.field(default_factory=Evaluation)
    checkpoints: Checkpoints = dataclasses.field(default_factory=Checkpoints)
    mesh: MeshSizes = dataclasses.field(default_factory=MeshSizes)
    log_every: int = 10
    tensorboard: bool = False
    wandb: str | None = None

    def __post_init__(self):
        at_least(1, self, "max_steps", "batch_size", "accumulation", "skip_limit", "log_every")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed: expected 0 to {2**32 - 1}, found {self.seed}")
        if self.batch_size % self.accumulation:
            raise ConfigError(
                f"accumulation: {self.accumulation} does not divide batch_size, {self.batch_size}"
            )
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"ema_decay: expected 0 to 1, found {self.ema_decay}")
        if self.lora is not None and self.trainable:
            raise ConfigError("trainable: LoRA trains its adapters; use lora.modules_to_save")
        for pattern in self.trainable:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"trainable: {pattern!r} is not a regex: {error}") from None
        if self.eval_data is None:
            best = (self.checkpoints.metric, self.checkpoints.mode)
            if self.evaluation != Evaluation():
                raise ConfigError("evaluation: has no effect without eval_data")
            if best != (Checkpoints.metric, Checkpoints.mode):
                raise ConfigError("checkpoints.metric, mode: have no effect without eval_data")


CHANGEABLE = (
    *("output_dir", "max_steps", "eval_data", "evaluation", "checkpoints.every"),
    *("checkpoints.keep", "mesh", "log_every", "tensorboard", "wandb", "skip_limit"),
    *("model.path", "data.path", "data.dataset"),  # what is in them is compared in their place
)
"""What may change between a run and its going on: nothing that the weights, or which of them are
the best, follow from."""
