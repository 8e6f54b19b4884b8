"""Calls as transformers' tokenizers take them, against what 5.23 returned (call_cases.json)."""

from __future__ import annotations

import json
import os
import runpy
import zlib
from pathlib import Path

import jax
import numpy as np
import paths
import pytest

from jaxllm.common.errors import InputError, TemplateError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import BatchEncoding, Tokenizer, load_tokenizer
from jaxllm.tokenizers.settings import AddedToken

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


@pytest.fixture
def t5_copy(load_fast) -> Tokenizer:
    return load_fast("t5")


def test_lists_match_transformers(case):
    tokenizer, expected = case
    assert tokenizer("Nice to meet you.") == expected["single"]
    for options, result in expected["calls"]:
        assert tokenizer(BATCH, **options) == result, options
    for options, result in expected["pairs"]:
        assert tokenizer(BATCH, SECOND, **options) == result, options


def test_offsets_masks_of_special_tokens_and_lengths_match_transformers(case):
    tokenizer, expected = case
    details = dict.fromkeys(
        ("return_offsets_mapping", "return_special_tokens_mask", "return_length"), True
    )

    def lists(*texts, **options) -> dict:
        encoding = tokenizer(*texts, **details, **options)
        return json.loads(json.dumps(dict(encoding)))

    for options, result in expected["offsets"]:
        assert lists(BATCH, **options) == result, options
    pairs = lists(BATCH, SECOND, truncation=True, max_length=9)
    assert pairs == expected["pair_offsets"]
    arrays = tokenizer(BATCH[2:], padding=True, return_tensors="np", **details)
    padded = lists(BATCH[2:], padding=True)
    assert {name: value.tolist() for name, value in arrays.items()} == padded


def test_added_tokens_match_transformers(load_fast, case, tmp_path):
    _, expected = case
    name = next(n for n, each in CASES["tokenizers"].items() if each is expected)
    tokens, special, texts = CASES["new"]
    tokenizer = load_fast(name)
    size = len(tokenizer)
    count = tokenizer.add_tokens(tokens) + tokenizer.add_special_tokens(special)
    assert count == len(tokenizer) - size
    assert tokenizer.add_tokens(tokens) == 0
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(tmp_path)):
        ids = [each.encode(text) for text in texts]
        assert expected["extended"] == {
            "size": len(each),
            "ids": ids,
            "decoded": each.batch_decode(ids),
            "skipped": each.batch_decode(ids, skip_special_tokens=True),
            "new_ids": each.convert_tokens_to_ids([*tokens, "<SEP>", "<u>"]),
            "sep_token_id": each.sep_token_id,
        }


@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model"])
def test_the_sentencepiece_file_of_another_family_needs_a_class(file, tmp_path):
    """ALBERT and Gemma have such files too, with other ids."""
    model = {"tokenizer.model": "llama.model", "spiece.model": "t5.model"}[file]
    (tmp_path / file).write_bytes((DATA / model).read_bytes())
    for model_type in ("llama", "mt5", "gpt2", None):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        assert load_tokenizer(tmp_path) is not None
    (tmp_path / "config.json").write_text('{"model_type": "albert"}')
    with pytest.raises(UnsupportedError, match=r"config\.json: the tokenizer of a 'albert' model"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"model_type": "albert", "tokenizer_class": "AlbertTokenizer"}'
    )
    with pytest.raises(UnsupportedError, match="cannot read a AlbertTokenizer"):
        load_tokenizer(tmp_path)
    name = {"tokenizer.model": "LlamaTokenizer", "spiece.model": "T5Tokenizer"}[file]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
    assert load_tokenizer(tmp_path) is not None


@pytest.mark.parametrize("name", ["llama.model", "t5.model", "byt5"])
def test_added_tokens_of_tokenizers_without_a_json(name, tmp_path):
    """No offsets, as in transformers; added tokens are saved."""
    classes = {"llama.model": "LlamaTokenizer", "t5.model": "T5Tokenizer", "byt5": "ByT5Tokenizer"}
    config = {"tokenizer_class": classes[name], "padding_side": "left"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if name != "byt5":
        file = "tokenizer.model" if name.startswith("llama") else "spiece.model"
        (tmp_path / file).write_bytes((DATA / name).read_bytes())
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    text = "a<new> Hello<SEP>b"
    size, plain = len(tokenizer), tokenizer.encode(text)
    tokenizer.padding_side = "right"
    assert tokenizer.add_tokens("<new>") == tokenizer.add_special_tokens({"sep_token": "<SEP>"})
    assert tokenizer.padding_side == "right"
    ids = tokenizer.encode(text)
    assert (size in ids, size + 1 in ids, len(ids) < len(plain)) == (True, True, True)
    assert "<SEP>" not in tokenizer.decode(ids, skip_special_tokens=True)
    tokenizer.save(tmp_path / "saved")
    again = load_tokenizer(tmp_path / "saved")
    assert again is not None
    assert (again.encode(text), again.sep_token_id) == (ids, size + 1)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<SEP>"]})
    tokenizer.add_tokens("<newer>")
    assert tokenizer.additional_special_tokens == ["<SEP>"]
    with pytest.raises(UnsupportedError, match="has no offsets"):
        tokenizer("a", return_offsets_mapping=True)
    marked = tokenizer("a", "b", return_special_tokens_mask=True, return_length=True)
    pairs = zip(marked.input_ids, marked.special_tokens_mask, strict=True)
    own = tokenizer.encode("a", "b", add_special_tokens=False)
    assert [index for index, is_added in pairs if not is_added] == own
    assert marked.length == [len(own) + 2]


def test_dicts_are_padded(t5):
    texts = ["a", "b c d"]
    rows = [t5(text) for text in texts]
    expected = t5(texts, padding=True, padding_side="left", return_tensors="np")
    features = [{**row, "labels": label} for row, label in zip(rows, (3, 4), strict=True)]
    batch = t5.pad(features, padding_side="left", return_tensors="jax")
    np.testing.assert_array_equal(batch.input_ids, expected.input_ids)
    np.testing.assert_array_equal(batch.attention_mask, expected.attention_mask)
    assert batch["labels"].tolist() == [3, 4]
    options = {"padding": "max_length", "max_length": 9, "return_tensors": "np"}
    again = t5.pad(expected, padding_side="right", **options)
    assert again.attention_mask[:, : expected.input_ids.shape[1]].tolist() == (
        expected.attention_mask.tolist()
    )
    assert again.attention_mask.sum() == expected.attention_mask.sum()
    columns = t5.pad({"input_ids": [[5], [6, 7]]})
    expected_lists = {"input_ids": [[5, 0], [6, 7]], "attention_mask": [[1, 0], [1, 1]]}
    assert dict(columns) == dict(t5.pad([[5], [6, 7]])) == expected_lists


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [5]}, {"input_ids": [6], "labels": 1}], "row 0 has"),
        ([{"input_ids": [5], "position_ids": [0]}], "pad takes input_ids"),
        ([{"labels": 5}], "pad takes input_ids"),
        ({"input_ids": [[5]], "attention_mask": [[1, 1]]}, "attention_mask: its rows"),
        ({"input_ids": [[5], [6]], "labels": [[1], [1, 2]]}, "pad them first, with -100"),
        ([], "the batch is empty"),
        ([5, 6], "expected lists of token ids"),
    ],
)
def test_rows_that_cannot_be_padded(t5, rows, message):
    with pytest.raises(InputError, match=message):
        t5.pad(rows)


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
            full = tokenizer.tokenize(text, add_special_tokens=True)
            assert tokenizer.convert_tokens_to_ids(full) == tokenizer.encode(text)
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


@pytest.mark.by_default("metaspace")
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
    lists = tokenizer(texts, **options)
    batch = tokenizer(texts, return_tensors=return_tensors, **options)
    assert isinstance(batch, BatchEncoding)
    assert isinstance(batch.input_ids, array)
    assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int32
    assert {name: value.tolist() for name, value in batch.items()} == dict(lists)


def test_encodings_are_mappings(t5):
    batch = t5(["a", "b c"], padding=True, return_tensors="np")
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
    assert tokenizer(["a", "a b c"], padding=True, padding_side="right").input_ids[0][-1] == 2
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


def test_added_tokens_become_special(load_fast):
    tokenizer = load_fast("llama2")
    token = AddedToken("<turn>", special=False)
    assert tokenizer.add_special_tokens({"additional_special_tokens": [token]}) == 1
    (index,) = tokenizer.additional_special_tokens_ids
    assert tokenizer.encode(f"{token}", add_special_tokens=False) == [index]
    assert tokenizer.decode([index], skip_special_tokens=True) == ""


def test_lists_of_special_tokens_are_replaced_or_continued(t5_copy):
    """As in transformers: the list is replaced by default, and the tokens keep their ids."""
    before = t5_copy.additional_special_tokens
    assert "<extra_id_0>" in before
    kept = {"replace_extra_special_tokens": False}
    t5_copy.add_special_tokens({"extra_special_tokens": ["<a>"]}, **kept)
    assert t5_copy.additional_special_tokens == [*before, "<a>"]
    t5_copy.add_special_tokens({"additional_special_tokens": ["<b>"]})
    assert t5_copy.additional_special_tokens == ["<b>"]
    t5_copy.add_special_tokens({"sep_token": "<a>"})
    assert t5_copy.additional_special_tokens == ["<b>"]
    ids = t5_copy.encode("<extra_id_0><a><b>", add_special_tokens=False)
    assert t5_copy.decode(ids, skip_special_tokens=True) == ""
    added = t5_copy.get_added_vocab()
    assert added["<extra_id_0>"] == ids[0]
    assert list(added) == sorted(added, key=added.__getitem__)


def test_a_chat_template_can_be_set(load_fast, tmp_path):
    tokenizer = load_fast("llama2")
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(tmp_path)
    chat = [{"role": "user", "content": "hi"}]
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.apply_chat_template(chat, tokenize=False) == "hi"
    with pytest.raises(InputError, match=r"chat_template: expected a template, a dict .*, found 3"):
        again.chat_template = 3
    again.chat_template = None
    with pytest.raises(TemplateError, match="no default chat template"):
        again.apply_chat_template(chat)


def test_named_chat_templates_are_kept(load_fast, tmp_path):
    """By name in one file as transformers 4 writes them, or in a folder as 5 does."""
    tokenizer, chat = load_fast("llama2"), [{"role": "user", "content": "hi"}]
    tools = [{"name": "clock"}]
    tokenizer.chat_template = {"default": "plain", "tool_use": "{{ tools[0].name }}"}
    tokenizer.add_tokens("<new>")
    tokenizer.save_pretrained(tmp_path)
    templates = tmp_path / "additional_chat_templates"
    for default, tool in (("plain", "clock"), ("of a file", "of a folder: clock")):
        again = load_tokenizer(tmp_path)
        assert again is not None
        assert again.apply_chat_template(chat, tokenize=False) == default
        assert again.apply_chat_template(chat, tokenize=False, tools=tools) == tool
        assert again.apply_chat_template(chat, tokenize=False, tools=[]) == default
        templates.mkdir(exist_ok=True)
        (templates / "tool_use.jinja").write_text("of a folder: {{ tools[0].name }}")
        (tmp_path / "chat_template.jinja").write_text("of a file")
    again.save_pretrained(tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved").rglob("*.jinja")}
    assert names == {"tool_use.jinja", "chat_template.jinja"}
    tokenizer.save_pretrained(tmp_path / "saved")
    assert not list((tmp_path / "saved").rglob("*.jinja"))
    with pytest.raises(InputError, match="chat_template: expected names, found 3"):
        tokenizer.chat_template = {3: "plain"}


def test_a_pipe_as_a_chat_template_is_not_read(load_fast, tmp_path):
    load_fast("llama2").save_pretrained(tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    os.mkfifo(tmp_path / "additional_chat_templates" / "rag.jinja")
    with pytest.raises(TokenizerError, match=r"rag\.jinja: is no regular file"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("spec", ["tokenizer.json", "vocab.json"])
def test_the_prefix_space_of_gpt2_follows_the_settings(spec, fast_folder, tmp_path):
    folder = fast_folder("gpt2", add_prefix_space=True)
    if spec == "vocab.json":
        model = json.loads((folder / "tokenizer.json").read_text())["model"]
        (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
        (folder / "merges.txt").write_text("\n".join(merges))
        (folder / "tokenizer.json").unlink()
    prefixed, plain = load_tokenizer(folder), load_tokenizer(folder, add_prefix_space=False)
    assert prefixed is not None
    assert plain is not None
    assert prefixed.encode("Hello") == plain.encode(" Hello") != plain.encode("Hello")
    prefixed.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.encode("Hello") == prefixed.encode("Hello")
    with pytest.raises(UnsupportedError, match="add_bos_token, legacy: without effect on a"):
        load_tokenizer(folder, legacy=True, add_bos_token=True, add_eos_token=None)


def test_model_max_length_is_the_default(load_fast):
    tokenizer = load_fast("t5", model_max_length=6)
    batch = tokenizer(
        ["a b c d e f g h", "a"], padding="max_length", truncation=True, return_tensors="np"
    )
    assert batch.attention_mask.sum(1).tolist() == [6, len(tokenizer.encode("a"))]
    assert batch.input_ids[0, -1] == tokenizer.eos_token_id
    endless = load_fast("t5", model_max_length=None)
    with pytest.warns(UserWarning, match="no model_max_length, so nothing is truncated"):
        assert endless("a b c", truncation=True) == endless("a b c")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"padding": "longes"}, InputError, "padding is 'longes'"),
        ({"truncation": "first"}, InputError, "truncation is 'first'"),
        ({"padding": "max_length"}, InputError, "padding='max_length' needs max_length"),
        ({"max_length": "9"}, InputError, "max_length is '9'"),
        ({"return_tensors": "np"}, InputError, "different lengths"),
        ({"return_tensors": "pt"}, UnsupportedError, "give 'np' or 'jax'"),
        ({"return_tensors": 3}, InputError, "return_tensors: expected .*, found 3"),
        ({"bucket": 8, "pad_to_multiple_of": 8}, InputError, "not both"),
        ({"padding": True, "pad_to_multiple_of": -1}, InputError, "to_multiple_of: .* found -1"),
        ({"pad_to_multiple_of": 8}, InputError, "give padding=True with it"),
        ({"return_length": "yes"}, InputError, "return_length: expected True or False"),
        ({"return_token_type_ids": True}, UnsupportedError, r"\['return_token_type_ids'\]"),
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


def test_labels_of_targets(t5):
    texts, targets = ["Hello world", "Nice"], ["Hello", "The garden is nice"]
    options = {"padding": True, "max_length": 30, "return_tensors": "np"}
    both = t5(texts, text_target=targets, **options)
    expected = t5(targets, **options).input_ids
    assert both.labels.tolist() == expected.tolist()
    assert both.input_ids.tolist() == t5(texts, **options).input_ids.tolist()
    assert t5(text_target=targets, **options).input_ids.tolist() == expected.tolist()
    one = t5("Hello", text_target="Nice")
    assert one.labels == t5.encode("Nice")
    with pytest.raises(InputError, match="text_target: expected one for each text"):
        t5(texts, text_target="Hello")


def test_what_scripts_do_with_encodings(t5):
    options = {"padding": True, "return_tensors": "np"}
    batch = t5(["Hello world", "Nice"], **options)
    batch["labels"] = t5(["a", "b"], **options)["input_ids"]
    assert list(batch.keys()) == ["input_ids", "attention_mask", "labels"]
    batch["decoder_input_ids"] = batch.input_ids
    assert dict(batch)["decoder_input_ids"] is batch.input_ids
    with pytest.raises(InputError, match=r"position_ids: only labels, .* can be set"):
        batch["position_ids"] = batch.input_ids
    ids = batch.input_ids
    decoded = t5.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=True)
    assert decoded == t5.batch_decode(ids, skip_special_tokens=True)
    with t5.as_target_tokenizer():
        np.testing.assert_array_equal(t5(["Hello world", "Nice"], **options).input_ids, ids)
    lists = t5(["Hello world", "Nice"])  # not padded
    lists["labels"] = lists["input_ids"].copy()
    assert dict(lists)["labels"] == [t5.encode("Hello world"), t5.encode("Nice")]
    array = t5.encode("Hello world", return_tensors="jax")
    assert (array.shape, array.dtype) == ((1, len(t5.encode("Hello world"))), "int32")
    assert t5.encode("Nice", return_tensors="np").tolist() == [t5.encode("Nice")]
    padded = t5.encode("Nice", padding="max_length", max_length=9, padding_side="left")
    assert padded == [t5.pad_token_id] * (9 - len(t5.encode("Nice"))) + t5.encode("Nice")
    with pytest.raises(InputError, match=r"prompt 0 has \d+ tokens, but max_length is 2"):
        t5.encode("Hello world", max_length=2)
    with pytest.raises(InputError, match="a text must be a str, not list"):
        t5.encode(["Nice"])
    with pytest.raises(AttributeError, match="'encode_plus': call it: tokenizer"):
        t5.encode_plus("Nice")


def test_options_that_ask_for_what_happens_anyway(t5):
    options = {"return_token_type_ids": False, "return_attention_mask": True, "verbose": False}
    assert t5("Nice", **options) == t5("Nice")
    without = t5(["Nice", "a b c"], return_attention_mask=False)
    assert dict(without) == {"input_ids": [t5.encode("Nice"), t5.encode("a b c")]}
    assert dict(t5("Nice", return_attention_mask=False)) == {"input_ids": t5.encode("Nice")}
    with pytest.raises(UnsupportedError, match="arrays have their mask"):
        t5(["Nice"], return_attention_mask=False, return_tensors="np")
    t5.model_max_length = 3
    assert len(t5("Hello world", truncation=True).input_ids) == 3
    with pytest.raises(InputError, match="model_max_length: expected a positive number, found 'a"):
        t5.model_max_length = "a"


def test_clean_up_of_spaces(t5):
    ids = [i for word in ("Hello", ".", "n't") for i in t5.encode(word, add_special_tokens=False)]
    with_spaces, without = (t5.decode(ids, True, value) for value in (False, True))
    assert with_spaces != without
    assert without == with_spaces.replace(" .", ".").replace(" n't", "n't")
    with pytest.raises(
        InputError, match="clean_up_tokenization_spaces: expected True or False, found 1"
    ):
        t5.decode(ids, clean_up_tokenization_spaces=1)


def test_saving_over_another_tokenizer_leaves_none_of_its_files(tmp_path, load_fast, fast_cases):
    (tmp_path / "chat_template.jinja").write_text("of an earlier model")
    (tmp_path / "README.md").write_text("kept")
    tokenizer = load_fast(next(iter(fast_cases)))
    paths = {Path(path) for path in tokenizer.save_pretrained(tmp_path)}
    assert set(tmp_path.iterdir()) == {*paths, tmp_path / "README.md"}
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert again.chat_template == tokenizer.chat_template
