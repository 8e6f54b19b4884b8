"""Calls as transformers' tokenizers take them, against what 5.23 returned (call_cases.json)."""

from __future__ import annotations

import json
import runpy
import zlib

import jax
import numpy as np
import paths
import pytest

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.tokenizers import BatchEncoding, Tokenizer, load_tokenizer

DATA = paths.DATA / "tokenizers"
CASES = json.loads((DATA / "call_cases.json").read_text(encoding="utf-8"))
TEXTS = runpy.run_path(str(DATA / "texts.py"))
BATCH, SECOND = CASES["batch"], CASES["second"]


def with_pad_token(tokenizer: Tokenizer) -> Tokenizer:
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


@pytest.fixture(scope="module", params=CASES["tokenizers"])
def case(request, load_fast):
    return with_pad_token(load_fast(request.param)), CASES["tokenizers"][request.param]


@pytest.fixture(scope="module")
def t5(load_fast) -> Tokenizer:
    return load_fast("t5")


def test_lists_match_transformers(case):
    tokenizer, expected = case
    defaults = {"padding": False, "return_tensors": None}
    assert tokenizer("Nice to meet you.", **defaults) == expected["single"]
    for options, result in expected["calls"]:
        assert tokenizer(BATCH, **{**defaults, **options}) == result, options
    for options, result in expected["pairs"]:
        assert tokenizer(BATCH, SECOND, **{**defaults, **options}) == result, options


def test_truncation_side_of_the_file(load_fast, case):
    _, expected = case
    name = next(n for n, each in CASES["tokenizers"].items() if each is expected)
    left = load_fast(name, truncation_side="left")
    options = {"truncation": True, "max_length": 9, "padding": False, "return_tensors": None}
    assert left(BATCH, SECOND, **options) == expected["left"]


def test_tokens_match_transformers(case):
    tokenizer, expected = case
    vocabulary = tokenizer.get_vocab()
    for text, tokens in expected["tokens"]:
        assert tokenizer.tokenize(text) == tokens, text
        if vocabulary.keys() >= set(tokens):  # not unknown characters
            ids = tokenizer.convert_tokens_to_ids(tokens)
            assert ids == tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.convert_ids_to_tokens(ids) == tokens
            whole = tokenizer.tokenize(text, add_special_tokens=True)
            assert tokenizer.convert_tokens_to_ids(whole) == tokenizer.encode(text)
    names = ["nowhere to be found", tokenizer.eos_token]
    assert tokenizer.convert_tokens_to_ids(names) == expected["unknown"]
    assert [tokenizer.convert_tokens_to_ids(name) for name in names] == expected["unknown"]
    assert zlib.crc32(json.dumps(sorted(vocabulary.items())).encode()) == expected["vocabulary"]
    assert len(vocabulary) == len(tokenizer)


def test_special_tokens_match_transformers(case):
    tokenizer, expected = case
    assert tokenizer.pad_token_id == expected["pad_token_id"]
    assert tokenizer.special_tokens_map == expected["special_tokens_map"]
    assert tokenizer.all_special_tokens == expected["all_special_tokens"]
    assert tokenizer.all_special_ids == expected["all_special_ids"]
    assert tokenizer.model_max_length == expected["model_max_length"]
    added = [tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)]
    assert added == expected["added"]


def test_random_texts_match_transformers(case):
    tokenizer, expected = case
    texts = TEXTS["random_texts"](1000, seed=0)
    for number, (encoded, decoded) in enumerate(expected["random"]):
        block = texts[number * 20 : number * 20 + 20]
        ids = [tokenizer.encode(text) for text in block]
        assert zlib.crc32(json.dumps(ids).encode()) == encoded, block
        back = json.dumps([tokenizer.decode(row) for row in ids]).encode()
        assert zlib.crc32(back) == decoded, block


def test_batch_decode_matches_transformers(case):
    tokenizer, expected = case
    rows = [tokenizer.encode(text) for text in TEXTS["TEXTS"][::3]]
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == expected["batch_decoded"]
    array = np.array([rows[5][:1] * 3, rows[5][:1] * 3])
    assert tokenizer.batch_decode(array) == [tokenizer.decode(array[0])] * 2


@pytest.mark.parametrize(("return_tensors", "array"), [("np", np.ndarray), ("jax", jax.Array)])
def test_arrays_hold_the_lists(case, return_tensors, array):
    tokenizer, expected = case
    options, _ = expected["calls"][3]
    texts = [text for text in BATCH if text]
    lists = tokenizer(texts, return_tensors=None, **options)
    batch = tokenizer(texts, return_tensors=return_tensors, **options)
    assert isinstance(batch, BatchEncoding)
    assert isinstance(batch.input_ids, array)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int32
    assert {name: value.tolist() for name, value in batch.items()} == dict(lists)


def test_encodings_are_mappings(t5):
    batch = t5(["a", "b c"])
    assert list(batch) == list(batch.keys()) == ["input_ids", "attention_mask"]
    assert batch["input_ids"] is batch.input_ids
    assert (lambda **arguments: set(arguments))(**batch) == {"input_ids", "attention_mask"}
    assert "labels" not in batch
    with pytest.raises(KeyError):
        batch["labels"]


def test_named_tokens_can_be_changed(load_fast, tmp_path):
    tokenizer = load_fast("llama2")
    assert (tokenizer.pad_token, tokenizer.sep_token_id) == (None, None)
    tokenizer.pad_token = tokenizer.eos_token
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("</s>", 2)
    assert tokenizer(["a", "a b c"], padding_side="right").input_ids[0, -1] == 2
    files = tokenizer.save_pretrained(tmp_path)
    assert set(files) == {str(path) for path in tmp_path.iterdir()}
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.pad_token == "</s>"
    again.pad_token_id = 0
    assert again.pad_token == "<unk>"
    again.pad_token = None
    assert again.pad_token_id is None
    with pytest.raises(InputError, match=r"pad_token: '\[PAD\]' is not a token"):
        again.pad_token = "[PAD]"
    with pytest.raises(InputError, match="pad_token_id: no token has the id 100000"):
        again.pad_token_id = 100_000


def test_model_max_length_is_the_default(load_fast):
    tokenizer = load_fast("t5", model_max_length=6)
    batch = tokenizer(["a b c d e f g h", "a"], padding="max_length", truncation=True)
    assert batch.attention_mask.sum(1).tolist() == [6, len(tokenizer.encode("a"))]
    assert batch.input_ids[0, -1] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"padding": "longes"}, InputError, "padding is 'longes'"),
        ({"truncation": "first"}, InputError, "truncation is 'first'"),
        ({"truncation": True}, InputError, "truncation needs max_length"),
        ({"padding": "max_length"}, InputError, "padding='max_length' needs max_length"),
        ({"max_length": "9"}, InputError, "max_length is '9'"),
        ({"padding": False}, InputError, "different lengths"),
        ({"return_tensors": "pt"}, UnsupportedError, "give 'np' or 'jax'"),
        ({"return_tensors": 3}, InputError, "return_tensors is 3"),
        ({"bucket": 8, "pad_to_multiple_of": 8}, InputError, "not both"),
        ({"pad_to_multiple_of": -1}, InputError, "bucket is -1"),
        ({"return_offsets_mapping": True}, UnsupportedError, r"\['return_offsets_mapping'\]"),
        ({"text_pair": ["a"]}, InputError, "1 second texts for 2 texts"),
        ({"text_pair": "ab"}, InputError, "1 second texts for 2 texts"),
        (
            {"text_pair": ["a", "b"], "truncation": "only_first", "max_length": 3},
            InputError,
            "'only_first' would have to remove",
        ),
        ({"truncation": True, "max_length": 0}, InputError, "leaves no room"),
    ],
)
def test_refused_options(t5, options, error, message):
    with pytest.raises(error, match=message):
        t5(["a", "a much longer text"], **options)
