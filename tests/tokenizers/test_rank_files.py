"""Tokenizers from files of ranks: tiktoken's format and tekken.json; formats that are named."""

from __future__ import annotations

import base64
import itertools
import json
import random
from pathlib import Path

import paths
import pytest
import sentencepiece

from jaxllm.common.errors import TokenizerError, UnsupportedError
from jaxllm.tokenizers import Tokenizer, load_tokenizer
from jaxllm.tokenizers.rank_files import LLAMA3_SPECIAL, LLAMA31_SPECIAL

DATA = paths.DATA / "tokenizers"
CASES = json.loads((DATA / "rank_cases.json").read_text(encoding="utf-8"))
TEKKEN = {
    version: {**case["spec"], "vocab": CASES["tekken"]["v3"]["spec"]["vocab"]}
    for version, case in CASES["tekken"].items()
}


def tiktoken(folder: Path, lines: str = CASES["tiktoken"], **config) -> Tokenizer:
    (folder / "tokenizer.model").write_text(lines)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def tekken(folder: Path, spec: dict) -> Tokenizer:
    (folder / "tekken.json").write_text(json.dumps(spec))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


def test_ids_of_tiktoken(tmp_path):
    tokenizer = tiktoken(tmp_path)
    for text, ids in zip(CASES["texts"], CASES["ids"], strict=True):
        plain = {"add_special_tokens": False, "split_special_tokens": True}
        assert tokenizer.encode(text, **plain) == ids
        assert tokenizer.decode(ids) == text
    size = CASES["tiktoken"].count("\n")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (size, size + 1)
    assert tokenizer.encode("a<|eot_id|>")[0::2] == [size, size + 9]
    assert tokenizer.padding_side == "left"


def test_special_tokens_of_llama_3(tmp_path):
    """Those of 3.0, of 3.1, and those that the folder lists."""
    size = CASES["tiktoken"].count("\n")
    for scaling, names in ((None, LLAMA3_SPECIAL), ({"rope_type": "llama3"}, LLAMA31_SPECIAL)):
        assert len(set(names)) == 256
        tokenizer = tiktoken(tmp_path, rope_scaling=scaling)
        assert len(tokenizer) == size + 256
        assert tuple(tokenizer.id_to_token(size + n) for n in range(256)) == names
    added = {str(size): {"content": "<s>", "special": True}}
    config = {"added_tokens_decoder": added, "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = tiktoken(tmp_path)
    assert (len(tokenizer), tokenizer.encode("a")[0]) == (size + 1, size)


@pytest.mark.parametrize("version", TEKKEN)
def test_ids_of_tekkenizer(tmp_path, version):
    tokenizer, expected = tekken(tmp_path, TEKKEN[version]), CASES["tekken"][version]
    columns = zip(CASES["texts"], expected["ids"], expected["shown"], strict=True)
    for text, ids, shown in columns:
        assert tokenizer.encode(text, split_special_tokens=True) == ids
        assert tokenizer.decode(ids) == shown
    assert [tokenizer.id_to_token(index) for index in range(6)] == expected["named"]
    assert tokenizer.special_ids == frozenset(range(30))


@pytest.mark.parametrize("kind", ["tiktoken", "tekken"])
def test_saved_folders(tmp_path, kind):
    """They keep the file, and hold a tokenizer.json, which decides; tokens can be added."""
    make = {"tiktoken": tiktoken, "tekken": lambda folder: tekken(folder, TEKKEN["v7"])}[kind]
    (tmp_path / "a").mkdir()
    tokenizer = make(tmp_path / "a")
    tokenizer.save(tmp_path / "b")
    file = {"tiktoken": "tokenizer.model", "tekken": "tekken.json"}[kind]
    assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "a" / file).read_bytes()
    again = load_tokenizer(tmp_path / "b")
    assert again is not None
    texts = [*CASES["texts"], "a</s>[INST]<|eot_id|>b"]
    assert [again.encode(text) for text in texts] == [tokenizer.encode(text) for text in texts]
    assert again.padding_side == "left"
    size = len(again)
    again.add_tokens(["<new>"])
    assert again.encode("a<new>")[-1] == size


def words_of(tokens: list[bytes], word: bytes) -> list[int]:
    """tiktoken's algorithm: the neighbours that make the token of the lowest rank are joined."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    if word in ranks:
        return [ranks[word]]
    parts = [bytes([byte]) for byte in word]
    while True:
        joined = [ranks.get(a + b) for a, b in itertools.pairwise(parts)]
        found = [rank for rank in joined if rank is not None]
        if not found:
            return [ranks[part] for part in parts]
        place = joined.index(min(found))
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@pytest.mark.parametrize("seed", range(20))
def test_random_ranks(tmp_path, seed):
    rng = random.Random(seed)
    tokens = [bytes([byte]) for byte in rng.sample(range(256), 256)]
    known = set(tokens)
    while len(tokens) < 330:
        token = rng.choice(tokens[:3] + tokens[256:] + [b"a", b"b"]) + rng.choice(
            [b"a", b"b", b"ab"]
        )
        if len(token) < 9 and token not in known:
            known.add(token)
            tokens.append(token)
    lines = "".join(f"{base64.b64encode(t).decode()} {rank}\n" for rank, t in enumerate(tokens))
    tokenizer = tiktoken(tmp_path, lines)
    for _ in range(40):
        word = "".join(rng.choice("ab") for _ in range(rng.randrange(1, 24)))
        assert tokenizer.encode(word, add_special_tokens=False) == words_of(tokens, word.encode())


LINES = CASES["tiktoken"].splitlines()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (LINES[:200], "56 of the 256 bytes have no rank"),
        ([*LINES, LINES[0]], "no token has the rank 500, of 501 tokens"),
        ([*LINES[:300], *LINES[301:]], "no token has the rank 300, of 499 tokens"),
        ([*LINES, f"{LINES[400].split()[0]} 500"], r"the token .* has two ranks"),
        ([*LINES, "YQ=x 500"], r"line 501 is 'YQ=x 500', not a token in base64 and its rank"),
        ([*LINES, "YQ 500"], r"is not a token in base64"),
        ([*LINES, "<html>"], "line 501 is '<html>'"),
        (
            [*LINES, f"{base64.b64encode(b'x' * 2000).decode()} 500"],
            "up to 2000 bytes, but at most",
        ),
    ],
)
def test_hostile_tiktoken_files(tmp_path, lines, message):
    with pytest.raises(TokenizerError, match=message):
        tiktoken(tmp_path, "\n".join(lines))


def changed(*path: object, value: object) -> dict:
    """A tekken.json with another value at a path."""
    spec = json.loads(json.dumps(TEKKEN["v7"]))
    place = spec
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return spec


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "holds list, not an object"),
        (changed("config", value=3), "config: int, not an object"),
        (
            changed("config", "pattern", value="a+"),
            "pattern is 'a\\+', which is none",
        ),
        (changed("config", "version", value="v99"), "version is 'v99'; supported are v1, v2"),
        (
            changed("config", "default_vocab_size", value=10**12),
            "default_vocab_size is 1000000000000",
        ),
        (changed("config", "default_vocab_size", value="many"), "default_vocab_size is 'many'"),
        (
            changed("config", "default_num_special_tokens", value=10**9),
            "special_tokens 1000000000,",
        ),
        (
            changed("config", "default_num_special_tokens", value=10),
            "30 tokens, but config says 10",
        ),
        (
            changed("special_tokens", 3, "token_str", value="<s>"),
            "30 tokens, but config says 30 dif",
        ),
        (changed("special_tokens", 3, "rank", value=7), "special_tokens: no token has the rank 3"),
        (changed("special_tokens", value=None), "special_tokens is None, not a list of tokens"),
        (changed("vocab", 4, value=None), r"vocab\[4\] is None, not a token_bytes with a rank"),
        (changed("vocab", 4, "rank", value=5), "vocab: no token has the rank 4"),
        (changed("vocab", 4, "token_bytes", value="?"), r"vocab: '\?' is not a token in base64"),
        (changed("vocab", 4, "token_bytes", value=4), r"not a token_bytes with a rank"),
        (changed("tools", value={}), r"unknown fields \['tools'\]"),
    ],
)
def test_hostile_tekken_files(tmp_path, spec, message):
    if "special_tokens is None" in message:
        spec["config"]["version"] = "v11"
    with pytest.raises((TokenizerError, UnsupportedError), match=message):
        tekken(tmp_path, spec)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("vocab.txt", r"vocab\.txt: a WordPiece vocabulary"),
        ("qwen.tiktoken", r"qwen\.tiktoken: ranks in tiktoken's format"),
        ("encoder.json", r"encoder\.json: GPT-2's original vocabulary; call it vocab\.json"),
        ("spm.model", r"spm\.model: a sentencepiece model of another class"),
        ("tokenizer.model.v3", r"tokenizer\.model\.v3: Mistral's sentencepiece model with"),
    ],
)
def test_other_formats_are_named(tmp_path, file, message):
    (tmp_path / file).write_text("x")
    with pytest.raises(UnsupportedError, match=message):
        load_tokenizer(tmp_path)


def test_ranks_beside_a_tokenizer_json(tmp_path):
    spec = (DATA / "fast" / "gpt2.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(spec)
    tokenizer = tiktoken(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    expected = load_tokenizer(tmp_path)
    assert expected is not None
    assert tokenizer.encode("Hello world") == expected.encode("Hello world")


@pytest.mark.parametrize("name", ["CodeGenTokenizer", "GPTNeoXTokenizer"])
def test_classes_with_the_tokenizer_of_gpt2(tmp_path, name):
    model = json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    ids = []
    for each in (name, "GPT2Tokenizer"):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": each}))
        tokenizer = load_tokenizer(tmp_path)
        assert tokenizer is not None
        ids.append([tokenizer.encode(text) for text in CASES["texts"]])
    assert ids[0] == ids[1]


def test_gemma_from_its_sentencepiece_model(tmp_path):
    """sentencepiece's ids between special tokens, and its texts."""
    symbols = ["\n", "\n\n", "▁▁", "▁▁▁", "<table>"]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["The garden is quiet in the morning", "a b c d e f"] * 20),
        model_prefix=str(tmp_path / "tokenizer"),
        model_type="bpe",
        byte_fallback=True,
        vocab_size=320,
        hard_vocab_limit=False,
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        user_defined_symbols=symbols,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        minloglevel=2,
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    )
    marks = ["<start_of_turn>", "<end_of_turn>"]
    config = {"tokenizer_class": "GemmaTokenizer", "additional_special_tokens": marks}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.vocab").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    for text in [*CASES["texts"], "a  b\n\n   <table>c"]:
        text = text.replace("▁", "")  # which is a space to sentencepiece
        for special in tokenizer.special_tokens:
            text = text.replace(special, "")
        ids = model.encode(text)
        assert tokenizer.encode(text) == [2, *ids]
        assert tokenizer.decode(ids) == model.decode(ids)
        start, end = (model.piece_to_id(mark) for mark in marks)
        marked = f"{marks[0]}{text}{marks[1]}\n{text}"
        both = [2, start, *ids, end, *model.encode(f"\n{text}")]
        assert tokenizer.encode(marked) == both
        assert tokenizer.decode(both) == f"<bos>{marked}"
        assert tokenizer.decode(both, skip_special_tokens=True) == f"{text}\n{text}"
