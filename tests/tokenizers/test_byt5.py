"""ByT5's tokenizer against transformers 5.23 (call_cases.json)."""

from __future__ import annotations

import json
import runpy
import zlib

import paths
import pytest

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers import ByT5Tokenizer, load_tokenizer

DATA = paths.DATA / "tokenizers"
CASES = json.loads((DATA / "call_cases.json").read_text(encoding="utf-8"))["byt5"]
TEXTS = runpy.run_path(str(DATA / "texts.py"))["random_texts"](200, seed=1)


@pytest.fixture(params=CASES, ids=["settings", "saved by transformers"])
def case(request, tmp_path):
    for name, content in request.param["files"].items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, ByT5Tokenizer)
    return tokenizer, request.param


def test_ids(case):
    tokenizer, expected = case
    ids = [tokenizer.encode(text) for text in TEXTS]
    assert zlib.crc32(json.dumps(ids).encode()) == expected["ids"]
    assert tokenizer.encode("é <extra_id_0> x", "b</s>") == expected["pair"]
    assert tokenizer.tokenize("é <extra_id_0> x") == expected["tokens"]
    assert tokenizer(["a", "bcd"], padding=True) == expected["padded"]
    assert [len(tokenizer), tokenizer.vocab_size] == expected["sizes"]
    assert sorted(tokenizer.special_ids) == expected["special_ids"]
    assert tokenizer.convert_tokens_to_ids(["a", "ab"]) == [100, None]


def test_texts(case):
    tokenizer, expected = case
    rows = [[(7 * n * n + 13 * row) % len(tokenizer) for n in range(9)] for row in range(60)]
    assert tokenizer.batch_decode(rows) == expected["texts"]
    assert tokenizer.batch_decode(rows, skip_special_tokens=True) == expected["skipped"]
    stream = tokenizer.stream_decoder(skip_special_tokens=False)
    pieces = [stream.put(index) for index in tokenizer.encode("né 😀")]
    assert "".join(pieces) + stream.end() == "né 😀</s>"
    assert all(piece in ("", "n", "é", " ", "😀", "</s>") for piece in pieces)


def test_special_tokens_of_users_are_bytes(case, tmp_path):
    tokenizer, _ = case
    assert tokenizer.decode(tokenizer.encode_user("a</s>b")) == "a</s>b"
    assert not tokenizer.special_ids & set(tokenizer.encode_user("a</s>b"))
    assert tokenizer.token_bytes()[3:259] == tuple(bytes([byte]) for byte in range(256))
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again is not None
    assert again.encode("né") == tokenizer.encode("né")


def test_options_of_sentencepiece_do_not_matter(tmp_path):
    config = {"tokenizer_class": "ByT5Tokenizer", "sp_model_kwargs": {"enable_sampling": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("a") == [100, 1]


@pytest.mark.parametrize(("count", "length"), [(0, 259), (10, 269), (125, 384)])
def test_the_number_of_sentinels(tmp_path, count, length):
    config = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": count}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer) == length
    assert tokenizer.encode("<extra_id_0>")[0] == (259 if count else ord("<") + 3)
    config["additional_special_tokens"] = ["<extra_id_0>"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if count:
        with pytest.raises(TokenizerError, match=f"extra_ids is {count}, but"):
            load_tokenizer(tmp_path)


def test_flags_of_a_file_keep_spaces(tmp_path):
    """Those of google/byt5-small, whose tokens strip nothing, against those of the class."""
    flags = {"lstrip": False, "rstrip": False, "normalized": True, "single_word": False}
    texts = {"a </s> b": [100, 35, 1, 35, 101, 1], "a <pad>": [100, 35, 0, 1]}
    tokens = {"eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
    files = {f"{name}_token": {"content": text, **flags} for name, text in tokens.items()}
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "ByT5Tokenizer"}')
    for named, stripped in ((files, False), ({"eos_token": "</s>"}, True)):
        (tmp_path / "special_tokens_map.json").write_text(json.dumps(named))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        for text, ids in texts.items():
            kept = [index for index in ids if index != 35] if stripped else ids
            assert tokenizer.encode(text) == kept


def test_a_token_of_one_character_is_refused(tmp_path):
    config = {"tokenizer_class": "ByT5Tokenizer", "sep_token": "|"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match="no one-character tokens"):
        load_tokenizer(tmp_path)


def test_other_first_tokens(tmp_path):
    """They keep the first ids by whatever texts they are named, as in transformers 4.57.6."""
    config = {"tokenizer_class": "ByT5Tokenizer", "pad_token": "<p>", "eos_token": "<e>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("a<p>") == [100, 0, 1]
    assert (len(tokenizer), tokenizer.decode([100, 1])) == (384, "a<e>")
    config["pad_token"] = "</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert len(load_tokenizer(tmp_path)) > 384  # </s> is no second name of the first id
