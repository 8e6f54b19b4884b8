"""Makes byte_level_classes_4.json or _5.json: ids of classes with GPT-2's files, other defaults.

Run it in this folder, with transformers==4.57.6 and with transformers==5.24.0; the file's name has
the major version. The vocabulary is that of fast/gpt2.json. Version 4 has no GPT-NeoX class that
reads vocab.json. Its slow and fast classes must agree about single texts, unless a space is put
before a text: the fast ones put it after each special token too.
"""

import json
import tempfile
from pathlib import Path

import transformers
from texts import TEXTS
from transformers import AutoTokenizer

HERE = Path(__file__).parent
MAJOR = transformers.__version__.partition(".")[0]
NAMES = {
    "4": ("CodeGenTokenizer", "BlenderbotTokenizer"),
    "5": ("CodeGenTokenizer", "GPTNeoXTokenizer"),
}[MAJOR]
CONFIGS = ({}, {"add_prefix_space": False}, {"add_prefix_space": True})
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
OWN = ["", "No <mask> in<pad>", "x </s> y", "e\u0301 \u1112\u1161\u11ab", "a\n b"]


def outcome(folder: str, config: dict) -> dict:
    (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [tokenizer(text).input_ids for text in [*TEXTS, *OWN]]
    if MAJOR == "4":
        slow = AutoTokenizer.from_pretrained(folder, use_fast=False)
        pairs = zip([*TEXTS, *OWN], rows, strict=True)
        spaced = config.get("add_prefix_space", False)
        assert spaced or all(slow(text).input_ids == row for text, row in pairs), config
    return {
        "config": config,
        "length": len(tokenizer),
        "named": {name: getattr(tokenizer, name) for name in NAMED},
        "ids": rows,
        "pair": tokenizer("Hello", "world").input_ids,
    }


def main() -> None:
    model = json.loads((HERE / "fast" / "gpt2.json").read_text(encoding="utf-8"))["model"]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(json.dumps(model["vocab"]))
        merges = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        (Path(folder) / "merges.txt").write_text("\n".join(merges))
        configs = [{"tokenizer_class": name, **config} for name in NAMES for config in CONFIGS]
        cases = [outcome(folder, config) for config in configs]
    content = {
        "transformers": transformers.__version__,
        "texts": [*TEXTS, *OWN],
        "cases": cases,
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / f"byte_level_classes_{MAJOR}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
