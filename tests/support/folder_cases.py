"""Folders of tokenizers that transformers saved: tests/data/tokenizers/folder_cases_*.json."""

from __future__ import annotations

import json
from pathlib import Path

import paths

DATA = paths.DATA / "tokenizers"
CASES = {
    f"{name}-{version}": case
    for version in (4, 5)
    for name, case in json.loads((DATA / f"folder_cases_{version}.json").read_text()).items()
    if name not in ("transformers", "masks")
}


def write(folder: Path, name: str) -> Path:
    folder.mkdir()
    for file, text in CASES[name]["files"].items():
        (folder / file).write_text(text, encoding="utf-8")
    if CASES[name]["has_model"]:
        (folder / "tokenizer.model").write_bytes((DATA / "llama.model").read_bytes())
    return folder


def edit(file: Path, **fields) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
