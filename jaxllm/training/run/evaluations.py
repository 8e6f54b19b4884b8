"""What the evaluations of a run measure: batches, prompts, and metrics that are compared."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, cast

from jaxllm.common.errors import ConfigError
from jaxllm.generation.call.merging import merged_config
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Model
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import Epoch, ModelInfo
from jaxllm.training.data.labels import problem_of
from jaxllm.training.dpo import METRICS
from jaxllm.training.evaluation.evaluate import EvalResult, Predicted
from jaxllm.training.evaluation.generation import (
    EvalPrompt,
    check_answer_length,
    generation_rows,
)
from jaxllm.training.evaluation.generation_metrics import score_texts
from jaxllm.training.run.early_stopping import is_lower_better
from jaxllm.training.run.recipe import Evaluation, Recipe


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
            raise ConfigError(f"{field}: no {name!r} is measured; there are {', '.join(metrics)}")
    expected = "min" if is_lower_better(metric) else "max"
    if mode != expected:
        better = "smaller" if expected == "min" else "larger"
        raise ConfigError(
            f"checkpoints.mode: {mode!r}, but a {better} {metric} is better; set mode: {expected}"
        )


def measured_on(recipe: Recipe, eval_batches: Epoch | None, metric: str) -> str | None:
    """Hash of all that an evaluation metric depends on besides the weights: the rows, and how
    answers are generated; None without `eval_data`. Values of two hashes are not compared."""
    if eval_batches is None:
        return None
    content, evaluation = [eval_batches.examples.digest], recipe.evaluation
    if metric in answer_metrics(evaluation):
        fields = dict(evaluation.fields)
        content.append(json.dumps([evaluation.rows, fields], sort_keys=True))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()
