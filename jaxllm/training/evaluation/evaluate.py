"""Evaluates a model on a full set: loss, perplexity and accuracy, and scores of generated text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Float64

from jaxllm.common.errors import InputError
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.generation.inputs.padded_batch import PaddedBatch
from jaxllm.generation.settings.lengths import checked_lengths
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import without_metadata
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.training.evaluation.generation_metrics import check_metrics, score_texts
from jaxllm.training.losses import Batch, Loss, LossSums


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Means over every counted token (or example) of a set."""

    loss: float
    """Mean loss in nats per token; mean squared error for regression."""
    accuracy: float
    """Share of tokens (or labels) predicted correctly by the largest logit; 0 for regression."""
    count: int
    """Number of counted tokens, or examples."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def metrics(
        self, kind: Literal["tokens", "labels", "values"] = "tokens", prefix: str = "eval_"
    ) -> dict[str, float]:
        """Fields for the metrics log; `kind` says what the model predicts.

        >>> EvalResult(loss=0.0, accuracy=1.0, count=3).metrics()
        {'eval_loss': 0.0, 'eval_perplexity': 1.0, 'eval_accuracy': 1.0}
        >>> EvalResult(loss=0.5, accuracy=0.0, count=3).metrics("values")
        {'eval_loss': 0.5, 'eval_mse': 0.5}
        """
        found = {"loss": self.loss}
        if kind == "tokens":
            found["perplexity"] = self.perplexity
        if kind == "values":
            found["mse"] = self.loss
        else:
            found["accuracy"] = self.accuracy
        return {prefix + name: value for name, value in found.items()}


def evaluate(model: Any, batches: Iterable[Batch], loss: Loss) -> EvalResult:
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
    bare = without_metadata(model)
    total = np.zeros(3, np.float64)
    # Fetch the sums of a batch while the next one runs, so that the device does not wait.
    pending: list[LossSums] = []
    for batch in batches:
        pending.append(_sums(bare, dict(batch), loss=loss))
        if len(pending) > 1:
            total += _on_host(pending.pop(0))
    for sums in pending:
        total += _on_host(sums)
    summed, count, correct = total.tolist()
    if count == 0:
        raise InputError("evaluation: no batch, or no label in any batch that counts (not -100)")
    return EvalResult(loss=summed / count, accuracy=correct / count, count=int(count))


@partial(jax.jit, static_argnames="loss")
def _sums(model: Any, batch: Batch, *, loss: Loss) -> LossSums:
    return loss(model, batch)


def _on_host(sums: LossSums) -> Float64[np.ndarray, 3]:
    host = jax.device_get(sums)
    return np.array([host.loss, host.count, host.correct], np.float64)


@dataclasses.dataclass(frozen=True)
class EvalPrompt:
    """A prompt to generate an answer for, with the expected answer."""

    prompt: str | Sequence[int]
    """Text, encoded with the tokenizer's special tokens; or token ids (from a chat template)."""
    reference: str | Sequence[str]
    """The expected answer, or several equally good ones."""


@dataclasses.dataclass(frozen=True)
class EvalSample:
    """A prompt, its reference and the model's answer, as text for the report."""

    prompt: str
    reference: str
    prediction: str


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    """Generated answers and their scores."""

    scores: dict[str, float]
    """Scores by name; see `generation_metrics`."""
    predictions: list[str]
    """Generated texts in row order, without special tokens."""
    samples: list[EvalSample]
    """The first few rows."""


def generate_and_score(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    rows: Iterable[EvalPrompt | tuple[Any, Any]],
    *,
    metrics: Sequence[str] = ("exact_match",),
    batch_size: int = 8,
    samples: int = 5,
    key: Any = 0,
    before_batch: Callable[[], None] = lambda: None,
    **fields: Any,
) -> GenerationResult:
    """Generates an answer to every prompt and scores the answers.

    Prompts of similar length share a batch, padded on the left for a decoder-only model and on the
    right for an encoder-decoder. Results are in row order and do not depend on `batch_size`.

    Args:
        rows: `EvalPrompt`s, or (prompt, reference) pairs.
        metrics: names in `generation_metrics.METRICS`.
        batch_size: rows per batch; the last batch is filled by repeating a row.
        samples: number of rows to keep for the report.
        key: PRNG key for sampling; constant by default, so that evaluations are comparable.
        before_batch: called before each batch; its exceptions end the evaluation.
        fields: generation settings of `jaxllm.generate`, such as ``max_new_tokens=32``.

    Raises:
        InputError: no rows, an unknown metric, or conflicting fields.
        MissingExtraError: a metric's package is not installed.
    """
    check_metrics(metrics)
    prompts = [row if isinstance(row, EvalPrompt) else EvalPrompt(*row) for row in rows]
    if not prompts:
        raise InputError("evaluation: no rows to generate for")
    answers = generate_answers(
        model,
        tokenizer,
        [encoded_prompt(row, tokenizer) for row in prompts],
        batch_size=batch_size,
        key=key,
        before_batch=before_batch,
        fields=fields,
    )
    pairs = [(answer, row.reference) for answer, row in zip(answers, prompts, strict=True)]
    return GenerationResult(
        scores=score_texts(pairs, metrics),
        predictions=answers,
        samples=[
            EvalSample(as_text(row.prompt, tokenizer), as_text(row.reference, tokenizer), answer)
            for row, answer in list(zip(prompts, answers, strict=True))[:samples]
        ],
    )


def generate_answers(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    batch_size: int,
    key: Any,
    before_batch: Callable[[], None],
    fields: Mapping[str, Any],
) -> list[str]:
    """Generates a text for each prompt, without special tokens; see `generate_and_score`.

    Raises:
        InputError: conflicting fields, or several sequences per prompt.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more, found {batch_size}")
    config, eos_ids = merged_config(model, None, fields)
    if config.num_return_sequences != 1:
        raise InputError("num_return_sequences: evaluation scores one answer per prompt")
    needs = {"tokenizer": tokenizer} if config.stop_strings else {}
    answers = [""] * len(prompts)

    def run(numbers: list[int]) -> list[list[int]]:
        before_batch()
        side = "right" if model.is_encoder_decoder else "left"
        batch = tokenizer.pad([prompts[i] for i in numbers], padding_side=side)
        ids: Any = batch.input_ids  # on the host, where generate() checks it
        mask: Any = batch.attention_mask
        row_ids = np.array(numbers, np.int32)
        out = generate(model, ids, mask, key=key, row_ids=row_ids, **needs, **fields)
        start = 1 if model.is_encoder_decoder else ids.shape[1]
        return np.asarray(out.sequences)[:, start:].tolist()

    numbers = range(len(prompts))
    for i, row in run_in_batches(run, numbers, batch_size, length=lambda i: len(prompts[i])):
        answers[i] = tokenizer.decode(before_eos(row, eos_ids), skip_special_tokens=True)
    return answers


def encoded_prompt(row: EvalPrompt, tokenizer: Tokenizer) -> list[int]:
    """The token ids of a prompt."""
    return tokenizer.encode(row.prompt) if isinstance(row.prompt, str) else list(row.prompt)


def check_answer_length(
    model: GenerativeModel, prompt: Sequence[int], fields: Mapping[str, Any]
) -> None:
    """Checks that prompt and answer fit in the model's context and in `max_length`.

    Raises:
        InputError: they do not fit.
    """
    if not model.is_encoder_decoder:
        config, _ = merged_config(model, None, fields)
        ids = np.zeros((1, len(prompt)), np.int32)
        checked_lengths(model, config, PaddedBatch(ids, np.ones_like(ids, bool)))


def before_eos(ids: Sequence[int], eos_ids: Sequence[int]) -> Sequence[int]:
    """Generated ids before the first EOS token.

    >>> before_eos([5, 6, 2, 0, 0], eos_ids=(2,))
    [5, 6]
    """
    return next((ids[:i] for i, token in enumerate(ids) if token in eos_ids), ids)


def as_text(content: str | Sequence[str] | Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt or reference as text: decodes ids, and takes the first of several references."""
    if isinstance(content, str):
        return content
    first = next(iter(content), "")
    if isinstance(first, str):
        return first
    return tokenizer.decode([int(i) for i in content])  # pyright: ignore[reportArgumentType]
