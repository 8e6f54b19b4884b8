"""Rows that are scored or embedded instead of generated from."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from paths import DATA
from serving_tools import chat_tokenizer
from small_tokenizers import DATA as SMALL
from small_tokenizers import small_tokenizer

import jaxllm
from jaxllm.batch import row_tasks
from jaxllm.batch.row_tasks import RowEmbedder, RowScorer
from jaxllm.batch.rows import RawRow
from jaxllm.cli.main import main
from jaxllm.common.errors import InputError, NonFiniteError, UnsupportedError
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
        ("completion: ", "must not be empty", "temperature: unknown; this task", "exactly one of"),
        strict=True,
    ):
        assert why in output.error
    assert (engine.counts.rows, engine.counts.errors.total()) == (8, 4)
    assert engine.counts.work == engine.counts.work_done > 0


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_score_takes_texts_with_a_tokenizer(family):
    model = tiny.make(family, vocab_size=len(TOKENIZER))
    prompts, completions = ["Hello there", "Hel", "Hi"], [" my friend", "lo", "Hi"]
    if family == "llama":
        prompts[2] = ""  # the BOS token
    else:
        with pytest.raises(InputError, match=r"prompts\[2\]: has no text"):
            jaxllm.score(model, [*prompts[:2], " "], completions, TOKENIZER)
    scores = jaxllm.score(model, prompts, completions, TOKENIZER)
    rows = [{"prompt": p, "completion": c} for p, c in zip(prompts, completions, strict=True)]
    expected = [output.log_likelihood for output in answers(RowScorer(model, TOKENIZER), rows)]
    np.testing.assert_allclose(scores.log_likelihoods, expected, rtol=1e-5)
    assert len({*expected}) == 3
    for wrong, message in [
        ((["a"], ["b", "c"]), "completions: 2 for 1 prompts"),
        ((["a"], [5]), r"completions\[0\]: expected a text, since there is a tokenizer"),
        (([[5]], ["b"]), r"prompts\[0\]: expected a text, since there is a tokenizer"),
        (("a", ["b"]), "prompts: expected a list"),
        ((["a"], [""]), r"completions\[0\]: (empty|has no text)"),
    ]:
        with pytest.raises(InputError, match=message):
            jaxllm.score(model, *wrong, TOKENIZER)


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


def states_of(model, ids):
    return np.asarray(model.encode(np.array([ids]), np.ones((1, len(ids)), bool)).x, np.float32)[0]


@pytest.mark.parametrize(
    ("stated", "asked", "pooled"),
    [
        (None, "auto", "mean"),
        ("none", "auto", "mean"),
        ("mean", "auto", "mean"),
        ("last", "auto", "last"),
        ("cls", "auto", "cls"),
        ("last", "mean", "mean"),
        ("rank", "last", "last"),
    ],
)
def test_embed_pools_as_asked_or_as_the_checkpoint_states(tmp_path, stated, asked, pooled):
    jaxllm.save_hf(tmp_path, tiny.make("t5", vocab_size=len(TOKENIZER)))
    shutil.copyfile(SMALL / "llama.model", tmp_path / "tokenizer.model")
    class_name = {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(class_name))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"pooling_type": stated}))
    texts = ["Hello", "Hello there, all of you", "Hi"]
    model, tokenizer = jaxllm.load(tmp_path)
    vectors = jaxllm.embed(model, texts, tokenizer, pooling=asked, batch_size=2)
    assert (vectors.shape, vectors.dtype) == ((3, 32), np.float32)
    for text, vector in zip(texts, vectors, strict=True):
        states = states_of(model, tokenizer.encode(text))
        expected = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooled]
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=1e-5)
    # The command, the server's embedder, and the call with a path give the same.
    again = jaxllm.embed(tmp_path, texts, pooling=asked)
    np.testing.assert_allclose(again, vectors, atol=1e-6)
    server = row_tasks.Embedder(model, 64, asked)
    for compile_program in server.programs().values():
        compile_program()
    ids = [tokenizer.encode(text) for text in texts]
    np.testing.assert_allclose(server.embed(ids), vectors, atol=1e-6)
    lines = [json.dumps({"prompt": text}) for text in texts]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    words = [
        "--model",
        tmp_path,
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out.jsonl",
    ]
    flag = ["--embed"] if asked == "auto" else ["--embed", asked]
    assert main(["generate", *map(str, words), *flag, "--no-compile-cache"]) == 0
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([row["embedding"] for row in written], vectors, atol=1e-6)


def test_embed_takes_what_rows_take_and_names_what_is_wrong(capsys):
    model = tiny.make("llama", vocab_size=len(TOKENIZER))
    ids, message = TOKENIZER.encode("Hello"), [{"role": "user", "content": "Hi"}]
    rows = ["Hello", ids, np.array(ids), {"prompt": "Hello"}]
    vectors = jaxllm.embed(model, rows, TOKENIZER)
    np.testing.assert_array_equal(vectors, np.stack([vectors[0]] * 4))
    chats = jaxllm.embed(model, [message, {"messages": message}], TOKENIZER)
    np.testing.assert_array_equal(chats, jaxllm.embed(model, ["Hi"] * 2, TOKENIZER, chat=True))
    assert jaxllm.embed(model, [], TOKENIZER).shape == (0, 32)
    for texts, tokenizer, message in [
        (["a", "a" * 200], TOKENIZER, r"texts\[1\]: prompt: has \d+ tokens; expected 1 to 64"),
        (["a", 5], TOKENIZER, r"texts\[1\]: .*expected a list of token ids"),
        (["a"], None, r"texts\[0\]: prompt: this model has no tokenizer"),
        ("a", TOKENIZER, "texts: expected a list of texts, found a"),
    ]:
        with pytest.raises(InputError, match=message):
            jaxllm.embed(model, texts, tokenizer)
    with pytest.raises(UnsupportedError, match="pooling: found 'max'; give mean, last or cls"):
        jaxllm.embed(model, ["a"], TOKENIZER, pooling="max")
    capsys.readouterr()
    jaxllm.set_progress(True, least_seconds=0)
    try:
        jaxllm.embed(model, ["a", "b"], TOKENIZER)
    finally:
        jaxllm.set_progress(False)
    assert "embedding: " in capsys.readouterr().err


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

    class Refusing:
        """A program that lacks memory for more than two rows, also when it is compiled ahead."""

        def __init__(self, program):
            self.program = program

        def __call__(self, model, tokens, mask, **options):
            sizes.append(len(tokens))
            if len(tokens) > 2:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
            return self.program(model, tokens, mask, **options)

        def lower(self, *arguments, **options):
            return Refusing(self.program.lower(*arguments, **options))

        def compile(self):
            return Refusing(self.program.compile())

    monkeypatch.setattr(row_tasks, "_pooled", Refusing(program))
    engine = RowEmbedder(model, TOKENIZER, batch_size=4)
    outputs = answers(engine, rows)
    np.testing.assert_allclose([x.embedding for x in outputs], expected, atol=1e-5)
    assert sizes == [4, 2, 2, 2]
    assert engine.counts.halvings == 1
    texts = [TOKENIZER.encode(row) for row in rows]
    server = row_tasks.Embedder(model, model.config.context_length, rows=4)
    np.testing.assert_allclose(server.embed(texts), expected, atol=1e-5)
    assert sizes == [4, 2, 2, 2, 4, 2, 2, 2, 2]
