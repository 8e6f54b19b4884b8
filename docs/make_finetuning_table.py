"""Writes what follows from the recipe's dataclasses and their docstrings.

The tables of docs/finetuning.md, and configs/recipe.schema.json, by which editors check and
complete recipes.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxllm.common.validation import adapter
from jaxllm.training.dpo import DPOConfig
from jaxllm.training.lora import LoraConfig
from jaxllm.training.optimizers import OptimizerConfig
from jaxllm.training.run.recipe import (
    Checkpoints,
    DataConfig,
    EarlyStopping,
    Evaluation,
    MeshSizes,
    ModelSource,
    Recipe,
)

SCHEMA = Path(__file__).parents[1] / "configs" / "recipe.schema.json"
DOC = Path(__file__).with_name("finetuning.md")
START, END = "<!-- fields -->\n", "<!-- /fields -->\n"
# By the field of the recipe that holds them; "" is the recipe itself.
SECTIONS: dict[str, type] = {
    "": Recipe,
    "model": ModelSource,
    "data": DataConfig,
    "lora": LoraConfig,
    "dpo": DPOConfig,
    "optimizer": OptimizerConfig,
    "evaluation": Evaluation,
    "early_stopping": EarlyStopping,
    "checkpoints": Checkpoints,
    "mesh": MeshSizes,
}


def tables() -> str:
    """A table for each section: its fields, their defaults and what they mean."""
    return "\n".join(table(name, cls) for name, cls in SECTIONS.items())


def table(section: str, cls: type) -> str:
    """One row for each entry of the docstring, which may be of several fields."""
    title = f"### `{section}`" if section else "### The recipe itself"
    defaults = {field.name: default_of(field) for field in dataclasses.fields(cls)}
    rows = [title, "", "| field | default | |", "|---|---|---|"]
    for names, meaning in entries(cls).items():
        shown = [defaults.pop(name) for name in names]
        if not SECTIONS.keys().isdisjoint(names) and cls is Recipe:
            continue  # these have tables of their own
        shown = shown[:1] if len(set(shown)) == 1 else shown
        meaning = re.sub(r"\bNone\b", "`null`", meaning).replace("|", "\\|")
        rows.append(f"| {listed(names)} | {listed(shown)} | {meaning} |")
    if defaults:
        raise ValueError(f"{cls.__name__}: the docstring says nothing of {', '.join(defaults)}")
    return "\n".join(rows) + "\n"


def entries(cls: type) -> dict[tuple[str, ...], str]:
    """Names and their meaning from the docstring's Args; one without Args says it of all fields."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    if "Args:\n" not in doc:
        return {tuple(field.name for field in dataclasses.fields(cls)): " ".join(doc.split())}
    block = re.split(r"\n(?=\S)", doc.split("Args:\n")[1])[0]
    found = {}
    for entry in re.split(r"\n(?=    \S)", "\n" + block.rstrip()):
        if entry.strip():
            names, meaning = entry.split(":", 1)
            text = " ".join(meaning.split()).replace("``", "`")
            found[tuple(name.strip() for name in names.split(","))] = text
    return found


def default_of(field: dataclasses.Field[Any]) -> str:
    """As YAML has it; empty for a field that must be given."""
    if field.default_factory is not dataclasses.MISSING:
        return spelled(field.default_factory())
    return "" if field.default is dataclasses.MISSING else spelled(field.default)


def spelled(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(spelled, value))}]"
    plain = {None: "null", True: "true", False: "false", "": '""'}
    return plain[value] if isinstance(value, bool | None) or value == "" else str(value)


def listed(texts: Iterable[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts if text)


def rewritten(text: str) -> str:
    """The document with today's tables."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + tables() + END + after


def schema() -> str:
    """The JSON Schema of a recipe, with a description of each field."""
    made = adapter(Recipe).json_schema()
    for cls in SECTIONS.values():
        section = made if cls is Recipe else made["$defs"][cls.__name__]
        section["additionalProperties"] = False
        section["description"] = inspect.cleandoc(cls.__doc__ or "").split("\n")[0]
        for names, meaning in entries(cls).items():
            for name in names:
                section["properties"][name]["description"] = meaning
    made = without_titles(made)
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Recipe of a run"}
    return json.dumps({**made, **head}, indent=1, sort_keys=True) + "\n"


def without_titles(part: Any) -> Any:
    """A schema without the titles that pydantic makes of the names."""
    if isinstance(part, dict):
        return {name: without_titles(inner) for name, inner in part.items() if name != "title"}
    return [without_titles(inner) for inner in part] if isinstance(part, list) else part


if __name__ == "__main__":
    SCHEMA.write_text(schema())
    DOC.write_text(rewritten(DOC.read_text()))
