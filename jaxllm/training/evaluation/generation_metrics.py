"""Metrics of generated text against references: exact match, accuracy, ROUGE, BLEU, chrF.

Pure functions of (prediction, references) pairs; with several references the best match counts.
Each returns a dict of scores: exact match, accuracy and ROUGE from 0 to 1, BLEU and chrF from 0 to
100 (as in rouge-score and sacrebleu).
"""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Callable, Hashable, Iterable, Sequence

from jaxllm.common.errors import InputError, warn
from jaxllm.common.optional_packages import require

Pairs = Sequence[tuple[str, str | Sequence[str]]]
MetricValues = dict[str, float]

ROUGE_KINDS = ("rouge1", "rouge2", "rougeL")


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


def accuracy(pairs: Sequence[tuple[Hashable, Hashable]]) -> MetricValues:
    """Share of labels (texts or numbers) that equal their reference.

    >>> accuracy([(1, 1), (0, 1)])
    {'accuracy': 0.5}
    """
    _check(pairs)
    return {"accuracy": sum(prediction == label for prediction, label in pairs) / len(pairs)}


def rouge(pairs: Pairs, *, use_stemmer: bool = False) -> MetricValues:
    """Mean F-measures of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004), by rouge-score.

    Its words are of ASCII letters and digits; a reference in another script always scores 0, of
    which a warning tells.

    Raises:
        MissingExtraError: rouge-score is not installed.
    """
    module = require("rouge_score.rouge_scorer", extra="metrics", purpose="ROUGE scores")
    _check(pairs)
    without_words = sum(not any(map(_has_rouge_words, _several(wanted))) for _, wanted in pairs)
    if without_words:
        warn(
            f"rouge: {without_words} of {len(pairs)} references have no ASCII letter or digit, and"
            " score 0 whatever the prediction; use chrf for other scripts"
        )
    scorer = module.RougeScorer(list(ROUGE_KINDS), use_stemmer=use_stemmer)
    rows = [scorer.score_multi(_several(references), text) for text, references in pairs]
    return {kind: sum(row[kind].fmeasure for row in rows) / len(rows) for kind in ROUGE_KINDS}


def _has_rouge_words(reference: str) -> bool:
    return re.search("[a-z0-9]", reference.lower()) is not None or not reference.strip()


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
    "bleu": bleu,
    "chrf": chrf,
}
"""Metrics of generated text, by name in recipes."""


def check_metrics(names: Iterable[str]) -> None:
    """Raises if a name is unknown or its package is missing.

    >>> check_metrics(["rogue"])
    Traceback (most recent call last):
    jaxllm.common.errors.InputError: metrics: no 'rogue', did you mean 'rouge'? There are \
exact_match, normalized_exact_match, rouge, bleu, chrf
    """
    for name in names:
        if name not in METRICS:
            near = difflib.get_close_matches(name, METRICS, n=1)
            hint = f", did you mean {near[0]!r}?" if near else "."
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
