"""Evaluation: loss and perplexity of a full set, and scores of generated answers.

The metrics of answers are exact match and ROUGE, from 0 to 1, and BLEU and chrF, from 0 to 100 (as
in rouge-score and sacrebleu). With several references the best match counts.
"""

from __future__ import annotations

import dataclasses
import math
import re
import string
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.common.errors import ConfigError, DataError, InputError, JaxLLMError, warn
from jaxllm.common.optional_packages import require
from jaxllm.common.spelling import closest
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.arguments import run_in_batches
from jaxllm.generation.settings.resolve import merged_config
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Model
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import DataConfig, ModelInfo, rows_of
from jaxllm.training.data.config import length_limits
from jaxllm.training.data.examples import fit
from jaxllm.training.data.formats import ClassificationFormat, TextFormat, tokenizer_of
from jaxllm.training.data.pipeline import make_format
from jaxllm.training.losses import ROUTER_LOSS, Batch, Loss, LossSums

__all__ = [
    "METRICS",
    "EvalPrompt",
    "EvalResult",
    "EvalSample",
    "GenerationResult",
    "evaluate",
    "generate_and_score",
    "score_texts",
]

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


Pairs = Sequence[tuple[str, str | Sequence[str]]]
MetricValues = dict[str, float]
ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")


@dataclasses.dataclass(frozen=True)
class EvalPrompt:
    """A prompt to generate an answer for, with the expected answer."""

    prompt: str | Sequence[int]
    """Text, encoded with the tokenizer's special tokens; or token ids (from a chat template)."""
    reference: str | Sequence[str]
    """The expected answer, or several equally good ones."""
    fields: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Generation settings of this row: those of its target language."""


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
    """Scores by name; see `METRICS`."""
    predictions: list[str]
    """Generated texts in row order, without special tokens."""
    samples: list[EvalSample]
    """The first few rows."""


def generation_rows(
    config: DataConfig,
    tokenizer: Tokenizer,
    model: ModelInfo,
    limit: int | None = None,
    *,
    check: Callable[[Sequence[int]], None] = lambda ids: None,
) -> list[EvalPrompt]:
    """Converts the first `limit` rows to prompts, with the same tokens as in training.

    The prompt of a conversation is everything before its last answer. With `on_too_long` of drop
    or truncate, rows that are left out of the loss are left out here, and sources are as long.

    Args:
        check: raises a JaxLLMError for the ids of an invalid prompt, such as one that is too long.

    Raises:
        ConfigError: the format has no answers (text, classification).
        DataError: a row lacks a field, or its prompt is invalid; names file and line.
    """
    rows, limits = rows_of(config), length_limits(config, model)
    encode = make_format(config, tokenizer, model)
    if isinstance(encode, TextFormat | ClassificationFormat):
        raise ConfigError(
            f"evaluation.metrics: rows of format {config.format!r} have no answers to compare with"
        )
    prompts: list[EvalPrompt] = []
    for number in range(len(rows)):
        if len(prompts) == limit:
            break
        row = rows[number]
        try:
            ids, reference = encode.prompt_of(row)
            if config.on_too_long != "error":
                examples, _ = fit(encode(row), limits, config.on_too_long)
                if not examples:
                    continue
                if model.kind == "seq2seq":
                    ids = examples[0].sequences[0].input_ids.tolist()
            check(ids)
        except JaxLLMError as error:
            raise DataError(f"{rows.where(number)}: {error}") from None
        own = tokenizer_of(row, tokenizer, config.src_lang_field, config.tgt_lang_field)
        prompts.append(EvalPrompt(ids, reference, own.with_target({}, None)))
    return prompts


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
        rows: (prompt, reference) pairs, or objects of `EvalPrompt`.
        metrics: names in `METRICS`.
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
    answers = [""] * len(prompts)
    groups: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for number, row in enumerate(prompts):
        groups.setdefault(tuple(sorted(row.fields.items())), []).append(number)
    for own, numbers in groups.items():
        asked = {number: prompts[number].prompt for number in numbers}
        ids = {n: tokenizer.encode(x) if isinstance(x, str) else list(x) for n, x in asked.items()}
        settings = {**dict(own), **fields}
        texts = generate_answers(model, tokenizer, ids, batch_size, key, before_batch, settings)
        for number, text in texts.items():
            answers[number] = text
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
    prompts: Mapping[int, Sequence[int]],
    batch_size: int,
    key: Any,
    before_batch: Callable[[], None],
    fields: Mapping[str, Any],
) -> dict[int, str]:
    """Generates a text for each prompt, without special tokens; see `generate_and_score`.

    Args:
        prompts: token ids by the number of the row, by which it samples.

    Raises:
        InputError: conflicting fields, or several sequences per prompt.
    """
    if batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more, found {batch_size}")
    config, eos_ids = merged_config(model, None, fields)
    if config.num_return_sequences != 1:
        raise InputError("num_return_sequences: evaluation scores one answer per prompt")
    needs = {"tokenizer": tokenizer} if config.stop_strings else {}

    def run(numbers: list[int]) -> list[list[int]]:
        before_batch()
        side = "right" if model.is_encoder_decoder else "left"
        batch = tokenizer.pad([prompts[i] for i in numbers], padding_side=side, return_tensors="np")
        ids: Any = batch.input_ids  # on the host, where generate() checks it
        mask: Any = batch.attention_mask
        row_ids = np.array(numbers, np.int32)
        out = generate(model, ids, mask, key=key, row_ids=row_ids, **needs, **fields)
        answers = out.new_tokens(1 if model.is_encoder_decoder else ids.shape[1])
        # An end token is no part of the answer, even where it is not a special token.
        return [ids[:-1] if ids[-1] in eos_ids else ids for ids in answers]

    rows = run_in_batches(run, [*prompts], batch_size, length=lambda i: len(prompts[i]))
    return {number: tokenizer.decode(row, skip_special_tokens=True) for number, row in rows}


def as_text(content: str | Sequence[str] | Sequence[int], tokenizer: Tokenizer) -> str:
    """A prompt or reference as text: decodes ids, and takes the first of several references."""
    if isinstance(content, str):
        return content
    first = next(iter(content), "")
    if isinstance(first, str):
        return first
    return tokenizer.decode([int(i) for i in content])  # pyright: ignore[reportArgumentType]


def exact_match(pairs: Pairs) -> MetricValues:
    """Share of predictions equal to a reference, ignoring leading and trailing whitespace.

    >>> exact_match([(" Paris\\n", "Paris"), ("paris.", "Paris")])
    {'exact_match': 0.5}
    """
    return {"exact_match": _share_equal(pairs, str.strip)}


def normalized_exact_match(pairs: Pairs) -> MetricValues:
    """Exact match after `normalize`, a common score for short answers.

    >>> normalized_exact_match([("The  city: Paris!", ["Rome", "city Paris"])])
    {'normalized_exact_match': 1.0}
    """
    return {"normalized_exact_match": _share_equal(pairs, normalize)}


def normalize(text: str) -> str:
    """Lower-cases a text and removes punctuation, articles and repeated whitespace.

    Matches the evaluation script of SQuAD (Rajpurkar et al. 2016, arXiv:1606.05250).
    """
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def rouge(
    pairs: Pairs, *, kinds: Sequence[str] = ROUGE_KINDS, use_stemmer: bool = False
) -> MetricValues:
    """Mean F-measures, 0 to 1, of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), by rouge-score.

    Its words are of ASCII letters and digits; a reference in another script always scores 0, of
    which a warning tells.

    Args:
        kinds: of rouge-score; its "rougeLsum" takes each line for a sentence.
        use_stemmer: compare English words without their endings (Porter 1980); the names of the
            results then end with "_stemmed".

    Raises:
        MissingExtraError: rouge-score is not installed.
    """
    module = require("rouge_score.rouge_scorer", extra="metrics", purpose="ROUGE scores")
    _check(pairs)
    references = [" ".join(_several(wanted)).lower() for _, wanted in pairs]
    without_words = sum(bool(x.strip()) and not re.search("[a-z0-9]", x) for x in references)
    if without_words:
        warn(
            f"rouge: {without_words} of {len(pairs)} references have no ASCII letter or digit, and"
            " score 0 whatever the prediction; use chrf for other scripts"
        )
    scorer, suffix = module.RougeScorer(list(kinds), use_stemmer), "_stemmed" * use_stemmer
    rows = [scorer.score_multi(_several(references), text) for text, references in pairs]
    return {kind + suffix: sum(row[kind].fmeasure for row in rows) / len(rows) for kind in kinds}


def bleu(pairs: Pairs) -> MetricValues:
    """BLEU of the whole set (Papineni et al. 2002) with sacrebleu's defaults: tokenizer 13a.

    Raises:
        MissingExtraError: sacrebleu is not installed.
    """
    return {"bleu": _sacrebleu().corpus_bleu(*_streams(pairs)).score}


def chrf(pairs: Pairs) -> MetricValues:
    """chrF2 of the whole set (Popović 2015) with sacrebleu's defaults: 6-grams of characters.

    Raises:
        MissingExtraError: sacrebleu is not installed.
    """
    return {"chrf": _sacrebleu().corpus_chrf(*_streams(pairs)).score}


METRICS: dict[str, Callable[[Pairs], MetricValues]] = {
    "exact_match": exact_match,
    "normalized_exact_match": normalized_exact_match,
    "rouge": rouge,
    "rouge_lsum": partial(rouge, kinds=("rougeLsum",)),
    "rouge_stemmed": partial(rouge, use_stemmer=True),
    "rouge_lsum_stemmed": partial(rouge, kinds=("rougeLsum",), use_stemmer=True),
    "bleu": bleu,
    "chrf": chrf,
}
"""Metrics of generated text, by name in recipes."""


def check_metrics(names: Iterable[str]) -> None:
    """Raises if a name is unknown or its package is missing.

    >>> check_metrics(["rogue"])
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: metrics: no 'rogue', did you mean 'rouge'? There are \
exact_match, normalized_exact_match, rouge, rouge_lsum, rouge_stemmed, \
rouge_lsum_stemmed, bleu, chrf
    """
    for name in names:
        if name not in METRICS:
            near = closest(name, METRICS)
            hint = f", did you mean {near!r}?" if near else "."
            raise InputError(f"metrics: no {name!r}{hint} There are {', '.join(METRICS)}")
        METRICS[name]([("a", "a")])


def score_texts(pairs: Pairs, names: Iterable[str]) -> MetricValues:
    """Computes several metrics by their names in `METRICS`; returns all scores in one dict."""
    scores: MetricValues = {}
    for name in names:
        scores |= METRICS[name](pairs)
    return scores


def _share_equal(pairs: Pairs, form: Callable[[str], str]) -> float:
    _check(pairs)
    return sum(
        form(text) in {form(reference) for reference in _several(wanted)} for text, wanted in pairs
    ) / len(pairs)


def _several(references: str | Sequence[str]) -> list[str]:
    return [references] if isinstance(references, str) else list(references)


def _check(pairs: Sequence[tuple[Hashable, object]]) -> None:
    if len(pairs) == 0:
        raise InputError("metrics: no predictions to score")
    for number, (_, wanted) in enumerate(pairs):
        if isinstance(wanted, Sequence) and not isinstance(wanted, str) and len(wanted) == 0:
            raise InputError(f"metrics: prediction {number} has no reference")


def _streams(pairs: Pairs) -> tuple[list[str], list[list[str | None]]]:
    """Predictions, and references in sacrebleu's layout: all first ones, all second ones, ..."""
    _check(pairs)
    references = [_several(wanted) for _, wanted in pairs]
    count = max(map(len, references))
    streams = [[row[i] if i < len(row) else None for row in references] for i in range(count)]
    return [text for text, _ in pairs], streams


def _sacrebleu():
    return require("sacrebleu", extra="metrics", purpose="BLEU and chrF")
