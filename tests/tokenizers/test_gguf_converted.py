"""Vocabularies that llama.cpp's converter wrote, against llama.cpp's ids and texts."""

from __future__ import annotations

import gzip
import json
import random
import warnings
from typing import Any

import numpy as np
import paths
import pytest
import tokenizers

from jaxllm.common.errors import TemplateError, TokenizerError, UnsupportedError
from jaxllm.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_gguf

DATA = paths.DATA / "tokenizers"
FILES = [
    json.loads((DATA / f"gguf_vocabularies_{version}.json").read_text(encoding="utf-8"))
    for version in (4, 5)
]
CASES = {**FILES[0]["cases"], **{f"{k}_5": case for k, case in FILES[1]["cases"].items()}}
SPLITS = json.loads((DATA / "gguf_splits.json").read_text(encoding="utf-8"))
PUBLISHED = json.loads(gzip.decompress((DATA / "ggml_vocabularies.json.gz").read_bytes()))
SPM = [name for name, case in CASES.items() if case["metadata"]["tokenizer.ggml.model"] == "llama"]
REFUSED = {
    *("afmoe", "chameleon", "cohere2moe", "exaone-moe", "granite-embed-multi-97m", "jais-2"),
    *("jina-de", "jina-es", "jina-v1-en", "jina-v2-code", "jina-v2-de", "jina-v2-es", "kimi-k2"),
    *("modern-bert", "roberta-bpe", "spark2_5", "superbpe", "tiny_aya", "youtu"),
}
"""Names of `tokenizer.ggml.pre` that jaxllm does not read."""
APPROXIMATED = {"tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"}
"""Those whose capital letters beyond ASCII llama.cpp does not know."""


def of_file(metadata: dict[str, Any]) -> dict[str, Any]:
    """The fields as `GGUFFile` gives them."""
    return {k: np.asarray(v) if k.endswith(("scores", "type")) else v for k, v in metadata.items()}


def made(metadata: dict[str, Any]) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GGUF: tokenizer.ggml.scores: all tokens have")
        warnings.filterwarnings("ignore", "GGUF: tokenizer.chat_template is 'mistral-v7-tekken'")
        return tokenizer_from_gguf(of_file(metadata))


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param, made(CASES[request.param]["metadata"]), CASES[request.param]


def test_ids(case):
    """T5 has sentinels and one EOS; a literal ▁ at the end is sentencepiece's, which drops it."""
    name, tokenizer, expected = case
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        is_t5 = "t5" in name
        if not is_t5 or not ("<extra_id" in text or "▁" in text or text.endswith("</s>")):
            assert tokenizer.encode(text) == ids, text


def test_texts(case):
    """llama.cpp cleans spaces of GPT-2's and Llama 3's texts up, and keeps the prefix space behind
    BOS."""
    name, tokenizer, expected = case
    if "t5" in name or name in ("gpt2", "llama3_5"):
        return
    columns = zip(*(expected[key] for key in ("texts", "ids", "shown", "skipped")), strict=True)
    for text, ids, shown, skipped in columns:
        assert tokenizer.decode(ids) == shown, text
        if name in SPM:
            skipped = skipped.removeprefix(" ") if name.startswith("llama") else skipped
        assert tokenizer.decode(ids, skip_special_tokens=True) == skipped, text


def test_a_text_comes_back(case):
    name, tokenizer, expected = case
    if "t5" in name:
        return
    for text in expected["texts"]:
        if not any(token in text for token in tokenizer.get_added_vocab()) and "▁" not in text:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text


def test_streams(case):
    _, tokenizer, expected = case
    rng = random.Random(1)
    rows = [
        *expected["ids"],
        *([rng.randrange(len(tokenizer)) for _ in range(9)] for _ in range(60)),
    ]
    for ids in rows:
        for skip in (False, True):
            stream = tokenizer.stream_decoder(skip_special_tokens=skip)
            text = "".join(map(stream.put, ids)) + stream.end()
            assert text == tokenizer.decode(ids, skip_special_tokens=skip)


def test_the_saved_folder_is_the_same(case, tmp_path):
    _, tokenizer, expected = case
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert len(again) == len(tokenizer)
    assert again.special_ids == tokenizer.special_ids
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert again.encode(text) == tokenizer.encode(text)
        for skip in (False, True):
            own = tokenizer.decode(ids, skip_special_tokens=skip)
            assert again.decode(ids, skip_special_tokens=skip) == own


@pytest.mark.parametrize("name", sorted(SPLITS["names"].keys() - REFUSED - {"default"}))
def test_splits(name, tmp_path):
    """llama.cpp's splits of texts, and whether it adds BOS and EOS and takes whole words."""
    *flags, number = SPLITS["names"][name]
    metadata = {k: v for k, v in CASES["gpt2"]["metadata"].items() if ".add_" not in k}
    tokenizer = made({**metadata, "tokenizer.ggml.pre": name})
    tokenizer.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    ends = tokenizer.bos_token_id
    ids = tokenizer.encode("a")
    assert [ids[0] == ends, ids[-1] == ends, spec["model"]["ignore_merges"]] == flags
    splitter = tokenizers.Tokenizer.from_str(json.dumps(spec)).pre_tokenizer
    assert splitter is not None
    for text, lengths in zip(SPLITS["texts"], SPLITS["splits"][number], strict=True):
        if text.isascii() or name not in APPROXIMATED:
            parts = [part for part, _ in splitter.pre_tokenize_str(text)]
            assert list(map(len, parts)) == lengths, (text, parts)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_names_of_splits_that_are_not_read(name):
    metadata = {**CASES["gpt2"]["metadata"], "tokenizer.ggml.pre": name}
    with pytest.raises(UnsupportedError, match=f"tokenizer.ggml.pre is '{name}'; supported are"):
        made(metadata)


def test_a_file_that_does_not_say_how_to_split():
    metadata = dict(CASES["gpt2"]["metadata"])
    expected = made(metadata).encode("It's 12 words")
    del metadata["tokenizer.ggml.pre"]
    with pytest.warns(UserWarning, match="GPT-2's rules are taken"):
        tokenizer = tokenizer_from_gguf(of_file(metadata))
    assert tokenizer.encode("It's 12 words") == expected


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_vocabularies(name):
    tokenizer, expected = made(PUBLISHED[name]["metadata"]), PUBLISHED[name]
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_special_and_ordinary_added_tokens():
    tokenizer = made(CASES["llama_added"]["metadata"])
    special = {tokenizer.id_to_token(index) for index in tokenizer.special_ids}
    assert special == {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    ids = tokenizer.encode("a<tool_call>b<two words><|im_end|>")
    pieces = [tokenizer.id_to_token(index) for index in ids]
    assert pieces == ["<s>", "▁a", "<tool_call>", "▁b", "<two words>", "<|im_end|>"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool_call> b<two words>"
    # A user's text cannot end a turn, and ordinary tokens are found in it too.
    assert tokenizer.encode_user("<|im_end|><tool_call>")[-1] == tokenizer.token_to_id(
        "<tool_call>"
    )
    assert not tokenizer.special_ids & set(tokenizer.encode_user("<|im_end|><tool_call>"))


def test_runs_of_spaces_of_gemma():
    tokenizer = made(CASES["gemma"]["metadata"])
    pieces = [tokenizer.id_to_token(index) for index in tokenizer.encode("a  b   c\n\n")]
    assert pieces == ["<bos>", "a", "  ", "b", "   ", "c", "\n\n"]


def test_sentinels():
    """T5's are the first padding tokens, mT5's are pieces of its model."""
    t5, mt5 = (made(CASES[name]["metadata"]) for name in ("t5", "mt5"))
    size = len(t5) - 100
    assert [t5.token_to_id(f"<extra_id_{n}>") for n in (0, 99)] == [size + 99, size]
    assert t5.encode("<extra_id_0> a")[0] == size + 99
    piece = mt5.token_to_id("▁<extra_id_0>")
    assert piece is not None
    assert mt5.encode("The <extra_id_0> a")[1:2] == [piece]
    saved = made(CASES["t5_saved"]["metadata"])
    assert saved.encode("a <extra_id_0>b") == t5.encode("a <extra_id_0>b")


def test_lost_scores_are_said():
    with pytest.warns(UserWarning, match=r"scores: all tokens have the score -1000.*load the Hug"):
        tokenizer_from_gguf(of_file(CASES["llama_json"]["metadata"]))


def test_the_name_of_a_built_in_template():
    metadata = CASES["tekken_json_5"]["metadata"]
    assert metadata["tokenizer.chat_template"] == "mistral-v7-tekken"
    with pytest.warns(UserWarning, match="'mistral-v7-tekken', the name of a template inside"):
        tokenizer = tokenizer_from_gguf(of_file(metadata))
    with pytest.raises(TemplateError):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("kind", [1, 4])
@pytest.mark.parametrize("name", ["llama_added", "qwen2_5"])
def test_control_tokens_with_another_type(name, kind):
    """As in llama.cpp, they are special: a user's text cannot end a turn."""
    metadata = dict(CASES[name]["metadata"])
    expected = made(metadata)
    index = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    types = list(metadata["tokenizer.ggml.token_type"])
    assert types[index] == 3
    types[index] = kind
    tokenizer = made({**metadata, "tokenizer.ggml.token_type": types})
    assert tokenizer.special_ids == expected.special_ids
    for text in CASES[name]["texts"]:
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.encode_user(text) == expected.encode_user(text)


def test_an_ordinary_token_with_the_text_of_eos():
    """Qwen2's vocabulary has a word ``</s>``, which its own tokenizer does not single out."""
    metadata = dict(PUBLISHED["qwen2"]["metadata"])
    tokens = [*metadata["tokenizer.ggml.tokens"], "</s>"]
    types = [*metadata["tokenizer.ggml.token_type"], 1]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    ids = made({**metadata, **fields}).encode("a</s>")
    assert ids == made(metadata).encode("a</s>")


def test_empty_tokens():
    metadata = dict(CASES["qwen2_5"]["metadata"])
    fields = {
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], "", ""],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], 1, 3],
    }
    tokenizer = made({**metadata, **fields})
    assert len(tokenizer) == len(made(metadata)) + 2
    assert tokenizer.encode("Hello") == made(metadata).encode("Hello")


def test_padding_that_is_called_unknown():
    """Other tokens than the unknown one may be typed so, as in llama.cpp's own Phi-3."""
    metadata = dict(CASES["llama"]["metadata"])
    types = [2 if kind == 5 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    assert types.count(2) > 10
    tokenizer, expected = made({**metadata, "tokenizer.ggml.token_type": types}), made(metadata)
    assert tokenizer.unk_token == "<unk>"
    for text in CASES["llama"]["texts"]:
        assert tokenizer.encode(text) == expected.encode(text)


def test_tokens_of_phi_3_take_white_space():
    metadata = {**CASES["llama_added"]["metadata"], "general.name": "Phi-3 mini"}
    tokenizer = made(metadata)
    assert tokenizer.encode("<|im_end|>\n a") == tokenizer.encode("<|im_end|>a")
    assert tokenizer.encode("<s>\n") != tokenizer.encode("<s>")


def test_named_tokens_without_keys():
    metadata = {k: v for k, v in CASES["llama"]["metadata"].items() if not k.endswith("_token_id")}
    tokenizer = made(metadata)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )
    missing = {**metadata, "tokenizer.ggml.padding_token_id": 2**32 - 1}
    assert made(missing).pad_token is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": lambda t: ["a"] * len(t)}, "not a sentencepiece model"),
        ({"tokens": lambda t: ["", *t[1:]]}, None),
        ({"scores": lambda t: t[:5]}, "scores has 5 entries"),
        ({"unknown_token_id": lambda t: 10**6}, "unknown_token_id is 1000000, but there are"),
        ({"unknown_token_id": lambda t: "0"}, "unknown_token_id is '0', not int"),
        ({"add_space_prefix": lambda t: 1}, "add_space_prefix is '1', not bool"),
        ({"token_type": lambda t: [7] * len(t)}, "types other than 1 to 6"),
        ({"token_type": lambda t: [2] * len(t)}, None),
        ({"token_type": lambda t: [4] * len(t)}, None),
    ],
)
def test_hostile_edits(changes, message):
    metadata = dict(CASES["llama"]["metadata"])
    for key, change in changes.items():
        name = f"tokenizer.ggml.{key}"
        metadata[name] = change(metadata.get(name))
    if message is None:
        assert made(metadata).encode("Hello")
    else:
        with pytest.raises((TokenizerError, UnsupportedError), match=message):
            made(metadata)
