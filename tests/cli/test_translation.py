"""Translation from end to end: models of two families learn made-up languages by `train.py`, and
`generate.py --input` translates rows that name their languages."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

from jaxllm.tokenizers import load_tokenizer
from jaxllm.tokenizers.sentencepiece_model import BPE, UNIGRAM, write_model

NORMAL, UNKNOWN, CONTROL = 1, 2, 3
LETTERS = "abcdeiklmnopstu"
WORDS = ("ba", "do", "ki", "lu", "me", "po", "sa", "ti")
DICTIONARIES = {
    "deu_Latn": dict(zip(WORDS, ("pa", "to", "ci", "nu", "ne", "bo", "ta", "di"), strict=True)),
    "fra_Latn": dict(zip(WORDS, ("ab", "od", "ik", "ul", "em", "op", "as", "it"), strict=True)),
}
CODES = ["eng_Latn", *DICTIONARIES]
PIECES = sorted({*WORDS, *(word for words in DICTIONARIES.values() for word in words.values())})
SIZES = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 32}
SIZES |= {f"{side}_attention_heads": 4 for side in ("encoder", "decoder")}
SIZES |= {f"{side}_ffn_dim": 128 for side in ("encoder", "decoder")}
SIZES |= {"scale_embedding": True, "dropout": 0.0, "attention_dropout": 0.0}


def sentencepiece_model(algorithm: int) -> bytes:
    """Pieces for words of two letters; BPE also has what they are merged from."""
    pieces = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    parts = ["▁", *LETTERS]
    if algorithm == BPE:
        parts += [f"▁{letter}" for letter in LETTERS]
    own = [*parts, *(f"▁{word}" for word in PIECES)]
    scores = range(len(own))
    if algorithm == UNIGRAM:  # a whole word is likelier than its parts
        pieces += [(piece, -1.0 if len(piece) > 2 else -9.0, NORMAL) for piece in own]
    else:
        pieces += [(piece, -float(n), NORMAL) for piece, n in zip(own, scores, strict=True)]
    return write_model(
        pieces,
        model_type=algorithm,
        unk_id=0,
        add_dummy_prefix=True,
        remove_extra_whitespaces=True,
        byte_fallback=False,
    )


def nllb_tokenizer(folder: Path) -> None:
    (folder / "sentencepiece.bpe.model").write_bytes(sentencepiece_model(BPE))
    config = {"tokenizer_class": "NllbTokenizer", "additional_special_tokens": CODES}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def marian_tokenizer(folder: Path) -> None:
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(sentencepiece_model(UNIGRAM))
    tokens = ["</s>", "<unk>", *(f"▁{word}" for word in PIECES), "▁", *LETTERS]
    tokens += [">>deu<<", ">>fra<<", "<pad>"]
    (folder / "vocab.json").write_text(json.dumps({token: n for n, token in enumerate(tokens)}))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "MarianTokenizer"}')


def translated(words: list[str], language: str) -> str:
    """In German the first word comes last."""
    moved = [*words[1:], words[0]] if language == "deu_Latn" else words
    return " ".join(DICTIONARIES[language][word] for word in moved)


def sentence_pairs(count: int, seed: int) -> list[tuple[list[str], str, str]]:
    rng = random.Random(seed)
    pairs = []
    for _ in range(count):
        words, language = rng.choices(WORDS, k=rng.randint(2, 5)), rng.choice(CODES[1:])
        pairs.append((words, language, translated(words, language)))
    return pairs


def row_of(family: str, words: list[str], language: str) -> dict[str, str]:
    """A source with its languages: columns for NLLB, and a token of the text for Marian."""
    if family == "marian":
        return {"source": f">>{language[:3]}<< {' '.join(words)}"}
    return {"source": " ".join(words), "src_lang": "eng_Latn", "tgt_lang": language}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def run(*arguments: object) -> str:
    command = [sys.executable, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("family", ["nllb", "marian"])
def test_made_up_languages(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    {"nllb": nllb_tokenizer, "marian": marian_tokenizer}[family](folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    special = {
        f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "eos")
    }
    is_marian = family == "marian"
    config = {
        **SIZES,
        **special,
        "model_type": "marian" if is_marian else "m2m_100",
        "bos_token_id": None if is_marian else tokenizer.bos_token_id,
        "decoder_start_token_id": special["pad_token_id" if is_marian else "eos_token_id"],
        "vocab_size": len(tokenizer),
        "activation_function": "swish" if is_marian else "relu",
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    }
    training, held_out = sentence_pairs(4000, seed=0), sentence_pairs(64, seed=1)
    write_rows(
        tmp_path / "train.jsonl",
        [row_of(family, words, lang) | {"target": text} for words, lang, text in training],
    )
    data = {"format": "seq2seq", "path": str(tmp_path / "train.jsonl"), "bucket": None}
    recipe = {
        "model": {"tokenizer": str(folder), "config": config},
        "data": data | {"max_length": 12, "max_target_length": 12},
        "batch_size": 64,
        "max_steps": 500,
        "optimizer": {
            "learning_rate": 3e-3,
            "schedule": "cosine",
            "warmup_steps": 50,
            "schedule_steps": 500,
        },
        "output_dir": str(tmp_path / "run"),
    }
    (tmp_path / "recipe.json").write_text(json.dumps(recipe))
    run(ROOT / "train.py", tmp_path / "recipe.json")
    run("-m", "jaxllm", "export", tmp_path / "run", tmp_path / "model")
    rows = [row_of(family, words, lang) for words, lang, _ in held_out]
    write_rows(tmp_path / "rows.jsonl", [{"prompt": r.pop("source"), **r} for r in rows])
    run(
        ROOT / "generate.py",
        *("--model", tmp_path / "model", "--input", tmp_path / "rows.jsonl"),
        *("--output", tmp_path / "out.jsonl", "--max-new-tokens", 10),
    )
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    exact = sum(t == text for t, (_, _, text) in zip(texts, held_out, strict=True)) / len(held_out)
    print(f"{family}: exact match {exact:.3f}")
    assert exact >= 0.95
