"""Tokenizers from GGUF metadata: SmolLM2's file, and models converted to GGUF."""

import json
from pathlib import Path

import numpy as np
import paths
import pytest
import sentencepiece

from jaxllm.auto import AutoTokenizer
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import InputError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import load_tokenizer, tokenizer_from_gguf
from jaxllm.tokenizers.sentencepiece_model import BYTES, read_specs

DATA = paths.DATA / "tokenizers"
CASES = json.loads((DATA / "gguf_cases.json").read_text(encoding="utf-8"))
SLOW = json.loads((DATA / "sentencepiece_cases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def smollm2_metadata(smollm2_gguf):
    return GGUFFile(smollm2_gguf).metadata


@pytest.fixture(scope="module")
def smollm2(smollm2_metadata):
    return tokenizer_from_gguf(smollm2_metadata)


def test_smollm2_ids(smollm2):
    assert {text: smollm2.encode(text) for text in CASES["ids"]} == CASES["ids"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    assert smollm2.apply_chat_template(chat) == CASES["chat"]


def test_digits_are_split_before_words(smollm2):
    """Digits behind white space: transformers, which does not know "smollm", differs."""
    assert CASES["uncorrected"]
    for text, ids in CASES["uncorrected"].items():
        assert any(character.isnumeric() for character in text)
        assert smollm2.encode(text) != ids
        assert smollm2.decode(ids) == text


def test_smollm2_texts(smollm2):
    for text, ids in CASES["ids"].items():
        assert smollm2.decode(ids) == text
        stream = smollm2.stream_decoder(skip_special_tokens=False)
        assert "".join(map(stream.put, ids)) + stream.end() == text


def test_smollm2_attributes(smollm2):
    assert len(smollm2) == smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert (smollm2.pad_token_id, smollm2.unk_token_id) == (2, 0)
    assert smollm2.special_ids == frozenset(range(17))
    assert "<|im_start|>" in smollm2.chat_template


@pytest.mark.ci
def test_saved_smollm2_is_the_same(smollm2, tmp_path):
    smollm2.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert {text: again.encode(text) for text in CASES["ids"]} == CASES["ids"]
    assert again.chat_template == smollm2.chat_template
    assert again.special_ids == smollm2.special_ids


def gguf_of(name: str) -> dict:
    """The metadata that llama.cpp's converter of 2024 wrote for a sentencepiece model, which called
    the unknown token so although it is special."""
    model = (DATA / f"{name}.model").read_bytes()
    sp = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = sp.get_piece_size()

    def kind(index: int) -> int:
        checks = (sp.is_unknown, sp.is_control, sp.is_unused, sp.is_byte)
        return next((t for t, c in zip((2, 3, 5, 6), checks, strict=True) if c(index)), 1)

    return {
        "tokenizer.ggml.model": name,
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": np.array([sp.get_score(i) for i in range(size)], np.float32),
        "tokenizer.ggml.token_type": np.array([kind(i) for i in range(size)], np.int32),
        "tokenizer.ggml.unknown_token_id": np.uint32(sp.unk_id()),
    }


@pytest.fixture
def llama_metadata() -> dict:
    return gguf_of("llama") | {
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}",
        "tokenizer.chat_template.tool_use": "{{ tools | length }} tools",
    }


def test_llama_ids(llama_metadata, tmp_path):
    tokenizer = tokenizer_from_gguf(llama_metadata)
    expected = SLOW["llama"]["legacy"]
    assert {text: tokenizer.encode(text) for text in expected["ids"]} == expected["ids"]
    for ids, _, skipped in expected["decoded"]:
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
    chat = [{"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tools=[{}], tokenize=False) == "1 tools"
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>Hello"
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert {text: again.encode(text) for text in expected["ids"]} == expected["ids"]
    assert again.chat_template == tokenizer.chat_template


def test_llama_flags(llama_metadata):
    tokenizer = tokenizer_from_gguf(
        llama_metadata
        | {
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
        }
    )
    pieces = [tokenizer.id_to_token(index) for index in tokenizer.encode("the <s>the")]
    assert pieces == ["t", "he", "▁", "<s>", "t", "he", "</s>"]


def charsmap(model: bytes) -> bytes:
    return read_specs(model, "t5.model")[1][2, BYTES]


def test_t5_ids(tmp_path):
    metadata = gguf_of("t5") | {
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.precompiled_charsmap": list(charsmap((DATA / "t5.model").read_bytes())),
    }
    for key, blank in (("tokens", "[PAD{}]"), ("scores", -1000.0), ("token_type", 5)):
        name = f"tokenizer.ggml.{key}"
        size = len(metadata[name])
        blanks = [blank.format(size + n) if key == "tokens" else blank for n in range(128)]
        metadata[name] = [*list(metadata[name]), *blanks]
    metadata["tokenizer.ggml.scores"] = [float(x) for x in metadata["tokenizer.ggml.scores"]]
    metadata["tokenizer.ggml.token_type"] = [int(x) for x in metadata["tokenizer.ggml.token_type"]]
    tokenizer = tokenizer_from_gguf(metadata)
    expected = SLOW["t5"]["legacy"]
    assert {text: tokenizer.encode(text) for text in expected["ids"]} == expected["ids"]
    for ids, shown, skipped in expected["decoded"]:
        assert tokenizer.decode(ids) == shown
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert {text: again.encode(text) for text in expected["ids"]} == expected["ids"]


@pytest.fixture(scope="module")
def gpt2_metadata() -> dict:
    spec = json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8"))
    tokens = list(spec["model"]["vocab"])
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] + [1] * (len(tokens) - 1),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.ggml.bos_token_id": 0,
    }


@pytest.mark.parametrize(("pre", "name"), [("gpt-2", "gpt2"), ("llama-bpe", "llama3")])
def test_pre_tokenizers(gpt2_metadata, fast_cases, pre, name):
    tokenizer = tokenizer_from_gguf(gpt2_metadata | {"tokenizer.ggml.pre": pre})
    expected = fast_cases["gpt2"]["ids"]
    ours = {text: tokenizer.encode(text, add_special_tokens=False) for text in expected}
    if name == "gpt2":
        assert ours == expected
    else:
        words = [tokenizer.id_to_token(i) for i in ours["x = [1, 22, 333, 4444]; y=7.5e-3"]]
        assert words != [
            tokenizer.id_to_token(i) for i in expected["x = [1, 22, 333, 4444]; y=7.5e-3"]
        ]
        assert tokenizer.encode("a")[0] == tokenizer.bos_token_id


MISSING = object()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.model", "bert", "tokenizer.ggml.model is 'bert'"),
        ("tokenizer.ggml.model", MISSING, "the key tokenizer.ggml.model is missing"),
        ("tokenizer.ggml.pre", "kimi-k2", "tokenizer.ggml.pre is 'kimi-k2'"),
        ("tokenizer.ggml.tokens", MISSING, "tokens is missing"),
        ("tokenizer.ggml.tokens", [], "tokens has 0 entries"),
        ("tokenizer.ggml.tokens", ["a", "a"], "entries for 2 tokens"),
        ("tokenizer.ggml.tokens", [1, 2], "holds '1', not str"),
        ("tokenizer.ggml.tokens", ["\ud800"], "unpaired surrogate"),
        ("tokenizer.ggml.token_type", [1], "token_type has 1 entries"),
        ("tokenizer.ggml.token_type", [9] * 400, "types other than 1 to 6"),
        ("tokenizer.ggml.merges", ["nowhere x"], "not in the vocabulary"),
        ("tokenizer.ggml.merges", MISSING, "merges is missing"),
        ("tokenizer.ggml.eos_token_id", 400, "eos_token_id is 400, but there are 400 tokens"),
        ("tokenizer.ggml.eos_token_id", -1, "eos_token_id is -1"),
        ("tokenizer.ggml.eos_token_id", "2", "eos_token_id is '2', not int"),
        ("tokenizer.ggml.add_bos_token", 1, "add_bos_token is '1', not bool"),
        ("tokenizer.chat_template", 7, "chat_template is '7', not str"),
    ],
)
def test_invalid_metadata(gpt2_metadata, key, value, message):
    metadata = gpt2_metadata | {key: value}
    if value is MISSING:
        del metadata[key]
    with pytest.raises((TokenizerError, UnsupportedError), match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokenizer.ggml.scores", [0.0], "scores has 1 entries"),
        ("tokenizer.ggml.scores", [float("nan")] * 420, "not finite"),
        ("tokenizer.ggml.tokens", ["a"] * 420, "not a sentencepiece model"),
    ],
)
def test_invalid_sentencepiece_metadata(llama_metadata, key, value, message):
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_gguf(llama_metadata | {key: value})


@pytest.mark.ci
def test_sides_of_a_gguf_tokenizer(smollm2_gguf: Path) -> None:
    load = AutoTokenizer.from_pretrained
    assert load(smollm2_gguf, padding_side="left", truncation_side="left").padding_side == "left"
    with pytest.raises(InputError, match="padding_side is 'up'"):
        load(smollm2_gguf, padding_side="up")
    with pytest.raises(UnsupportedError, match="takes no legacy"):
        load(smollm2_gguf, legacy=True)
