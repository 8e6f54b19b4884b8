"""Reference tokenizers of translation models: tests/data/tokenizers/translation_cases.json."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import paths
from safetensors.numpy import save_file

FILE = paths.DATA / "tokenizers" / "translation_cases.json"
DATA = json.loads(FILE.read_text(encoding="utf-8"))
CASES = DATA["cases"]


def write(folder: Path, name: str, **config: Any) -> Path:
    """Writes the folder of a case's tokenizer, with changes to its tokenizer_config.json."""
    case = CASES[name]
    folder.mkdir(exist_ok=True)
    for file, model in case["files"].items():
        (folder / file).write_bytes(base64.b64decode(DATA["models"][model]))
    if case["vocab"] is not None:
        (folder / "vocab.json").write_text(json.dumps(DATA["vocabularies"][case["vocab"]]))
    if case["json"] is not None:
        (folder / "tokenizer.json").write_text(json.dumps(DATA["fast"][case["json"]]))
    (folder / "tokenizer_config.json").write_text(json.dumps({**case["config"], **config}))
    return folder


def random_weights(shapes: dict[str, list[int]], scale: float) -> dict[str, np.ndarray]:
    """The weights of a tiny model, the same in every run: large enough for logits that differ."""
    rng = np.random.default_rng(0)
    return {
        name: (scale * rng.standard_normal(shape)).astype(np.float32)
        for name, shape in sorted(shapes.items())
    }


TARGETS = json.loads((paths.DATA / "translation" / "target_scores.json").read_text())["cases"]


def write_model(folder: Path, name: str, **config: Any) -> Path:
    """Writes a tiny model of tests/data/translation, with changes of its config."""
    case = TARGETS[name]
    folder.mkdir(exist_ok=True)
    if name == "t5":
        shutil.copyfile(FILE.parent / "t5.model", folder / "spiece.model")
        tokenizer = {"tokenizer_class": "T5Tokenizer", "extra_ids": 0}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    else:
        write(folder, name, tgt_lang=None)
    start = {} if name != "mbart" else {"decoder_start_token_id": case["config"]["eos_token_id"]}
    (folder / "config.json").write_text(json.dumps({**case["config"], **start, **config}))
    weights = random_weights(case["shapes"], case["scale"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
