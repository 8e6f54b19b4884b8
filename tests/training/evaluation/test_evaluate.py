"""Evaluation counts each token once, however the set is cut into batches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
from conformance_runs import DATA
from generation_tools import compilations
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.models.input_checks import IGNORED
from jaxllm.training.evaluation import EvalResult, evaluate, generate_and_score
from jaxllm.training.losses import CausalLoss, ClassificationLoss, LossSums, Seq2SeqLoss

LENGTHS = (3, 9, 5, 12, 2, 7, 4)


def rows() -> list[np.ndarray]:
    return [tiny.ids(1, length, seed=i)[0] for i, length in enumerate(LENGTHS)]


def batched(rows: list[np.ndarray], sizes: tuple[int, ...], width: int, pad: int = 0):
    """Batches padded on the right; the last is filled up with rows that count nothing."""
    first = 0
    for size in sizes:
        batch = {
            "input_ids": np.full((size, width), pad, np.int32),
            "attention_mask": np.zeros((size, width), np.int32),
            "labels": np.full((size, width), IGNORED, np.int32),
        }
        for i, row in enumerate(rows[first : first + size]):
            batch["input_ids"][i, : len(row)] = row
            batch["attention_mask"][i, : len(row)] = 1
            batch["labels"][i, : len(row)] = row
        batch["attention_mask"][:, 0] = 1
        first += size
        yield batch


@pytest.mark.ci
def test_equal_for_any_batches() -> None:
    model = tiny.cached("llama")
    one_by_one = [evaluate(model, batched([row], (1,), 12), CausalLoss()) for row in rows()]
    count = sum(LENGTHS) - len(LENGTHS)
    assert sum(r.count for r in one_by_one) == count
    expected = sum(r.loss * r.count for r in one_by_one) / count
    assert abs(np.mean([r.loss for r in one_by_one]) - expected) > 1e-3, "a mean of means shows"
    right = sum(r.accuracy * r.count for r in one_by_one)
    for sizes, width, pad in (((7,), 12, 0), ((3, 3, 3), 16, 7)):
        actual = evaluate(model, batched(rows(), sizes, width, pad), CausalLoss())
        assert actual.count == count
        assert actual.loss == pytest.approx(expected, rel=1e-5)
        assert actual.accuracy == pytest.approx(right / count)
        assert actual.perplexity == pytest.approx(math.exp(expected), rel=1e-5)


@pytest.mark.ci
def test_against_the_models_own_loss() -> None:
    model = tiny.cached("llama")
    (batch,) = batched(rows(), (7,), 12)
    own = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    assert evaluate(model, [batch], CausalLoss()).loss == pytest.approx(float(own), rel=1e-5)


@pytest.mark.ci
def test_an_encoder_decoders_loss() -> None:
    model, source = tiny.cached("t5"), tiny.ids(3, 8).astype(np.int32)
    labels = tiny.ids(3, 6, seed=1).astype(np.int32)
    labels[1, 2:] = labels[2, 4:] = IGNORED
    mask = np.ones_like(source)
    mask[0, 5:] = 0
    batch = {"input_ids": source, "attention_mask": mask, "labels": labels}
    own = float(model(**batch).loss)
    actual = evaluate(
        model, [{k: x[i : i + 1] for k, x in batch.items()} for i in range(3)], Seq2SeqLoss()
    )
    assert (actual.count, actual.loss) == (6 + 2 + 4, pytest.approx(own, rel=1e-5))


@pytest.mark.ci
def test_the_best_model_is_always_right() -> None:
    """Accuracy of labels that are the model's own first choice is one."""
    model = tiny.cached("llama")
    (batch,) = batched(rows(), (7,), 12)
    choice = np.asarray(model(batch["input_ids"], batch["attention_mask"]).logits.argmax(-1))
    batch["labels"][:, 1:] = np.where(batch["labels"][:, 1:] == IGNORED, IGNORED, choice[:, :-1])
    assert evaluate(model, [batch], CausalLoss()).accuracy == 1.0


@pytest.mark.ci
def test_one_program_a_shape() -> None:
    model = tiny.cached("llama")
    sizes = [(3, 3, 1), (3, 1, 3)]
    evaluate(model, batched(rows(), sizes[0], 12), CausalLoss())
    again = compilations(lambda: evaluate(model, batched(rows(), sizes[1], 12), CausalLoss()))
    assert again == []
    more = compilations(lambda: evaluate(model, batched(rows(), (7,), 20), CausalLoss()))
    assert sum("backend_compile" in name for name in more) == 1


def test_sums_are_added_in_float64() -> None:
    def constant(model, batch, key=None) -> LossSums:
        return LossSums(batch["loss"], batch["count"], batch["count"])

    first = {"loss": np.float32(2**24), "count": np.float32(2**24)}
    others = {"loss": np.float32(0.5), "count": np.float32(1)}
    actual = evaluate(tiny.cached("llama"), [first] + [others] * 64, constant)
    assert actual.count == 2**24 + 64
    assert actual.loss == (2**24 + 32) / (2**24 + 64)


@pytest.mark.ci
def test_regression_has_no_accuracy() -> None:
    model = tiny.make("llama", architecture="LlamaForSequenceClassification", num_labels=1)
    ids = tiny.ids(4, 6).astype(np.int32)
    mask, labels = np.ones_like(ids), np.array([0.5, -1, 2, 0], np.float32)
    logits = np.asarray(model(ids, mask).logits)[:, 0]
    batches = [
        {"input_ids": ids[part], "attention_mask": mask[part], "labels": labels[part]}
        for part in (slice(0, 3), slice(3, 4))
    ]
    actual = evaluate(model, batches, ClassificationLoss())
    assert actual.loss == pytest.approx(np.mean((logits - labels) ** 2), rel=1e-5)
    assert actual.metrics("values") == {"eval_loss": actual.loss, "eval_mse": actual.loss}
    assert actual.count == 4


def test_metrics_by_kind() -> None:
    actual = EvalResult(loss=1000.0, accuracy=0.25, count=8)
    assert actual.metrics() == {
        "eval_loss": 1000.0,
        "eval_perplexity": math.inf,
        "eval_accuracy": 0.25,
    }
    assert actual.metrics("labels", "test_") == {"test_loss": 1000.0, "test_accuracy": 0.25}


def test_nothing_to_count() -> None:
    model = tiny.cached("llama")
    with pytest.raises(InputError, match="no batch, or no label"):
        evaluate(model, [], CausalLoss())
    (batch,) = batched([], (2,), 4)
    with pytest.raises(InputError, match="no batch, or no label"):
        evaluate(model, [batch], CausalLoss())


PROMPTS = ["Hello", "a much longer text than the others are", "two words", "x", "An end."]


@pytest.fixture(scope="module")
def llama():
    return jaxllm.load(DATA / "models" / "s_llama_tok")


def alone(model, tokenizer, prompt: str, copies: int, **fields) -> str:
    """The answer to one prompt without pads, in a program of as many rows as the batches have."""
    ids = np.array([tokenizer.encode(prompt)] * copies)
    out = np.asarray(jaxllm.generate(model, ids, **fields).sequences)[0]
    new = out[1 if model.is_encoder_decoder else ids.shape[1] :].tolist()
    ends = model.config.eos_token_ids
    end = next((i for i, token in enumerate(new) if token in ends), len(new))
    return tokenizer.decode(new[:end], skip_special_tokens=True)


@pytest.mark.ci
@pytest.mark.parametrize("batch_size", [2, 8])
def test_answers_are_those_of_each_prompt_alone(llama, batch_size: int) -> None:
    model, tokenizer = llama
    expected = [alone(model, tokenizer, prompt, 2, max_new_tokens=6) for prompt in PROMPTS]
    assert len(set(expected)) > 2
    references = [expected[0], [expected[1], "other"], "no", "no", expected[4]]
    result = generate_and_score(
        model,
        tokenizer,
        list(zip(PROMPTS, references, strict=True)),
        metrics=["exact_match", "bleu"],
        batch_size=batch_size,
        samples=2,
        max_new_tokens=6,
    )
    assert result.predictions == expected
    assert result.scores["exact_match"] == 0.6
    assert set(result.scores) == {"exact_match", "bleu"}
    first, second = result.samples
    assert (first.prompt, first.reference, first.prediction) == ("Hello", expected[0], expected[0])
    assert (second.reference, second.prediction) == (expected[1], expected[1])


@pytest.mark.ci
def test_answers_end_with_their_stop_string(llama) -> None:
    """The pads after it are an ordinary token, which decoding would show."""
    model, tokenizer = llama
    fields = {"max_new_tokens": 10, "eos_token_id": None}
    pairs = [(prompt, "x") for prompt in PROMPTS]
    free = generate_and_score(model, tokenizer, pairs, **fields).predictions
    stop = free[0].strip()[3]
    pad = tokenizer.encode("z", add_special_tokens=False)[-1]
    assert tokenizer.decode([pad], skip_special_tokens=True) != ""
    fields |= {"stop_strings": [stop], "pad_token_id": pad}
    cut = generate_and_score(model, tokenizer, pairs, **fields).predictions
    assert cut[0] != free[0]
    for whole, text in zip(free, cut, strict=True):
        assert whole.startswith(text)
        assert text == whole or stop in text


@pytest.mark.slow
def test_samples_do_not_depend_on_the_batch(llama) -> None:
    model, tokenizer = llama
    fields = {"do_sample": True, "top_k": None, "max_new_tokens": 5, "batch_size": 2}
    pairs = [(tokenizer.encode(prompt), "x") for prompt in PROMPTS]
    five = generate_and_score(model, tokenizer, pairs, key=3, **fields).predictions
    # Sorted by length, the first three prompts have other neighbours without the last two.
    three = generate_and_score(model, tokenizer, pairs[:3], key=3, **fields).predictions
    assert three == five[:3]
    assert generate_and_score(model, tokenizer, pairs, key=4, **fields).predictions != five


@pytest.mark.ci
def test_an_encoder_decoder() -> None:
    tokenizer = small_tokenizer("t5.model")
    model = tiny.make("t5", vocab_size=len(tokenizer), eos_token_id=1, decoder_start_token_id=0)
    expected = [alone(model, tokenizer, prompt, 3, max_new_tokens=6) for prompt in PROMPTS]
    assert len(set(expected)) > 2
    pairs = list(zip(PROMPTS, expected, strict=True))
    result = generate_and_score(model, tokenizer, pairs, batch_size=3, max_new_tokens=6)
    assert result.predictions == expected
    assert result.scores == {"exact_match": 1.0}


@pytest.mark.ci
def test_what_cannot_be_scored(llama) -> None:
    model, tokenizer = llama
    cases: tuple[tuple[list, dict, str], ...] = (
        ([], {}, "no rows"),
        ([("a", "b")], {"metrics": ["bloo"]}, "no 'bloo'"),
        ([("a", "b")], {"batch_size": 0}, "batch_size"),
        ([("a", "b")], {"num_return_sequences": 2, "do_sample": True}, "one answer per prompt"),
        ([("a", "b")], {"max_new_token": 2}, "max_new_token"),
    )
    for rows, fields, message in cases:
        with pytest.raises(InputError, match=message):
            generate_and_score(model, tokenizer, rows, **fields)
