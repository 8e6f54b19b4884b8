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


@pytest.mark.parametrize(
    ("rope", "names", "last"),
    [
        (None, {4: "reserved_special_token_2", 8: "reserved_special_token_4", 10: 5}, 250),
        (
            {"rope_type": "llama3"},
            {4: "finetune_right_pad_id", 5: 2, 8: "eom_id", 10: "python_tag", 11: 3},
            247,
        ),
    ],
    ids=["3.0", "3.1"],
)
def test_special_tokens_of_llama_3(tmp_path, rope, names, last):
    """The ids of the published tokenizer.json, after 128,000 ranks there."""
    size = CASES["tiktoken"].count("\n")
    names = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 9: "eot_id"} | names
    for scaling in ({"rope_scaling": rope}, {"rope_parameters": rope}):
        tokenizer = tiktoken(tmp_path, **scaling)
        assert len(tokenizer) == size + 256
        assert tokenizer.special_ids == frozenset(range(size, size + 256))
        for number, name in (names | {2: 0, 3: 1, 255: last}).items():
            text = f"reserved_special_token_{name}" if isinstance(name, int) else name
            assert tokenizer.id_to_token(size + number) == f"<|{text}|>"
    assert (tokenizer.unk_token, tokenizer.pad_token) == (None, None)


def test_special_tokens_that_the_folder_lists(tmp_path):
    size = CASES["tiktoken"].count("\n")
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({"extra_special_tokens": ["<|begin_of_text|>", "<|x|>"]}))
    tokenizer = tiktoken(tmp_path)
    assert (len(tokenizer), tokenizer.encode("<|x|>")) == (size + 2, [size, size + 1])
    # A list that does not begin with Llama's is in addition to it.
    file.write_text(json.dumps({"extra_special_tokens": ["<|x|>"]}))
    tokenizer = tiktoken(tmp_path)
    assert (len(tokenizer), tokenizer.encode("<|x|>")) == (size + 257, [size, size + 256])
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
        (LINES[:200], "56 of the 256 single bytes are no tokens"),
        ([*LINES, LINES[0]], "line 501: a second token has the rank 0"),
        ([*LINES[:300], *LINES[301:]], "no token has the rank 300, though ranks go up to 499"),
        ([*LINES, "eHl6enk= 999999999"], "no token has the rank 500, though ranks go up to 999999"),
        ([*LINES, f"{LINES[400].split()[0]} 500"], r"the token .* appears twice"),
        ([*LINES, "YQ=x 500"], r"line 501 is 'YQ=x 500', not a token in base64 and its rank"),
        ([*LINES, "YQ 500"], r"is not a token in base64"),
        ([*LINES, "<html>"], "line 501 is '<html>'"),
        (
            [*LINES, f"{base64.b64encode(b'x' * 257).decode()} 500"],
            "a token of 257 bytes, but at most 256 are taken",
        ),
        ([*LINES, f"{'eHh4' * 10**6} 500"], "line 501 is 'eHh4eHh4"),
        ([*LINES, "eHh4" + " " * 10**6 + "500"], "line 501 is 'eHh4  "),
        (["AA== 0", *[""] * (2**19 + 1)], "more than 524288 lines"),
        ([*LINES, "eHl6\u00e9 500"], "line 501 is 'eHl6"),
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
        (changed("config", value=3), "config: version is None"),
        (changed("config", "pattern", value="(a+)+$"), r"pattern '\(a\+\)\+\$'; supported are"),
        (changed("config", "version", value="v99"), "version is 'v99' and"),
        (
            changed("config", "default_vocab_size", value=10**12),
            r"\[500, 1000000000000, 30\], which",
        ),
        (changed("config", "default_vocab_size", value=2**19 + 1), r"\[500, 524289, 30\], which"),
        (changed("config", "default_vocab_size", value=285), r"\[500, 285, 30\], which does not"),
        (changed("config", "default_vocab_size", value="many"), r"\[500, 'many', 30\], which"),
        (changed("config", "num_vocab_tokens", value=None), r"\[None, 510, 30\], which does not"),
        (
            changed("config", "default_num_special_tokens", value=10**9),
            r"\[500, 510, 1000000000\], which does not fit 500 tokens",
        ),
        (
            changed("config", "default_num_special_tokens", value=10),
            r"\[500, 510, 10\], which does not fit 500 tokens, .* and 30 special tokens",
        ),
        (changed("config", "default_num_special_tokens", value=-1), r"\[500, 510, -1\], which"),
        (changed("config", "bos", value=True), r"unknown fields \['bos'\]"),
        (changed("special_tokens", 3, "token_str", value="<s>"), "the token '<s>' appears twice"),
        (
            changed("special_tokens", 3, "token_str", value=""),
            r"special_tokens\[3\] is .*token_str",
        ),
        (changed("special_tokens", 3, "rank", value=7), r"special_tokens\[3\] .* and rank 3"),
        (changed("special_tokens", value=None), "special_tokens is None, not a list"),
        (changed("special_tokens", value={}), "special_tokens is {}, not a list"),
        (changed("vocab", value=None), "vocab is None, not a list"),
        (changed("vocab", 4, value=None), r"vocab\[4\] is None, not an object with token_bytes"),
        (changed("vocab", 4, "rank", value=5), r"vocab\[4\] is .* with token_bytes and rank 4"),
        (changed("vocab", 4, "token_bytes", value="?"), r"vocab: '\?' is not a token in base64"),
        (changed("vocab", 4, "token_bytes", value="é"), r"vocab: 'é' is not a token in base64"),
        (changed("vocab", 4, "token_bytes", value=4), r"not an object with token_bytes"),
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
        ("vocab.bpe", r"vocab\.bpe: GPT-2's original merges; call it merges\.txt"),
        ("bpe.codes", r"bpe\.codes: merges of fastBPE"),
        ("sentencepiece.model", r"sentencepiece\.model: a sentencepiece model of another class"),
        ("spm.model", r"spm\.model: a sentencepiece model of another class"),
        ("tokenizer.model.v3", r"tokenizer\.model\.v3: Mistral's sentencepiece model with"),
    ],
)
def test_other_formats_are_named(tmp_path, file, message):
    (tmp_path / file).write_text("x")
    with pytest.raises(UnsupportedError, match=message):
        load_tokenizer(tmp_path)


def test_ranks_beside_a_tokenizer_json(tmp_path):
    """It decides, with no token of Llama 2's, and the file with the ranks is kept."""
    spec = (DATA / "fast" / "gpt2.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(spec)
    tokenizer = tiktoken(tmp_path)
    tokenizer.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "tokenizer.model").read_text() == CASES["tiktoken"]
    (tmp_path / "tokenizer.model").unlink()
    expected = load_tokenizer(tmp_path)
    assert expected is not None
    for each in (tokenizer, load_tokenizer(tmp_path / "saved")):
        assert each is not None
        assert each.get_vocab() == expected.get_vocab()
        assert each.special_tokens_map == expected.special_tokens_map == {}
        assert each.encode("Hello world") == expected.encode("Hello world")


def test_options_and_classes_of_rank_files(tmp_path):
    tokenizer = tiktoken(tmp_path)
    ids = tokenizer.encode("a", add_special_tokens=False)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert tokenizer.encode("a", "a") == [bos, *ids, bos, *ids]
    other = load_tokenizer(tmp_path, add_bos_token=False, add_eos_token=True, padding_side="right")
    assert other is not None
    assert (other.encode("a"), other.padding_side) == ([*ids, eos], "right")
    with pytest.raises(UnsupportedError, match=r"legacy: without effect on the ranks"):
        load_tokenizer(tmp_path, legacy=False)
    with pytest.raises(TokenizerError, match="chat template"):
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}])
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "TikTokenTokenizer"}')
    with pytest.raises(UnsupportedError, match=r"a TikTokenTokenizer from .* tiktoken's format"):
        tiktoken(tmp_path)


CLASSES = [
    case | {"texts": cases["texts"]}
    for version in (4, 5)
    for cases in [json.loads((DATA / f"byte_level_classes_{version}.json").read_text())]
    for case in cases["cases"]
]


@pytest.mark.parametrize(
    "case", CLASSES, ids=lambda case: "-".join(map(str, case["config"].values()))
)
def test_classes_of_vocab_and_merges(tmp_path, case):
    """CodeGen, GPT-NeoX and Blenderbot, which has a space before a text by default."""
    model = json.loads((DATA / "fast" / "gpt2.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(map(" ".join, model["merges"])))
    config = case["config"]
    if config == {"tokenizer_class": "BlenderbotTokenizer"}:
        config = config | {"add_prefix_space": False}  # version 4's default
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer) == case["length"]
    assert {name: getattr(tokenizer, name) for name in case["named"]} == case["named"]
    assert [tokenizer.encode(text) for text in case["texts"]] == case["ids"]
    assert tokenizer.encode("Hello", "world") == case["pair"]
    if "Blenderbot" in config["tokenizer_class"]:
        (tmp_path / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "BlenderbotTokenizer"}'
        )
        default = load_tokenizer(tmp_path)
        assert default is not None
        assert default.encode("Hello") == default.encode(" Hello")


@pytest.mark.parametrize("kind", ["user_defined_symbols", "control_symbols"])
def test_gemma_from_its_sentencepiece_model(tmp_path, kind):
    """sentencepiece's ids between special tokens, and its texts."""
    marks = ["<start_of_turn>", "<end_of_turn>"]
    symbols = ["\n", "\n\n", "▁▁", "▁▁▁", "<table>"]
    symbols_of = {
        "user_defined_symbols": {"user_defined_symbols": [*symbols, *marks]},
        "control_symbols": {"control_symbols": marks},
    }
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
        minloglevel=2,
        **{"user_defined_symbols": symbols, "control_symbols": []} | symbols_of[kind],
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    )
    (tmp_path / "config.json").write_text('{"model_type": "gemma2"}')
    if kind == "control_symbols":
        config = {"tokenizer_class": "GemmaTokenizer", "legacy": False}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.vocab").unlink()
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert len(tokenizer) == tokenizer.vocab_size
    assert set(marks) < tokenizer.special_tokens.keys()
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
