"""What the evaluations of a run measure, and early stopping by one of the metrics."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jaxllm.common.errors import ConfigError
from jaxllm.generation.call.merging import merged_config
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Model
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import EvalBatches, ModelInfo
from jaxllm.training.data.formats import problem_of
from jaxllm.training.dpo import METRICS
from jaxllm.training.evaluation.evaluate import EvalResult, Predicted
from jaxllm.training.evaluation.generation import (
    EvalPrompt,
    check_answer_length,
    generation_rows,
    score_texts,
)
from jaxllm.training.run.recipe import EarlyStopping, Evaluation, Recipe

LOWER_IS_BETTER = ("loss", "perplexity", "mse", "rejected")


def eval_batch_size(recipe: Recipe) -> int:
    """Rows per evaluation batch."""
    return recipe.evaluation.batch_size or recipe.batch_size // recipe.accumulation


def eval_prompts(
    recipe: Recipe, model: Model[Any], tokenizer: Tokenizer, info: ModelInfo
) -> list[EvalPrompt]:
    """Prompts to generate for at every evaluation; empty without `evaluation.metrics`.

    Raises:
        JaxLLMError: `evaluation.fields` are wrong, or a prompt leaves no room for an answer.
    """
    if recipe.eval_data is None or not recipe.evaluation.metrics:
        return []
    fields, limit = recipe.evaluation.fields, recipe.evaluation.rows
    decoder = cast(GenerativeModel, model)
    merged_config(decoder, None, fields)

    def check(ids: Sequence[int]) -> None:
        check_answer_length(decoder, ids, fields)

    return generation_rows(recipe.eval_data, tokenizer, info, limit, check=check)


def predicted(recipe: Recipe, info: ModelInfo) -> Predicted:
    """Kind of the model's predictions, which decides the metrics of an evaluation."""
    if recipe.dpo is not None:
        return "preferences"
    if info.kind != "classification":
        return "tokens"
    return "values" if problem_of(info) == "regression" else "labels"


def answer_metrics(evaluation: Evaluation) -> list[str]:
    """Names of the metrics of generated answers."""
    if not evaluation.metrics:
        return []
    return [f"eval_{name}" for name in score_texts([("a", "a")], evaluation.metrics)]


def check_metric(recipe: Recipe, info: ModelInfo) -> None:
    """Checks that evaluations measure the metrics of `checkpoints` and `early_stopping`.

    Raises:
        ConfigError: no evaluation measures one, or `mode` would keep the worst checkpoint.
    """
    extra = {} if recipe.dpo is None else dict.fromkeys(METRICS, 0.0)
    result = EvalResult(loss=0.0, accuracy=0.0, count=1, extra=extra)
    metrics = [*result.metrics(predicted(recipe, info))]
    metrics += answer_metrics(recipe.evaluation)
    metric, mode = recipe.checkpoints.metric, recipe.checkpoints.mode
    watched = None if recipe.early_stopping is None else recipe.early_stopping.metric
    for field, name in (("checkpoints.metric", metric), ("early_stopping.metric", watched)):
        if name is not None and name not in metrics:
            raise ConfigError(f"{field}: unknown metric {name!r}; use {', '.join(metrics)}")
    expected = "min" if is_lower_better(metric) else "max"
    if mode != expected:
        better = "smaller" if expected == "min" else "larger"
        raise ConfigError(
            f"checkpoints.mode: {mode!r}, but a {better} {metric} is better; set mode: {expected}"
        )


def measured_on(recipe: Recipe, eval_batches: EvalBatches | None, metric: str) -> str | None:
    """Hash of all that an evaluation metric depends on besides the weights: the rows, and how
    answers are generated; None without `eval_data`. Values of two hashes are not compared."""
    if eval_batches is None:
        return None
    content, evaluation = [eval_batches.examples.digest], recipe.evaluation
    if metric in answer_metrics(evaluation):
        fields = dict(evaluation.fields)
        content.append(json.dumps([evaluation.rows, fields], sort_keys=True))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


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
