"""Early stopping: counts the evaluations since a metric last improved."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.training.run.recipe import EarlyStopping, Recipe

LOWER_IS_BETTER = ("loss", "perplexity", "mse", "rejected")


def is_lower_better(metric: str) -> bool:
    """True if smaller values of an evaluation metric are better, by its name.

    >>> is_lower_better("eval_loss"), is_lower_better("eval_exact_match")
    (True, False)
    """
    return metric.endswith(LOWER_IS_BETTER)


@dataclasses.dataclass(frozen=True)
class Patience:
    """The best value of the watched metric, and the evaluations since; kept in checkpoints."""

    metric: str
    best: float | None = None
    """Value that later ones have to improve by `min_delta`; None: not evaluated yet."""
    waited: int = 0
    """Number of evaluations since then."""
    measured_on: str | None = None
    """Hash of what the metric is measured on."""

    def after(self, evaluation: Mapping[str, Any], settings: EarlyStopping) -> Patience:
        """The state after an evaluation. A value that is not finite is no improvement.

        >>> state = Patience("eval_loss")
        >>> for loss in (1.0, 0.95, 0.9):
        ...     state = state.after({"eval_loss": loss}, EarlyStopping(min_delta=0.08))
        >>> state
        Patience(metric='eval_loss', best=0.9, waited=0, measured_on=None)
        """
        value = float(evaluation[self.metric])
        if math.isfinite(value) and (self.best is None or self._improves(value, settings)):
            return dataclasses.replace(self, best=value, waited=0)
        return dataclasses.replace(self, waited=self.waited + 1)

    def _improves(self, value: float, settings: EarlyStopping) -> bool:
        assert self.best is not None
        gain = self.best - value if is_lower_better(self.metric) else value - self.best
        return gain > settings.min_delta

    def reason(self, settings: EarlyStopping) -> str | None:
        """Says why the run ends; None: it goes on."""
        if self.waited < settings.patience:
            return None
        best = "was never finite" if self.best is None else f"has not improved on {self.best:.5g}"
        delta = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        return (
            f"{self.metric} {best}{delta} in {self.waited} evaluations (early_stopping.patience "
            f"{settings.patience})"
        )


def patience_of(
    recipe: Recipe, meta: Mapping[str, Any], measured_on: Callable[[str], str | None]
) -> Patience | None:
    """The state of a run that starts, or that resumes from a checkpoint with this metadata.

    A resumed run that watches another metric, or evaluates on other data, starts to count again.

    Args:
        measured_on: maps a metric to a hash of what it is measured on.
    """
    if recipe.early_stopping is None:
        return None
    metric = recipe.early_stopping.metric or recipe.checkpoints.metric
    new = Patience(metric, measured_on=measured_on(metric))
    saved = Patience(**meta.get("early_stopping", {"metric": metric}))
    same = (saved.metric, saved.measured_on) == (new.metric, new.measured_on)
    return saved if same else new
