"""Random small sentencepiece models over the trainer's options: ids and texts are the library's."""

from __future__ import annotations

import io
import json
import random
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import paths
import pytest
import sentencepiece
from small_tokenizers import check_streams

from jaxllm.tokenizers import Tokenizer, load_tokenizer

TEXTS = runpy.run_path(str(paths.DATA / "tokenizers" / "texts.py"))
RULES = {
    "ligatures": "A0\t20\n9\t20\nA\t20\nFB01\t66 69\n2460\t31\n",
    # Composition in two steps, of which the longest match decides.
    "kana": "304B 3099\t304C\n1112 1161\tD558\n1112 1161 11AB\tD55C\n",
}
KANA = ["か\u3099く", "\u1112\u1161\u11abか", "\u1112\u1161 か", "がくせい 한국"]
FIRST = {"fairseq": (0, 1, 2, -1), "t5": (2, -1, 1, 0)}  # unk, bos, eos, pad
FAIRSEQ = ("<s>", "<pad>", "</s>", "<unk>")
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "LlamaTokenizer": ("tokenizer.model", "fairseq", {"add_bos_token": False}),
    "GemmaTokenizer": (
        "tokenizer.model",
        "fairseq",
        {"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>", "pad_token": None},
    ),
    "T5Tokenizer": ("spiece.model", "t5", {}),
    "MBartTokenizer": ("sentencepiece.bpe.model", "fairseq", {}),
    "MBart50Tokenizer": ("sentencepiece.bpe.model", "fairseq", {}),
    "NllbTokenizer": (
        "sentencepiece.bpe.model",
        "fairseq",
        {"additional_special_tokens": ["eng_Latn", "fra_Latn"]},
    ),
    "M2M100Tokenizer": ("sentencepiece.bpe.model", "fairseq", {}),
    "MarianTokenizer": ("source.spm", "fairseq", {}),
    "PegasusTokenizer": ("spiece.model", "t5", {}),
    "XGLMTokenizer": ("sentencepiece.bpe.model", "fairseq", {}),
}


def train(rng: random.Random, folder: Path, first: str) -> tuple[bytes, dict[str, Any]]:
    """A small model with random options of the trainer."""
    flags = ("byte_fallback", "treat_whitespace_as_suffix", "split_digits")
    options: dict[str, Any] = {name: rng.random() < 0.4 for name in flags}
    for name in ("add_dummy_prefix", "remove_extra_whitespaces"):
        options[name] = rng.random() < 0.6
    options["model_type"] = rng.choice(("unigram", "bpe", "char"))
    options["allow_whitespace_only_pieces"] = rng.random() < 0.5
    symbols = rng.sample(["<table>", "\n", "▁▁", "▁▁▁", "the", "a b", "[INST]", "12"], 3)
    options["user_defined_symbols"] = symbols if rng.random() < 0.5 else []
    options["control_symbols"] = ["<ctl>"] if rng.random() < 0.3 else []
    unk, bos, eos, pad = FIRST[first]
    options |= {"unk_id": unk, "bos_id": bos, "eos_id": eos, "pad_id": pad}
    rule = rng.choice((None, *RULES))
    if rule is None:
        options["normalization_rule_name"] = "identity"
    else:
        options["normalization_rule_tsv"] = str(folder / "rules.tsv")
        (folder / "rules.tsv").write_text(RULES[rule])
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS["CORPUS"], *KANA * 3]),
        model_writer=file,
        vocab_size=380 if options["byte_fallback"] else 150,
        hard_vocab_limit=False,
        character_coverage=0.98,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    return file.getvalue(), options


def write(folder: Path, name: str, model: bytes) -> Tokenizer:
    file, _, config = CLASSES[name]
    (folder / file).write_bytes(model)
    pieces = pieces_of(model)
    if name in ("MarianTokenizer", "M2M100Tokenizer"):
        (folder / "target.spm").write_bytes(model)
        tokens = dict.fromkeys([*FAIRSEQ, *reversed(pieces[3:])])
        (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    config = {"tokenizer_class": name, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert type(tokenizer).__name__ == name
    assert tokenizer is not None
    return tokenizer


def pieces_of(model: bytes) -> list[str]:
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    return processor.id_to_piece(list(range(len(processor))))


def ids_of_pieces(name: str, tokenizer: Tokenizer, model: bytes) -> list[int]:
    """The id of each of the model's pieces, by the definition of the class."""
    pieces, unknown = pieces_of(model), tokenizer.unk_token_id
    assert unknown is not None
    match name:
        case "LlamaTokenizer" | "GemmaTokenizer" | "T5Tokenizer":
            return list(range(len(pieces)))
        case "PegasusTokenizer":
            return [index + 103 for index in range(len(pieces))]
        case "MarianTokenizer" | "M2M100Tokenizer":
            vocabulary = json.loads(tokenizer._files["vocab.json"])
            return [vocabulary.get(piece, unknown) for piece in pieces]
        case _:
            return [unknown, *(index + 1 for index in range(1, len(pieces)))]


def texts(rng: random.Random) -> list[str]:
    drawn = rng.sample(TEXTS["TEXTS"], 8) + TEXTS["random_texts"](6, rng.randrange(10**6))
    return [*drawn, *KANA, "a\n\n  b\t the 12 <table>[INST] a b "]


def without(text: str, specials: Sequence[str]) -> str:
    for special in specials:
        text = text.replace(special, "")
    return text


def check(name: str, rng: random.Random, folder: Path) -> None:
    model, options = train(rng, folder, CLASSES[name][1])
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    tokenizer = write(folder, name, model)
    table = ids_of_pieces(name, tokenizer, model)
    specials = sorted(tokenizer.special_tokens)
    own = [token for token in ("</s>", "<s>", "<pad>", "<unk>") if token in specials]
    others = [token for token in specials if token not in own]
    own += rng.sample(others, min(3, len(others)))
    pool = [without(text, specials) for text in texts(rng)]
    for text in pool:
        ids = [table[index] for index in processor.encode(text)]
        where = (options, text)
        assert tokenizer.encode(text, add_special_tokens=False) == ids, where
        if tokenizer.unk_token_id not in ids:  # which is text in the library
            ours, library = tokenizer.decode(ids), processor.decode(processor.encode(text))
            # As in transformers, T5 and its relatives strip spaces, which such a text can end in.
            may_strip = "▁" in text and name in (
                "T5Tokenizer",
                "MarianTokenizer",
                "M2M100Tokenizer",
            )
            assert ours in (library, library.strip() if may_strip else library), where
    for _ in range(8):
        parts = [rng.choice(pool) for _ in range(3)]
        marks = [rng.choice(own) for _ in range(2)]
        flags = [tokenizer.special_tokens[mark] for mark in marks]
        if any(flag.lstrip or flag.rstrip for flag in flags):
            parts = [part.strip() for part in parts]
        text = parts[0] + marks[0] + parts[1] + marks[1] + parts[2]
        rows = [[table[index] for index in processor.encode(part)] for part in parts]
        codes = [tokenizer.token_to_id(mark) for mark in marks]
        ids = [*rows[0], codes[0], *rows[1], codes[1], *rows[2]]
        if not name.startswith("Marian") or not text.startswith(">>"):
            assert tokenizer.encode(text, add_special_tokens=False) == ids, (options, text)
        check_streams(tokenizer, ids)
    for _ in range(20):
        check_streams(tokenizer, [rng.randrange(len(tokenizer)) for _ in range(9)])


@pytest.mark.parametrize("name", CLASSES)
def test_random_models(name, tmp_path):
    for seed in range(6):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(name, random.Random(f"{name}{seed}"), folder)


@pytest.mark.ci
@pytest.mark.parametrize("name", CLASSES)
def test_many_random_models(name, tmp_path):
    for seed in range(6, 80):
        folder = tmp_path / str(seed)
        folder.mkdir()
        check(name, random.Random(f"{name}{seed}"), folder)
