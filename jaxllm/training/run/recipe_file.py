"""Reads recipes from YAML, strictly: every error names the file and the field."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxllm.common.errors import ConfigError, MissingFileError, naming_file
from jaxllm.common.files import read_text
from jaxllm.common.validation import admits_null, from_plain
from jaxllm.training.run.recipe import Recipe

MAX_FILE_BYTES = 1 << 20
TAG = "tag:yaml.org,2002:"
KINDS = ("null", "bool", "int", "float", "str", "seq", "map")
# PyYAML's errors, and those of Python's constructors for values that contradict their tags.
NOT_YAML = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError, TypeError)


def read_recipe(path: Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Reads a recipe; `overrides` replace fields under dotted names (``optimizer.name``).

    An override null drops a section or field of the file that cannot be null, so that it has its
    default. ``eval_data: null`` switches evaluation off: the file's `evaluation`, `early_stopping`
    and the metric of its `checkpoints` have no effect then.

    Raises:
        MissingFileError: the file does not exist.
        ConfigError: the file is not YAML, or a field is unknown, missing or wrong.
    """
    raw = read_yaml(path)
    if overrides is not None and overrides.get("eval_data", raw) is None:
        raw.pop("evaluation", None)
        raw.pop("early_stopping", None)
        if isinstance(checkpoints := raw.get("checkpoints"), dict):
            raw["checkpoints"] = {
                name: value for name, value in checkpoints.items() if name not in ("metric", "mode")
            }
    for name, value in (overrides or {}).items():
        if value is None and not admits_null(Recipe, name):
            drop_field(raw, name)
        else:
            set_field(raw, name, value)
    try:
        return from_plain(Recipe, raw)
    except ConfigError as error:
        options = ", ".join(f"--{name}" for name in overrides or {})
        source = f"{path} (with {options})" if options else str(path)
        raise ConfigError(f"{source}: {error}") from None


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads the fields of a YAML file."""
    with naming_file(path, ConfigError, "read"):
        is_missing = not path.exists()
    if is_missing:
        near = difflib.get_close_matches(path.name, names_beside(path), n=1)
        hint = f"; is it {path.with_name(near[0])}?" if near else ""
        raise MissingFileError(f"{path}: no such file{hint}")
    text = read_text(path, max_bytes=MAX_FILE_BYTES, error=ConfigError)
    try:
        raw = yaml.load(text, Loader=StrictLoader)
    except NOT_YAML as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected fields and their values")
    return raw


def names_beside(path: Path) -> list[str]:
    try:
        return [other.name for other in path.parent.iterdir()]
    except OSError:
        return []


class StrictLoader(yaml.SafeLoader):
    """SafeLoader restricted to JSON values: no dates, aliases, merge keys or infinite numbers.

    A duplicate field is an error, and 1e-4 is a number.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Nested aliases can expand a few lines to many gigabytes.
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            line = event.start_mark.line + 1
            raise yaml.YAMLError(f"*{event.anchor}: aliases are not read (line {line})")
        return super().compose_node(parent, index)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag.removeprefix(TAG) not in KINDS:
            raise yaml.YAMLError(f"{node.tag}: not a value that JSON has (line {line_of(node)})")
        value = super().construct_object(node, deep)
        if isinstance(value, float) and not math.isfinite(value):
            raise yaml.YAMLError(f"{node.value}: expected a finite number (line {line_of(node)})")
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if not isinstance(name, str):
                raise yaml.YAMLError(f"field {name!r}: expected a name (line {line_of(key)})")
            if name in seen:
                raise yaml.YAMLError(f"field {name!r} is there twice (line {line_of(key)})")
            seen.add(name)
        return super().construct_mapping(node, deep)


def line_of(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def parse_yaml(text: str) -> Any:
    """Parses a command-line value as YAML; text that is not YAML is a string.

    >>> [parse_yaml(text) for text in ("3", "1e-4", "null", "[a, b]", "data/*.jsonl")]
    [3, 0.0001, None, ['a', 'b'], 'data/*.jsonl']
    """
    try:
        value = yaml.load(text, Loader=StrictLoader)
    except NOT_YAML:
        return text
    return text if value is None and text.strip() not in ("null", "~", "none", "None") else value


# YAML 1.1, which PyYAML follows, has no number "1e-4".
StrictLoader.add_implicit_resolver(
    TAG + "float",
    re.compile(r"^[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def set_field(raw: dict[str, Any], name: str, value: Any) -> None:
    """Sets a field under a dotted name."""
    *parents, last = name.split(".")
    for parent in parents:
        inner = raw.get(parent)
        raw[parent] = raw = dict(inner) if isinstance(inner, Mapping) else {}
    raw[last] = value


def drop_field(raw: dict[str, Any], name: str) -> None:
    """Removes a field under a dotted name, if it is there."""
    *parents, last = name.split(".")
    for parent in parents:
        inner = raw.get(parent)
        raw[parent] = raw = dict(inner) if isinstance(inner, Mapping) else {}
    raw.pop(last, None)
