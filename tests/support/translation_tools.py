"""Reference tokenizers of translation models: tests/data/tokenizers/translation_cases.json."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import paths

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
