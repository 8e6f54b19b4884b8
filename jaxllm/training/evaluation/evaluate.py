"""Evaluates a model on a full set: loss, perplexity and accuracy."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Literal

import jax

from jaxllm.common.errors import InputError
from jaxllm.models.model import Model
from jaxllm.training.losses import ROUTER_LOSS, Batch, Loss, LossSums

Predicted = Literal["tokens", "labels", "values", "preferences"]
"""Kind of a model's predictions, which decides the metrics of an evaluation."""


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Means over every counted token (or example) of a set."""

    loss: float
    """Mean loss in nats per token; mean squared error for regression."""
    accuracy: float
    """Share of tokens (or labels) predicted correctly by the largest logit; 0 for regression."""
    count: int
    """Number of counted tokens, examples or pairs."""
    extra: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Means of `LossSums.extra`, such as the rewards of DPO."""

    @property
    def perplexity(self) -> float:
        """exp(loss), without the loss of routers; infinity on overflow."""
        try:
            return math.exp(self.loss - self.extra.get(ROUTER_LOSS, 0.0))
        except OverflowError:
            return math.inf

    def metrics(self, predicted: Predicted = "tokens", prefix: str = "eval_") -> dict[str, float]:
        """Fields for the metrics log; `predicted` says what the model predicts.

        >>> EvalResult(loss=0.0, accuracy=1.0, count=3).metrics()
        {'eval_loss': 0.0, 'eval_perplexity': 1.0, 'eval_accuracy': 1.0}
        >>> EvalResult(loss=0.5, accuracy=0.0, count=3).metrics("values")
        {'eval_loss': 0.5, 'eval_mse': 0.5}
        """
        metrics = {"loss": self.loss}
        if predicted == "tokens":
            metrics["perplexity"] = self.perplexity
        if predicted == "values":
            metrics["mse"] = self.loss
        elif predicted != "preferences":
            metrics["accuracy"] = self.accuracy
        metrics |= self.extra
        return {prefix + name: value for name, value in metrics.items()}


def evaluate(model: Model[Any], batches: Iterable[Batch], loss: Loss) -> EvalResult:
    """Evaluates a model: mean loss over all batches, with equal weight for each counted token.

    The result does not depend on the split into batches: sums are added, never means. Sums of a
    batch are float32, those of the set float64. The last batch may be filled with padding rows
    (labels -100) to the shape of the others, since each shape is compiled once.

    Args:
        model: evaluated without dropout: `loss` gets no key.
        batches: dicts of the model's call arguments.
        loss: one of `losses`, without label smoothing and z-loss, which would distort the
            perplexity; or a function. A new lambda at each call compiles again.

    Raises:
        InputError: no label of any batch is counted.
    """
    total = Counter[str]()
    # Fetch the sums of a batch while the next one runs, so that the device does not wait.
    pending: list[LossSums] = []
    for batch in batches:
        pending.append(_sums(model, dict(batch), loss=loss))
        if len(pending) > 1:
            total.update(_on_host(pending.pop(0)))
    for sums in pending:
        total.update(_on_host(sums))
    count = total.pop("count", 0)
    if count == 0:
        raise InputError("evaluation: no batch, or no label in any batch that counts (not -100)")
    means = {name: value / count for name, value in total.items()}
    loss_mean, accuracy = means.pop("loss"), means.pop("correct")
    return EvalResult(loss_mean, accuracy, int(count), extra=means)


@partial(jax.jit, static_argnames="loss")
def _sums(model: Model[Any], batch: Batch, *, loss: Loss) -> LossSums:
    return loss(model, batch)


def _on_host(sums: LossSums) -> dict[str, float]:
    host = jax.device_get(sums)
    named = {"loss": host.loss, "count": host.count, "correct": host.correct, **host.extra}
    return {name: float(value) for name, value in named.items()}
