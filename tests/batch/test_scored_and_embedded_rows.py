"""Rows that are scored or embedded instead of generated from."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import tiny
from paths import DATA
from serving_tools import chat_tokenizer
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.batch import row_tasks
from jaxllm.batch.row_tasks import RowEmbedder, RowScorer
from jaxllm.batch.rows import RawRow
from jaxllm.common.errors import NonFiniteError
from jaxllm.tokenizers import LlamaTokenizer
from jaxllm.tokenizers.settings import TokenizerSettings

TOKENIZER = chat_tokenizer()


def answers(engine, rows):
    raw_rows = [RawRow(index, index, row) for index, row in enumerate(rows)]
    return sorted(engine.answer(raw_rows), key=lambda output: output.index)


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_scores_are_those_of_score(family):
    model = tiny.make(family, vocab_size=len(TOKENIZER))
    message = [{"role": "user", "content": "Hi"}]
    rows = [
        {"id": "a", "prompt": "Hello there", "completion": " my friend"},
        {"prompt": "Hel", "completion": "lo"},
        {"input_ids": [5, 6, 7], "completion": [8, 9]},
        {"messages": message, "completion": "Yes"},
        {"prompt": "x"},
        {"prompt": "x", "completion": ""},
        {"prompt": "x", "completion": "y", "temperature": 1.0},
        {"completion": "y"},
    ]
    engine = RowScorer(model, TOKENIZER, batch_size=3)
    outputs = answers(engine, rows)
    single = TOKENIZER.encode("Yes", add_special_tokens=False)
    pairs = [([5, 6, 7], [8, 9]), (TOKENIZER.apply_chat_template(message), single)]
    if family == "llama":
        # The whole text's tokens; they are all that the two share with the prompt's.
        for row in rows[1::-1]:
            full = TOKENIZER.encode(row["prompt"] + row["completion"])
            head = TOKENIZER.encode(row["prompt"])
            same = [a == b for a, b in zip(head, full, strict=False)]
            n = same.index(False) if False in same else len(same)
            pairs.insert(0, (full[:n], full[n:]))
    else:
        for row in rows[1::-1]:
            new = TOKENIZER.encode(row["completion"], add_special_tokens=False)
            pairs.insert(0, (TOKENIZER.encode(row["prompt"]), new))
    expected = jaxllm.score(model, *zip(*pairs, strict=True))
    for number, output in enumerate(outputs[:4]):
        line = output.to_dict()
        assert line.keys() == {"id", "log_likelihood", "is_greedy", "token_log_probs"}
        np.testing.assert_allclose(
            line["log_likelihood"], expected.log_likelihoods[number], rtol=1e-5
        )
        np.testing.assert_allclose(
            line["token_log_probs"], expected.token_log_probs[number], rtol=1e-4
        )
        assert line["is_greedy"] == bool(expected.is_greedy[number])
    assert outputs[0].id == "a"
    for output, why in zip(
        outputs[4:],
        ("completion: ", "not empty", "temperature: unknown; this task reads", "exactly one of"),
        strict=True,
    ):
        assert why in output.error
    assert (engine.counts.rows, engine.counts.errors.total()) == (8, 4)
    assert engine.counts.work == engine.counts.work_done > 0


def test_an_end_token_that_the_tokenizer_adds_is_not_scored():
    """A causal model continues the prompt, as in training; an encoder reads the end token."""
    settings = TokenizerSettings(options={"add_eos_token": True})
    ending = LlamaTokenizer((DATA / "tokenizers" / "llama.model").read_bytes(), settings, {})
    plain = small_tokenizer("llama.model")
    assert ending.encode("Hello")[-1] == ending.eos_token_id
    assert ending.encode_beginning("Hello") == plain.encode("Hello")
    rows = [
        {"prompt": "Hello there", "completion": " my friend"},
        {"prompt": "Hello there", "completion": [8, 9]},
    ]
    model = tiny.make("llama", vocab_size=len(plain))
    with_end = [x.to_dict() for x in answers(RowScorer(model, ending), rows)]
    assert with_end == [x.to_dict() for x in answers(RowScorer(model, plain), rows)]
    t5 = tiny.make("t5", vocab_size=len(plain))
    expected = jaxllm.score(t5, [ending.encode("Hello there")], [[8, 9]]).log_likelihoods[0]
    (output,) = answers(RowScorer(t5, ending), rows[1:])
    np.testing.assert_allclose(output.log_likelihood, expected, rtol=1e-5)


@pytest.mark.ci
def test_embeddings_are_pooled_states_of_length_1():
    model = tiny.make("t5", vocab_size=len(TOKENIZER))
    rows = ["Hello", {"id": "b", "prompt": "Hello there, all of you"}, {"input_ids": []}]
    outputs = answers(RowEmbedder(model, TOKENIZER, batch_size=2), rows)
    for text, output in zip(("Hello", "Hello there, all of you"), outputs[:2], strict=True):
        ids = np.array([TOKENIZER.encode(text)])
        states = np.asarray(model.encode(ids, np.ones(ids.shape, bool)).x, np.float32)[0]
        expected = states.mean(0) / np.linalg.norm(states.mean(0))
        np.testing.assert_allclose(output.embedding, expected, atol=1e-5)
    assert outputs[1].to_dict().keys() == {"id", "embedding"}
    assert "expected a list of token ids" in outputs[2].error


@pytest.mark.ci
@pytest.mark.parametrize("scale", [np.nan, 1e30])
def test_hidden_states_that_are_not_finite(scale):
    """With 1e30 each is finite, but not the square of their length."""
    model = tiny.make("llama", vocab_size=len(TOKENIZER))
    norms = jax.tree.map(lambda x: x * scale if x.ndim == 1 else x, model)
    (output,) = answers(RowEmbedder(norms, TOKENIZER), ["Hello"])
    assert output.error_kind == "NonFiniteError"
    server = row_tasks.Embedder(norms, model.config.context_length)
    with pytest.raises(NonFiniteError, match=r"input\[0\]: the model's hidden states are NaN"):
        server.embed([[5, 6]])


@pytest.mark.ci
def test_smaller_batches_are_embedded_when_memory_runs_out(monkeypatch):
    """Both by the engine of rows and by the embedder of a server."""
    model = tiny.make("llama", vocab_size=len(TOKENIZER))
    rows = ["Hello", "you", "Hi", "Bye", "there"]
    expected = [x.embedding for x in answers(RowEmbedder(model, TOKENIZER, batch_size=4), rows)]
    program, sizes = row_tasks._pooled, []

    def refuse(model, tokens, mask, **options):
        sizes.append(len(tokens))
        if len(tokens) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        return program(model, tokens, mask, **options)

    monkeypatch.setattr(row_tasks, "_pooled", refuse)
    engine = RowEmbedder(model, TOKENIZER, batch_size=4)
    outputs = answers(engine, rows)
    np.testing.assert_allclose([x.embedding for x in outputs], expected, atol=1e-5)
    assert sizes == [4, 2, 2, 2]
    assert engine.counts.halvings == 1
    texts = [TOKENIZER.encode(row) for row in rows]
    server = row_tasks.Embedder(model, model.config.context_length, rows=4)
    np.testing.assert_allclose(server.embed(texts), expected, atol=1e-5)
    assert sizes == [4, 2, 2, 2, 4, 2, 2, 2, 2]
