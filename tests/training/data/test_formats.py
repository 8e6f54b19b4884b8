"""Rows become tokens and labels: what is learnt, and where it ends."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import small_tokenizer
from translation_tools import write

from jaxllm.common.errors import ConfigError, DataError, InputError
from jaxllm.tokenizers import FastTokenizer, load_tokenizer
from jaxllm.tokenizers.byte_level import byte_tokenizer, ids_are_bytes
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.training.data import DataConfig, ModelInfo
from jaxllm.training.data.formats import (
    PromptCompletionFormat,
    Seq2SeqFormat,
    TextFormat,
    encode_document,
)
from jaxllm.training.data.pipeline import make_format

BYTES = byte_tokenizer()
END = 256


def learnt(example) -> list[int]:
    return example.labels[example.labels != -100].tolist()


@pytest.mark.ci
@given(st.text())
def test_byte_tokenizer(text):
    assert BYTES.encode(text) == list(text.encode())
    assert BYTES.decode(BYTES.encode(text)) == text


def test_byte_tokenizer_is_saved_as_a_tokenizer_json(tmp_path):
    BYTES.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert ids_are_bytes(again)
    assert not ids_are_bytes(small_tokenizer("gpt2"))
    assert again.encode("a\nb<|endoftext|>") == [97, 10, 98, 256]
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (256, 256, 257)


def test_text_is_learnt_to_its_end():
    example = TextFormat(BYTES, END, "text")({"text": "abc"})
    assert example.input_ids.tolist() == [97, 98, 99, END]
    assert example.labels.tolist() == [-100, 98, 99, END]
    assert example.input_ids.dtype == example.labels.dtype == np.int32
    raw = TextFormat(BYTES, END, "text")({"text": b"\xff\x00"})
    assert raw.input_ids.tolist() == [255, 0, END]
    with pytest.raises(DataError, match="whose ids are bytes"):
        TextFormat(small_tokenizer("gpt2"), 0, "text")({"text": b"abc"})


@pytest.mark.parametrize("name", ["gpt2", "llama3", "smollm", "llama2", "llama.model", "t5.model"])
@pytest.mark.parametrize("size", [1, 7, 40])
def test_long_texts_are_encoded_in_parts(name, size):
    tokenizer = small_tokenizer(name)
    text = "The sea was calm.\nWe saw it, 見た, and then\nwent home.\n" * 3
    ids = encode_document(tokenizer, text, size)
    full = encode_document(tokenizer, text)
    assert full == encode_document(tokenizer, text, len(text))
    bos = tokenizer.encode("")[:1] if tokenizer.bos_token_id in tokenizer.encode("") else []
    assert ids[: len(bos)] == bos
    assert ids.count(tokenizer.bos_token_id) == full.count(tokenizer.bos_token_id)
    if size == 40 and name != "t5.model":  # cut at line ends: the very same; T5 drops line ends
        assert ids == full


@pytest.mark.parametrize("name", ["gpt2", "llama3", "smollm", "llama2", "llama.model"])
def test_completion_and_its_end_are_learnt(name):
    tokenizer = small_tokenizer(name)
    encode = PromptCompletionFormat(tokenizer, 7, "q", "a")
    example = encode({"q": "Capital of France?\nAnswer:", "a": " Paris, of course"})
    prompt = tokenizer.encode("Capital of France?\nAnswer:")
    count = len(prompt)
    assert example.input_ids[:count].tolist() == prompt  # as at generation
    assert example.labels[:count].tolist() == [-100] * count
    assert example.labels[count:].tolist() == example.input_ids[count:].tolist()
    assert example.labels[-1] == 7
    assert tokenizer.decode(learnt(example)[:-1]).strip() == "Paris, of course"
    assert tokenizer.decode(example.input_ids[:-1], skip_special_tokens=True).strip() == (
        "Capital of France?\nAnswer: Paris, of course"
    )


def without_line_break(*pieces: str) -> FastTokenizer:
    """A tokenizer of these pieces, a space (1), and one token (0) for all unknown characters."""
    vocab = [["<unk>", 0.0], ["\u2581", -2.0], *([piece, -3.0] for piece in pieces)]
    unigram = {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": False}
    space = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always"}
    spec = {"model": unigram, "pre_tokenizer": space, "decoder": space}
    return FastTokenizer(spec, TokenizerSettings())


@pytest.mark.parametrize("known", [".", "a", "x"])
def test_an_unknown_beginning_of_a_completion_is_learnt(known):
    """Also where the tokenizer has no line break, and unknown characters become one token."""
    tokenizer = without_line_break("b", known)
    assert tokenizer.encode("\n\u20ac") == tokenizer.encode("\n") == [1, 0]
    encode = PromptCompletionFormat(tokenizer, END, "prompt", "completion")
    start = [] if known in ".a" else [1]  # nothing known to begin with: the space is not removed
    for completion, ids in {"\u20acb": [0, 2], "bb": [2, 2], "b\n": [2, 0]}.items():
        example = encode({"prompt": "b", "completion": completion})
        assert learnt(example) == [*start, *ids, END]


def test_a_completion_that_joins_what_stands_for_the_line_break():
    """The full stop would become a part of "..", so another character stands for the break."""
    encode = PromptCompletionFormat(
        without_line_break("b", ".", "..", "a"), END, "prompt", "completion"
    )
    assert learnt(encode({"prompt": "b", "completion": ".b"})) == [3, 2, END]
    assert learnt(encode({"prompt": "b", "completion": "..b"})) == [4, 2, END]


def test_a_prompt_gets_no_end():
    """T5's tokenizer ends every text with EOS; a prompt that goes on has none."""
    tokenizer = small_tokenizer("t5.model")
    example = PromptCompletionFormat(tokenizer, 1, "q", "a")({"q": "one", "a": "two"})
    assert example.input_ids.tolist().count(1) == 1


def test_pad_is_eos():
    """SmolLM2's pad is its EOS: the EOS behind an answer is learnt all the same."""
    example = PromptCompletionFormat(small_tokenizer("smollm"), 2, "q", "a")({"q": "a", "a": "b"})
    assert learnt(example)[-1] == 2


def test_empty_prompt_and_completion():
    encode = PromptCompletionFormat(BYTES, END, "q", "a")
    assert encode({"q": "", "a": "ab"}).labels.tolist() == [-100, 98, END]
    assert encode({"q": "ab", "a": ""}).labels.tolist() == [-100, -100, END]


def test_seq2seq_ends_both_sides():
    tokenizer = small_tokenizer("t5.model")
    encode = Seq2SeqFormat(tokenizer, 1, "x", "y", "say: ")
    example = encode({"x": "one two", "y": "three"})
    assert example.input_ids.tolist() == tokenizer.encode("say: one two")
    assert example.labels.tolist() == tokenizer.encode("three")
    assert example.input_ids[-1] == example.labels[-1] == 1
    assert example.input_ids.tolist().count(1) == 1
    by_bytes = Seq2SeqFormat(BYTES, END, "x", "y", "")({"x": "a", "y": ""})
    assert (by_bytes.input_ids.tolist(), by_bytes.labels.tolist()) == ([97, END], [END])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"q": "a"}, "a: no such field; the row has q"),
        ({}, "q: no such field; the row has none"),
        ({"q": "a", "a": None}, "a: expected str, found 'None'"),
        ({"q": ["a"], "a": "b"}, "q: expected str"),
    ],
)
def test_wrong_rows(row, message):
    with pytest.raises(DataError, match=message):
        PromptCompletionFormat(BYTES, END, "q", "a")(row)


def test_sources_and_targets_have_the_languages_of_their_rows(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "nllb", "nllb"))
    assert tokenizer is not None
    encode = Seq2SeqFormat(tokenizer, 2, "source", "target", "")
    row = {"source": "Hello", "target": "Hello", "src_lang": "deu_Latn", "tgt_lang": "zul_Latn"}
    example = encode(row)
    deu, zul, fra = map(tokenizer.token_to_id, ("deu_Latn", "zul_Latn", "fra_Latn"))
    assert (example.input_ids[0], example.labels[0]) == (deu, zul)
    assert (example.input_ids[-1], example.labels[-1]) == (2, 2)
    plain = encode({"source": "Hello", "target": "Hello", "tgt_lang": "zul_Latn"})
    assert (plain.input_ids[0], plain.labels[0]) == (fra, zul)  # the source's is the file's
    np.testing.assert_array_equal(plain.input_ids[1:], example.input_ids[1:])
    with pytest.raises(InputError, match="'en' is no language of this tokenizer"):
        encode({**row, "src_lang": "en"})
    nameless = {"source": "Hello", "target": "Hello"}
    pair = {"prompt": "Hello", "chosen": "Hello", "rejected": "world"}
    model = ModelInfo(kind="seq2seq", vocab_size=len(tokenizer), context_length=64)
    prefer = make_format(DataConfig(format="preference"), tokenizer, model)
    for wrong, make in ((nameless, encode), (nameless, encode.prompt_of), (pair, prefer)):
        with pytest.raises(InputError, match="tgt_lang: the row names no language"):
            make(wrong)
    chosen, rejected = prefer({**pair, "tgt_lang": "zul_Latn"}).sequences
    assert chosen.labels[0] == rejected.labels[0] == zul
    named = Seq2SeqFormat(tokenizer, 2, "source", "target", "", "from", "to")
    with pytest.raises(DataError, match="from: no such field"):
        named(row)
    assert named({**row, "from": "fra_Latn", "to": "deu_Latn"}).labels[0] == deu
    # Other tokenizers take such fields for what they are: columns without effect.
    ids = Seq2SeqFormat(BYTES, END, "source", "target", "")(row).labels
    assert ids.tolist() == [*b"Hello", END]


def test_targets_of_mbart_end_in_their_language(tmp_path):
    tokenizer = load_tokenizer(write(tmp_path / "mbart", "mbart"))
    assert tokenizer is not None
    row = {"source": "Hello", "target": "Hello", "tgt_lang": "de_DE"}
    example = Seq2SeqFormat(tokenizer, 2, "source", "target", "")(row)
    assert example.labels[-2:].tolist() == [2, tokenizer.token_to_id("de_DE")]
    model = ModelInfo(kind="seq2seq", vocab_size=len(tokenizer), context_length=64)
    with pytest.raises(ConfigError, match="'truncate' would cut off the language code"):
        make_format(DataConfig(format="seq2seq", on_too_long="truncate"), tokenizer, model)
