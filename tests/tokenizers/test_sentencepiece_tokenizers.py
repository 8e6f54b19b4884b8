"""Sentencepiece tokenizers: parity with transformers 4.57's slow tokenizers in many settings."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import paths
import pytest
import sentencepiece

from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import LlamaTokenizer, T5Tokenizer, Tokenizer, load_tokenizer
from jaxllm.tokenizers.sentencepiece_model import BPE, UNIGRAM, SentencePieceModel, write_model
from jaxllm.tokenizers.settings import TokenizerSettings

DATA = paths.DATA / "tokenizers"
CASES = json.loads((DATA / "sentencepiece_cases.json").read_text(encoding="utf-8"))
NAMES = [(family, name) for family in ("llama", "t5") for name in CASES[family]]
MODEL_FILES = {"llama": "tokenizer.model", "t5": "spiece.model"}


def load(folder: Path, family: str, files: dict) -> Tokenizer:
    (folder / MODEL_FILES[family]).write_bytes((DATA / f"{family}.model").read_bytes())
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.fixture(params=NAMES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, tmp_path):
    family, name = request.param
    expected = CASES[family][name]
    return load(tmp_path, family, expected["files"]), expected


def test_ids(case):
    tokenizer, expected = case
    ids = {text: tokenizer.encode(text) for text in expected["ids"]}
    assert ids == expected["ids"]
    for first, second, pair in expected["pairs"]:
        assert tokenizer.encode(first, second) == pair


def test_sizes_and_named_tokens(case):
    tokenizer, expected = case
    assert len(tokenizer) == expected["length"]
    assert tokenizer.vocab_size == expected["vocab_size"]
    assert sorted(tokenizer.special_ids) == expected["special_ids"]
    for name, index in expected["named"].items():
        assert getattr(tokenizer, name) == index, name


def test_decode(case):
    tokenizer, expected = case
    for ids, shown, skipped in expected["decoded"]:
        assert tokenizer.decode(ids) == shown, ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped, ids


def test_streamed_pieces_concatenate_to_decoded_text(case):
    tokenizer, expected = case
    for ids, shown, skipped in expected["decoded"]:
        for skip, text in ((False, shown), (True, skipped)):
            stream = tokenizer.stream_decoder(skip_special_tokens=skip)
            pieces = [stream.put(index) for index in ids]
            assert "".join(pieces) + stream.end() == text, ids


def test_saved_files_are_the_originals(case, tmp_path):
    tokenizer, expected = case
    tokenizer.save(tmp_path / "saved")
    saved = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    assert saved == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    again = load_tokenizer(tmp_path / "saved")
    assert again is not None
    assert {text: again.encode(text) for text in expected["ids"]} == expected["ids"]


def test_the_rules_of_llama(tmp_path):
    tokenizer = load(tmp_path, "llama", {"tokenizer_config.json": {"legacy": False}})
    assert isinstance(tokenizer, LlamaTokenizer)
    a = tokenizer.encode("Hello", add_special_tokens=False)
    assert tokenizer.encode("Hello") == [1, *a]
    assert tokenizer.encode("Hello", "Hello") == [1, *a, 1, *a]
    assert tokenizer.padding_side == "left"
    # Bytes of a character outside the vocabulary, behind the prefix space.
    pieces = [tokenizer.id_to_token(index) for index in tokenizer.encode("见")]
    assert pieces == ["<s>", "▁", "<0xE8>", "<0xA7>", "<0x81>"]


def test_the_rules_of_t5(tmp_path):
    tokenizer = load(tmp_path, "t5", {"tokenizer_config.json": {"legacy": False}})
    assert isinstance(tokenizer, T5Tokenizer)
    assert tokenizer.token_to_id("<extra_id_0>") == len(tokenizer) - 1
    assert tokenizer.token_to_id("<extra_id_99>") == len(tokenizer) - 100
    new = [tokenizer.id_to_token(i) for i in tokenizer.encode("<extra_id_0>. Hello")]
    assert new[:3] == ["<extra_id_0>", ".", "▁Hello"]
    assert new[-1] == "</s>"
    (tmp_path / "legacy").mkdir()
    legacy = load(tmp_path / "legacy", "t5", {"tokenizer_config.json": {"legacy": True}})
    old = [legacy.id_to_token(i) for i in legacy.encode("Hello <extra_id_0>.")]
    assert old == ["▁Hello", "<extra_id_0>", "▁", ".", "</s>"]


def test_encode_user_has_no_special_tokens(case):
    tokenizer, expected = case
    for text in expected["ids"]:
        ids = tokenizer.encode_user(text)
        assert not tokenizer.special_ids.difference([tokenizer.unk_token_id]) & set(ids), text
        if not any(special in text for special in tokenizer.special_tokens):
            assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_split_text_keeps_its_characters(tmp_path):
    tokenizer = load(tmp_path, "llama", {"tokenizer_config.json": {"legacy": False}})
    assert tokenizer.decode(tokenizer.encode_user("a</s>b<s> c")) == "a</s>b<s> c"


def test_stream_ends_no_piece_inside_a_character(tmp_path):
    tokenizer = load(tmp_path, "llama", {})
    stream = tokenizer.stream_decoder()
    ids = tokenizer.encode("😀é")
    pieces = [stream.put(index) for index in ids]
    assert "".join(pieces) == "😀é"
    assert all(piece in ("", "😀", "é") for piece in pieces)
    # A character that never ends is one U+FFFD a byte, as in sentencepiece.
    stream = tokenizer.stream_decoder()
    assert stream.put(ids[:-1]) + stream.end() == "😀\ufffd"


@pytest.mark.parametrize("legacy", [True, False])
def test_a_run_of_spaces_that_comes_first(legacy):
    """Without the first space, which encoding adds; the shorter run is no piece."""
    pieces = [("<unk>", 0.0, 2), ("▁▁▁▁", -1.0, 1), ("a", -1.0, 1), ("▁", -2.0, 1)]
    flags = {"add_dummy_prefix": True, "remove_extra_whitespaces": False, "byte_fallback": False}
    model = write_model(pieces, model_type=BPE, unk_id=0, **flags)
    options = {"legacy": legacy, "bos_token": None, "add_bos_token": False}
    tokenizer = LlamaTokenizer(model, TokenizerSettings(options=options), {})
    assert tokenizer.decode([1, 2]) == "   a"
    assert tokenizer.decode([3, 1, 2]) == "    a"
    assert tokenizer.decode([2, 1, 2]) == "a    a"


def test_denormalization_is_refused_by_name(tmp_path):
    """A rule of the model that would change decoded texts."""
    rules = tmp_path / "rules.tsv"
    rules.write_text("61\t62\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c", "the end"]),
        model_prefix=str(tmp_path / "tokenizer"),
        denormalization_rule_tsv=str(rules),
        vocab_size=14,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(UnsupportedError, match=r"tokenizer\.model: denormalizer_spec: rules that"):
        load_tokenizer(tmp_path)


def test_ids_outside_the_vocabulary(tmp_path):
    tokenizer = load(tmp_path, "t5", {})
    assert tokenizer.decode([len(tokenizer), 10**6]) == ""
    with pytest.raises(InputError, match="-100 is negative"):
        tokenizer.decode([-100])


def test_values_that_are_no_ids(tmp_path):
    tokenizer = load(tmp_path, "t5", {})
    for ids, message in (
        (None, "found NoneType"),
        ("a", r"found str \(a\)"),
        ([None], "expected ints, found NoneType"),
        ([1.0], "expected ints, found float"),
        ({5: 6}, "found dict"),
        (np.zeros((2, 2), int), r"shape \(2, 2\): expected one dimension"),
        (np.broadcast_to(5, (2**40,)), "1099511627776 at once, but at most 16777216"),
    ):
        with pytest.raises(InputError, match=message):
            tokenizer.decode(ids)
        with pytest.raises(InputError, match=message):
            tokenizer.stream_decoder().put(ids)
    ids = tokenizer.encode("Hello")
    assert tokenizer.decode(np.array(ids)) == tokenizer.decode(jnp.array(ids)) == "Hello</s>"


@pytest.mark.parametrize(
    "texts", [None, 3, b"a", {"a": 1}, [None], np.broadcast_to(np.int32(5), 2**40)]
)
def test_values_that_are_no_texts(tmp_path, texts):
    with pytest.raises(InputError, match="str"):
        load(tmp_path, "t5", {})(texts)


def small_model(model_type: int = UNIGRAM, charsmap: bytes = b"") -> bytes:
    return write_model(
        [("<unk>", 0.0, 2), ("a", -1.0, 1)],
        model_type=model_type,
        unk_id=0,
        add_dummy_prefix=True,
        remove_extra_whitespaces=True,
        byte_fallback=False,
        charsmap=charsmap,
    )


@pytest.mark.parametrize(
    "appended",
    [b"", b"\x1a\x02\x10\x01", b"\x1a\x05\x15\0\0\0\0"],
    ids=["nothing", "a varint as charsmap", "four bytes as charsmap"],
)
def test_model_that_multiplies_text_is_refused(tmp_path, appended):
    """A normalization table with a replacement of 2,000 bytes."""
    table = (4).to_bytes(4, "little") + b"\0\0\0\0" + b"x" * 2000 + b"\0"
    (tmp_path / "spiece.model").write_bytes(small_model(charsmap=table) + appended)
    with pytest.raises(UnsupportedError, match="more than 1024 times longer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("appended", [b"", b"\x12\x02\x1a\x00", b"\x12\x05\x1d\0\0\0\0"])
def test_model_type_of_another_wire_type_is_ignored(appended):
    assert SentencePieceModel(small_model(BPE) + appended, "spiece.model").model_type == BPE


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"legacy": "yes"}, TokenizerError, "legacy is 'yes'"),
        ({"sp_model_kwargs": {"enable_sampling": True}}, UnsupportedError, "sp_model_kwargs"),
        ({"do_lower_case": True}, UnsupportedError, "do_lower_case"),
        ({"bos_token": 3}, TokenizerError, "bos_token: 3 is not a token"),
        ({"bos_token": None}, TokenizerError, "add_bos_token, but no bos_token"),
        ({"added_tokens_decoder": {"x": "a"}}, TokenizerError, "'x', not an id"),
        ({"added_tokens_decoder": {"900000": "a"}}, TokenizerError, "id 900000, beyond"),
        ({"added_tokens_decoder": {"421": "a", "422": "a"}}, TokenizerError, "'a' appears under"),
        ({"padding_side": "top"}, TokenizerError, "padding_side is 'top'"),
        ({"chat_template": 7}, TokenizerError, "chat_template is neither"),
    ],
)
def test_contradictions_name_the_field(tmp_path, options, error, message):
    with pytest.raises(error, match=message):
        load(tmp_path, "llama", {"tokenizer_config.json": options})


def test_an_empty_added_token_is_named_by_its_id(tmp_path):
    with pytest.raises(TokenizerError, match=r"added_tokens\.json: an empty token has the id 421"):
        load(tmp_path, "llama", {"added_tokens.json": {"<a>": 420, "": 421}})


def test_t5_refuses_a_wrong_number_of_sentinels(tmp_path):
    options = {"additional_special_tokens": ["<extra_id_0>"], "extra_ids": 2}
    with pytest.raises(TokenizerError, match="lists 1 sentinels"):
        load(tmp_path, "t5", {"tokenizer_config.json": options})


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\x00", b"not a model" * 10, b"\x0a\xff\xff\xff\xff\x0f"),
        # A key of 33 bits, whose lowest 32 sentencepiece reads as the normalizer's.
        small_model() + b"\x9a\x80\x80\x80\x10\x00",
    ],
    ids=len,
)
def test_damaged_model_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: "):
        load_tokenizer(tmp_path)
