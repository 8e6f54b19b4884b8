"""Grammars: every vocabulary, random walks, rows and beams, errors, and no recompilation."""

from __future__ import annotations

import gc
import json
import re
import sys
import weakref

import jax
import numpy as np
import pytest
from compiling import program_count
from paths import DATA

import jaxllm
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import InputError, MissingExtraError
from jaxllm.generation.processors import grammar
from jaxllm.generation.processors.host import reraise_failures
from jaxllm.tokenizers import load_tokenizer, tokenizer_from_gguf

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["tea", "Kaffee ☕", None]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        "open": {"type": "boolean"},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}


def is_valid(value) -> bool:
    sizes = value["sizes"]
    return (
        list(value)[:3] == ["name", "kind", "sizes"]
        and set(value) <= set(SCHEMA["properties"])
        and isinstance(value["name"], str)
        and len(value["name"]) <= 6
        and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
        and 1 <= len(sizes) <= 3
        and all(type(size) is int for size in sizes)
        and isinstance(value.get("open", True), bool)
    )


def sentencepiece(tmp_path_factory, name, file):
    folder = tmp_path_factory.mktemp(name)
    (folder / file).write_bytes((DATA / "tokenizers" / f"{name}.model").read_bytes())
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, smollm2_gguf):
    return {
        "gguf": tokenizer_from_gguf(GGUFFile(smollm2_gguf).metadata),
        "tokenizer.json": load_tokenizer(DATA / "conformance" / "models" / "s_llama_tok"),
        "llama": sentencepiece(tmp_path_factory, "llama", "tokenizer.model"),
        "t5": sentencepiece(tmp_path_factory, "t5", "spiece.model"),
    }


@pytest.fixture(scope="module")
def model():
    return jaxllm.load(DATA / "conformance" / "models" / "s_llama_tok")[0]


@jax.jit
def run(processor, ids, scores, cur_len, kwargs):
    return processor(ids, scores, cur_len, **kwargs)


def walk(processor, tokenizer, seed: int, steps: int = 250) -> list[int]:
    """Random tokens among the allowed ones, up to the end token; the prompt is one token."""
    rng = np.random.default_rng(seed)
    size = len(tokenizer) + 3  # a model may have more scores than the tokenizer has tokens
    ids = np.zeros((1, steps), np.int32)
    for length in range(1, steps):
        scores = rng.normal(size=(1, size)).astype(np.float32)
        allowed = run(processor, ids, scores, length, {"prompt_len": 1})
        token = int(np.argmax(allowed))
        assert np.isfinite(allowed[0, token])
        if token == tokenizer.eos_token_id:
            return ids[0, 1:length].tolist()
        ids[0, length] = token
    raise AssertionError(f"no end: {tokenizer.decode(ids[0, 1:])}")


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["gguf", "llama"])
def test_random_json_is_valid(tokenizers, kind):
    tokenizer = tokenizers[kind]
    processor = grammar.json_schema(SCHEMA, tokenizer)
    texts = [tokenizer.decode(walk(processor, tokenizer, seed)) for seed in range(4)]
    assert len(set(texts)) == 4
    for text in texts:
        assert is_valid(json.loads(text)), text
        assert " " not in text.replace("Kaffee ☕", "").replace(json.loads(text)["name"], "")


@pytest.mark.ci
@pytest.mark.parametrize("kind", ["gguf", "llama", "t5", "tokenizer.json"])
def test_random_text_of_a_regex(tokenizers, kind):
    tokenizer, pattern = tokenizers[kind], "(ab|cd)[a-f]{2,5}x?"
    processor = grammar.regex(pattern, tokenizer)
    texts = {tokenizer.decode(walk(processor, tokenizer, seed)) for seed in range(5)}
    assert len(texts) > 1
    assert all(re.fullmatch(pattern, text) for text in texts), texts


def test_the_space_of_a_first_word(tokenizers):
    tokenizer = tokenizers["t5"]
    processor = grammar.regex(" ?[a-z]{3}", tokenizer)
    walks = [walk(processor, tokenizer, seed) for seed in range(20)]
    assert any(tokenizer.id_to_token(ids[0]).startswith("▁") for ids in walks)
    assert all(re.fullmatch("[a-z]{3}", tokenizer.decode(ids).strip()) for ids in walks)


@pytest.mark.ci
def test_lark_counts_what_a_regex_cannot(tokenizers):
    tokenizer = tokenizers["gguf"]
    processor = grammar.lark('start: "(" start ")" | "."', tokenizer)
    for seed in range(5):
        text = tokenizer.decode(walk(processor, tokenizer, seed))
        depth = text.count("(")
        assert text == "(" * depth + "." + ")" * depth


def bits(processor, ids, length, vocab_size, **kwargs):
    scores = np.zeros((len(ids), vocab_size), np.float32)
    kept = run(processor, np.array(ids), scores, length, {"prompt_len": 2, **kwargs})
    return [np.flatnonzero(row == 0).tolist() for row in np.asarray(kept)]


def one_token(tokenizer, text):
    (token,) = tokenizer.encode_user(text)
    return token


@pytest.mark.ci
def test_end_token_where_and_only_where_the_text_is_complete(tokenizers):
    tokenizer = tokenizers["gguf"]
    x, y, end = one_token(tokenizer, "x"), one_token(tokenizer, "y"), tokenizer.eos_token_id
    size = len(tokenizer)
    processor = grammar.regex("xy?", tokenizer, eos_token_id=[end, 5])
    xy = one_token(tokenizer, "xy")
    assert bits(processor, [[9, 9, 0]], 2, size) == [sorted([x, xy])]
    assert bits(processor, [[9, 9, x]], 3, size) == [sorted([5, end, y])]
    assert bits(processor, [[9, 9, xy]], 3, size) == [sorted([5, end])]
    # After the end, and off the grammar, there is only the end.
    for text in ([x, end], [5, 0], [y, y], [size - 1, x]):
        assert bits(processor, [[9, 9, *text]], 4, size) == [sorted([5, end])]
    # Padding, wherever it is, is no text.
    mask = np.array([[1, 0, 0, 1, 0]], bool)
    assert bits(processor, [[9, 0, 0, x, 0]], 5, size, mask=mask) == [sorted([5, end, y])]


@pytest.mark.ci
def test_rows_in_any_order_and_again(tokenizers):
    """Beams change places, streams begin anew: the answer depends on the text alone."""
    tokenizer = tokenizers["gguf"]
    processor = grammar.json_schema({"type": "array", "items": {"enum": [1, 22]}}, tokenizer)
    texts = ["[1,1", "[22", "[1,22]", "[", "[1,", "[22,1,1"]
    rows = [[9, 9, *tokenizer.encode_user(text)] for text in texts]
    single = {}
    for text, row in zip(texts, rows, strict=True):
        fresh = grammar.json_schema({"type": "array", "items": {"enum": [1, 22]}}, tokenizer)
        single[text] = bits(fresh, [row + [0] * (10 - len(row))], len(row), len(tokenizer))[0]
    for order in ([5, 0, 3, 2, 1, 4], [0, 1, 2, 3, 4, 5], [2, 2, 0, 5, 0, 3]):
        padded = [rows[i] + [0] * (10 - len(rows[i])) for i in order]
        lengths = np.array([len(rows[i]) for i in order])
        actual = bits(processor, padded, lengths, len(tokenizer))
        assert actual == [single[texts[i]] for i in order]


@pytest.mark.ci
def test_the_cache_is_bounded_and_changes_nothing(tokenizers, monkeypatch):
    tokenizer = tokenizers["gguf"]
    texts = [walk(grammar.json_schema(SCHEMA, tokenizer), tokenizer, seed) for seed in (1, 2)]
    monkeypatch.setattr(grammar, "_STATES", 3)
    processor = grammar.json_schema(SCHEMA, tokenizer)
    assert [walk(processor, tokenizer, seed) for seed in (1, 2)] == texts


def test_a_grammar_for_each_prompt(tokenizers):
    tokenizer = tokenizers["gguf"]
    x, y = one_token(tokenizer, "x"), one_token(tokenizer, "y")
    processor = grammar.regex(["x", "y"], tokenizer)
    actual = bits(processor, [[0, 0]] * 4, 2, len(tokenizer))  # two rows for each prompt
    assert actual == [[x], [x], [y], [y]]
    with pytest.raises(InputError, match="2 grammars for 3 rows"), reraise_failures():
        bits(processor, [[0, 0]] * 3, 2, len(tokenizer))


@pytest.mark.ci
def test_generate_and_stream(model, tokenizers):
    tokenizer, pattern = tokenizers["tokenizer.json"], "(ab|c){4,9}d"
    ids = np.array([[5, 6, 7], [0, 8, 9]])
    mask = np.array([[1, 1, 1], [0, 1, 1]])
    settings = {
        "max_new_tokens": 24,
        "logits_processor": [grammar.regex(pattern, tokenizer, prompt_len=3)],
        "eos_token_id": tokenizer.eos_token_id,
        **{"do_sample": True, "num_return_sequences": 2, "key": 1},
    }
    out = jaxllm.generate(model, ids, mask, **settings).sequences
    texts = [tokenizer.decode(row[3:], skip_special_tokens=True) for row in out]
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    pieces = list(jaxllm.stream(model, ids, mask, chunk_size=2, **settings))
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), out[:, 3:])


@pytest.mark.ci
def test_inside_the_callers_jit(model, tokenizers):
    tokenizer = tokenizers["tokenizer.json"]

    @jax.jit
    def start(ids):
        processors = [grammar.regex("abcab", tokenizer, prompt_len=3)]
        return jaxllm.generate(
            model, ids, ids >= 0, max_new_tokens=8, logits_processor=processors
        ).sequences

    compiled = start.lower(np.array([[5, 6, 7]])).compile()
    gc.collect()
    text = tokenizer.decode(compiled(np.array([[5, 6, 7]]))[0, 3:], skip_special_tokens=True)
    assert text == "abcab"


def test_another_grammar_compiles_nothing(tokenizers):
    tokenizer = tokenizers["tokenizer.json"]
    run.clear_cache()
    for pattern in ("a+", "b", "cc"):
        bits(grammar.regex(pattern, tokenizer), [[0, 0]], 2, len(tokenizer))
    assert program_count(run) == 1


@pytest.mark.ci
def test_a_tokenizer_is_not_kept(tmp_path_factory):
    tokenizer = sentencepiece(tmp_path_factory, "t5", "spiece.model")
    assert tokenizer is not None
    processor, gone = grammar.regex("a", tokenizer), weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is not None  # the processor needs it
    del processor
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    ("make", "source", "message"),
    [
        (grammar.json_schema, {"type": "objec"}, "json_schema: .*objec"),
        (grammar.json_schema, '{"type":', "json_schema: EOF while parsing"),
        (grammar.json_schema, {"type": {1, 2}}, "not JSON serializable"),
        (grammar.json_schema, {"$ref": "https://example.org/a"}, "not present in a registry"),
        (grammar.json_schema, [], "empty"),
        (grammar.regex, "(", "unclosed group"),
        (grammar.regex, "(?=a)", "look-around"),
        (grammar.regex, 3, "regex: "),
        (grammar.lark, "start: foo", 'unknown name: "foo"'),
    ],
)
def test_a_wrong_grammar_is_named(tokenizers, make, source, message):
    with pytest.raises(InputError, match=message):
        make(source, tokenizers["t5"])


def test_the_tokenizer_is_checked():
    for make in (grammar.json_schema, grammar.regex, grammar.lark):
        with pytest.raises(InputError, match="tokenizer: expected a tokenizer of jaxllm, found 3"):
            make("a", 3)


def test_end_tokens_are_checked(tokenizers):
    tokenizer = tokenizers["t5"]
    for ends in ([], [len(tokenizer)], "x"):
        with pytest.raises(InputError, match="`eos_token_id`"):
            grammar.regex("a", tokenizer, eos_token_id=ends)
    processor = grammar.regex("a", tokenizer, eos_token_id=len(tokenizer) - 1)
    with pytest.raises(InputError, match="another model's"), reraise_failures():
        bits(processor, [[0, 0]], 2, len(tokenizer) - 1)
    with pytest.raises(InputError, match="needs `prompt_len`"):
        processor(np.zeros((1, 3), np.int32), np.zeros((1, 4)), 3)


def test_what_a_vocabulary_cannot_write_is_named(tokenizers):
    tokenizer = tokenizers["t5"]  # has no braces, as the real one
    with pytest.raises(InputError, match=r"the tokenizer has no tokens for '{"):
        grammar.json_schema(SCHEMA, tokenizer)
    with pytest.raises(InputError, match="no token of the tokenizer continues the text"):
        grammar.regex("[{}]", tokenizer)
    a = tokenizer.token_to_id("a")
    processor = grammar.regex(r"[ab]{2}\}", tokenizer)
    assert a in bits(processor, [[9, 9, a]], 3, len(tokenizer))[0]
    with pytest.raises(InputError, match="no tokens for '}'"), reraise_failures():
        bits(processor, [[9, 9, a, a]], 4, len(tokenizer))


def test_without_llguidance(tokenizers, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(MissingExtraError, match=re.escape("pip install -e '.[grammar]'")):
        grammar.regex("a", tokenizers["t5"])


@pytest.mark.slow
def test_smollm2_answers_in_json(smollm2_gguf):
    model, tokenizer = jaxllm.load(smollm2_gguf)
    assert tokenizer is not None
    chat = [{"role": "user", "content": "Describe Paris as JSON."}]
    ids = np.array([tokenizer.apply_chat_template(chat)])
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "country": {"enum": ["France", "Spain"]}},
        "required": ["city", "country"],
        "additionalProperties": False,
    }
    processors = [grammar.json_schema(schema, tokenizer, prompt_len=ids.shape[1])]
    out = jaxllm.generate(model, ids, max_new_tokens=60, logits_processor=processors)
    answer = tokenizer.decode(out.sequences[0, ids.shape[1] :], skip_special_tokens=True)
    value = json.loads(answer)
    assert value["country"] == "France"
    assert "Paris" in value["city"]
