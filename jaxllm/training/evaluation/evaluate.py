"""Evaluation on a full set: the loss and what follows from it, and scores of generated texts."""

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
from jaxllm.models.model import without_metadata
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.training.evaluation.generation_metrics import check_metrics, score_texts
from jaxllm.training.losses import Batch, Loss, LossSums


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """Means over every counted token (or example) of a set."""

    loss: float
    """In nats a token; the mean squared error for regression."""
    accuracy: float
    """The share of tokens (or labels) that are the model's first choice; 0 for regression."""
    count: int
    """Of counted tokens, or examples."""

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite where a float cannot hold it."""
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
    """The mean loss of a model over all batches, each counted token weighing the same.

    How the set is cut into batches does not matter: sums are added, never means. Sums of a batch
    are float32, those of the set float64. A last batch may be filled up with rows that count
    nothing (labels -100), so that it has the shape of the others: one program for each shape.

    Args:
        model: without dropout: no key is given to `loss`.
        batches: dicts of the model's call arguments.
        loss: of `losses`, without label smoothing or z-loss, which are no part of a perplexity. A
            function of your own works, too, but not a new lambda at each call: it compiles anew.

    Raises:
        InputError: no batch counts anything.
    """
    bare = without_metadata(model)
    total = np.zeros(3, np.float64)
    # The sums of a batch are fetched when the next one is under way: the device does not wait.
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
class Prompt:
    """One row to generate for, and what is wanted."""

    prompt: str | Sequence[int]
    """Text, encoded with the special tokens that the tokenizer adds; or ids, taken as they are
    (those of a chat template)."""
    reference: str | Sequence[str]
    """The text that is wanted, or several that are as good."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt with its reference and the model's answer, for people to read."""

    prompt: str
    reference: str
    prediction: str


@dataclasses.dataclass(frozen=True)
class GenerationResult:
    scores: dict[str, float]
    """By the names in the metrics' own dicts; see generation_metrics."""
    predictions: list[str]
    """In the order of the rows, without special tokens."""
    samples: list[Sample]
    """The first few rows."""


def generate_and_score(
    model: Any,
    tokenizer: Tokenizer,
    rows: Iterable[Prompt | tuple[Any, Any]],
    *,
    metrics: Sequence[str] = ("exact_match",),
    batch_size: int = 8,
    samples: int = 5,
    key: Any = 0,
    before_batch: Callable[[], None] = lambda: None,
    **fields: Any,
) -> GenerationResult:
    """Generates an answer for every row, and scores the answers.

    Rows of about one length are generated together, padded on the left for a decoder-only model and
    on the right for an encoder-decoder; the results come back in the order of the rows, and do not
    depend on `batch_size`.

    Args:
        rows: `Prompt`s, or (prompt, reference) pairs.
        metrics: names in `generation_metrics.METRICS`.
        batch_size: rows at once; each batch has as many, and the last one repeats a row.
        samples: how many rows to keep for people to read.
        key: for sampling; a constant by default, so that two evaluations are comparable.
        before_batch: called before each batch; what it raises ends the evaluation.
        fields: of `jaxllm.generate`, such as ``max_new_tokens=32``; one text a row.

    Raises:
        InputError: no rows, an unknown metric, fields that do not go together.
        MissingExtraError: a metric's package is not installed.
    """
    check_metrics(metrics)
    if batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more, found {batch_size}")
    prompts = [row if isinstance(row, Prompt) else Prompt(*row) for row in rows]
    if not prompts:
        raise InputError("evaluation: no rows to generate for")
    config, ends = merged_config(model, None, fields)
    if config.num_return_sequences != 1:
        raise InputError("num_return_sequences: evaluation scores one text a row")
    needs = {"tokenizer": tokenizer} if config.stop_strings else {}
    encoded = [
        tokenizer.encode(row.prompt) if isinstance(row.prompt, str) else list(row.prompt)
        for row in prompts
    ]
    texts: list[str] = [""] * len(prompts)

    def run(numbers: list[int]) -> list[list[int]]:
        before_batch()
        side = "right" if model.is_encoder_decoder else "left"
        batch = tokenizer.pad([encoded[i] for i in numbers], padding_side=side)
        ids: Any = batch.input_ids  # on the host, where generate() checks it
        mask: Any = batch.attention_mask
        out = generate(
            model,
            ids,
            mask,
            key=key,
            row_ids=np.array(numbers, np.int32),
            **needs,
            **fields,
        )
        start = 1 if model.is_encoder_decoder else ids.shape[1]
        return np.asarray(out.sequences)[:, start:].tolist()

    numbers = range(len(prompts))
    for i, row in run_in_batches(run, numbers, batch_size, length=lambda i: len(encoded[i])):
        texts[i] = tokenizer.decode(up_to_end(row, ends), skip_special_tokens=True)
    pairs = [(text, row.reference) for text, row in zip(texts, prompts, strict=True)]
    return GenerationResult(
        scores=score_texts(pairs, metrics),
        predictions=texts,
        samples=[
            Sample(readable(row.prompt, tokenizer), readable(row.reference, tokenizer), text)
            for row, text in list(zip(prompts, texts, strict=True))[:samples]
        ],
    )


def check_room_for_answer(model: Any, prompt: Sequence[int], fields: Mapping[str, Any]) -> None:
    """That `generate_and_score` has room for an answer to this prompt, with these fields.

    Raises:
        InputError: a prompt and its answer are longer than the model's positions or `max_length`.
    """
    if not model.is_encoder_decoder:
        config, _ = merged_config(model, None, fields)
        ids = np.zeros((1, len(prompt)), np.int32)
        checked_lengths(model, config, PaddedBatch(ids, np.ones_like(ids, bool)))


def up_to_end(ids: Sequence[int], ends: Sequence[int]) -> Sequence[int]:
    """New ids up to the first end token: what follows it are pads.

    >>> up_to_end([5, 6, 2, 0, 0], ends=(2,))
    [5, 6]
    """
    return next((ids[:i] for i, token in enumerate(ids) if token in ends), ids)


def readable(content: str | Sequence[str] | Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt's or a reference's text: that of ids, or the first of several."""
    if isinstance(content, str):
        return content
    first = next(iter(content), "")
    if isinstance(first, str):
        return first
    return tokenizer.decode([int(i) for i in content])  # pyright: ignore[reportArgumentType]
