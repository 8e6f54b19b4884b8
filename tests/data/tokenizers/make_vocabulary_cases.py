"""Makes vocabulary_cases.json: reference ids for tokenizers read from vocab.json and merges.txt.

Needs transformers==5.23.0; run it in this folder. The vocabulary is that of fast/gpt2.json; each
case is the content of config.json and of tokenizer_config.json, which choose the class.
"""

import json
import tempfile
from pathlib import Path

import transformers
from texts import TEXTS
from transformers import AutoTokenizer

HERE = Path(__file__).parent
CASES = {
    "roberta": ({"model_type": "t5"}, {"tokenizer_class": "RobertaTokenizer"}),
    "class in config.json": (
        {"model_type": "t5", "tokenizer_class": "RobertaTokenizer"},
        {"add_prefix_space": True, "mask_token": None},
    ),
    "qwen2": ({"model_type": "qwen2"}, {"tokenizer_class": "Qwen2TokenizerFast"}),
    "model type alone": ({"model_type": "qwen3"}, {"add_prefix_space": True}),
    "bart": ({"model_type": "bart"}, {"model_max_length": 1024}),
    "bart's class": ({}, {"tokenizer_class": "BartTokenizer", "add_prefix_space": True}),
    "gpt2": ({"model_type": "gpt2"}, {"add_prefix_space": True}),
}
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def write(folder: Path, config: dict, tokenizer_config: dict) -> None:
    model = json.loads((HERE / "fast" / "gpt2.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))


def outcome(config: dict, tokenizer_config: dict) -> dict:
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), config, tokenizer_config)
        tokenizer = AutoTokenizer.from_pretrained(name)
    return {
        "config": config,
        "tokenizer_config": tokenizer_config,
        "named": {name: getattr(tokenizer, name) for name in NAMED},
        "ids": [tokenizer(text).input_ids for text in TEXTS],
        "pair": tokenizer(*TEXTS[7:9]).input_ids,
    }


def main() -> None:
    content = {
        "transformers": transformers.__version__,
        "texts": TEXTS,
        "cases": {name: outcome(*case) for name, case in CASES.items()},
    }
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / "vocabulary_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
