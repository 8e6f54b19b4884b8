"""Scores of texts: by hand where that is easy, and beside the libraries' own interfaces."""

from __future__ import annotations

import sys

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from jaxllm.common.errors import InputError, MissingExtraError
from jaxllm.training import evaluation as gm

PREDICTIONS = [
    "the cat sat on the mat",
    "There is a house on the hill .",
    "",
    "Je ne sais pas, vraiment pas.",
]
REFERENCES = [
    ["the cat is on the mat", "a cat sat on the mat today"],
    ["There is a house upon the hill ."],
    ["something was wanted here"],
    ["Je ne sais vraiment pas."],
]
PAIRS = list(zip(PREDICTIONS, REFERENCES, strict=True))
SINGLE = [(text, references[0]) for text, references in PAIRS]


def test_exact_match() -> None:
    pairs = [("a b", "a b"), (" a b\n", "a b"), ("A b", "a b"), ("c", ["d", "c"])]
    assert gm.exact_match(pairs) == {"exact_match": 0.75}
    assert gm.normalized_exact_match(pairs) == {"normalized_exact_match": 1.0}


def test_normalisation_is_that_of_squad() -> None:
    assert gm.normalize("The  theatre, a man's\tanswer!") == "theatre mans answer"


def test_rouge_by_hand() -> None:
    # Six words each. Five in common; four pairs of eight; the longest common subsequence has five.
    scores = gm.rouge([("the cat sat on the mat", "the cat is on the mat")])
    assert scores == pytest.approx({"rouge1": 5 / 6, "rouge2": 3 / 5, "rougeL": 5 / 6})


def test_rouge_is_the_librarys() -> None:
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL"])
    expected = dict.fromkeys(gm.ROUGE_KINDS, 0.0)
    for text, references in PAIRS:
        for kind in expected:
            best = max(scorer.score(reference, text)[kind].fmeasure for reference in references)
            expected[kind] += best / len(PAIRS)
    assert gm.rouge(PAIRS) == pytest.approx(expected)
    assert gm.rouge(PAIRS) != pytest.approx(gm.rouge(SINGLE))


@pytest.mark.parametrize("use_stemmer", [False, True])
def test_rouge_of_stems_and_lines(use_stemmer: bool) -> None:
    """As transformers' run_summarization.py scores: stems, and sentences on lines."""
    text, reference = "The cats were running.\nDogs sleep.", "Dogs slept.\nA cat runs."
    scorer = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer)
    expected = {name: score.fmeasure for name, score in scorer.score(reference, text).items()}
    suffix = "_stemmed" * use_stemmer
    scores = gm.score_texts([(text, reference)], [f"rouge{suffix}", f"rouge_lsum{suffix}"])
    assert scores == pytest.approx({name + suffix: x for name, x in expected.items()})
    assert (scores[f"rouge1{suffix}"] > 0.3) is use_stemmer
    assert (scores[f"rougeLsum{suffix}"] > scores[f"rougeL{suffix}"]) is use_stemmer


def test_references_that_rouge_cannot_score_are_told() -> None:
    """A perfect answer in another script has a ROUGE of 0, in rouge-score too."""
    pairs = [("Привет", ["Привет"]), ("a", ["你好", "a"]), ("", [""]), ("Grüße", ["Grüße"])]
    with pytest.warns(UserWarning, match="rouge: 1 of 4 references have no ASCII letter"):
        assert gm.rouge(pairs)["rouge1"] == 0.5
    assert gm.chrf(pairs[:1]) == {"chrf": 100.0}


def test_bleu_and_chrf_are_the_librarys() -> None:
    streams = [[references[0] for references in REFERENCES]]
    assert gm.bleu(SINGLE)["bleu"] == sacrebleu.BLEU().corpus_score(PREDICTIONS, streams).score
    assert gm.chrf(SINGLE)["chrf"] == sacrebleu.CHRF().corpus_score(PREDICTIONS, streams).score
    assert 0 < gm.bleu(SINGLE)["bleu"] < gm.bleu(PAIRS)["bleu"] < 100
    same = [(text, text) for text in PREDICTIONS[:2]]
    assert gm.score_texts(same, ["bleu", "chrf"]) == pytest.approx({"bleu": 100, "chrf": 100})


def test_references_of_different_numbers() -> None:
    two = [[r[0] for r in REFERENCES], [r[-1] for r in REFERENCES]]
    assert gm.bleu(PAIRS) == {"bleu": sacrebleu.corpus_bleu(PREDICTIONS, two).score}
    assert gm.chrf(PAIRS) == {"chrf": sacrebleu.corpus_chrf(PREDICTIONS, two).score}


@pytest.mark.parametrize("name", gm.METRICS)
def test_nothing_to_score(name: str) -> None:
    with pytest.raises(InputError, match="no predictions"):
        gm.METRICS[name]([])
    with pytest.raises(InputError, match="prediction 1 has no reference"):
        gm.METRICS[name]([("a", "a"), ("b", [])])


def test_unknown_metric() -> None:
    with pytest.raises(InputError, match="no 'exact_mach', did you mean 'exact_match'"):
        gm.check_metrics(["bleu", "exact_mach"])


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [("rouge", "rouge_score.rouge_scorer", "rouge_score"), ("bleu", "sacrebleu", "sacrebleu")],
)
def test_a_missing_package_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=rf"{package}: pip install .*\[metrics\]'"):
        gm.check_metrics([name])
