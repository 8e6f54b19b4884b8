"""Command-line options for all fields of a generation config."""

from __future__ import annotations

import argparse
import json
from typing import Any

from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.settings.field_checks import boolean
from jaxllm.generation.settings.fields import Field


def add_field_flags(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each generation field; boolean fields also get ``--no-...``.

    Values are only parsed here; the library checks them. Fields that jaxllm does not implement are
    accepted, so that the library's error names them, but hidden from ``--help``.
    """
    group = parser.add_argument_group(
        "generation fields",
        "Hugging Face's names. Lists are JSON or comma separated; `none` switches a field off.",
    )
    for field in FIELDS.values():
        if not field.metadata:
            _add_flag(group, field)


def generation_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Generation fields set on the command line."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}


def _add_flag(
    group: argparse._ArgumentGroup,  # pyright: ignore[reportPrivateUsage]
    field: Field,
) -> None:
    flag = "--" + field.name.replace("_", "-")
    text = field.doc if field.default in (None, False) else f"{field.doc} ({field.default})"
    options: dict[str, Any] = {
        "dest": field.name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if field.supported is not None else text.replace("%", "%%"),
    }
    if field.check is boolean:
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **options)
    else:
        group.add_argument(flag, type=parse_value, metavar="VALUE", **options)


def parse_value(text: str) -> Any:
    """Parses a value: JSON, comma-separated integers, ``none``, or else a string.

    >>> [parse_value(text) for text in ("0.7", "2,32000", "[[5, 6]]", "none", "never")]
    [0.7, [2, 32000], [[5, 6]], None, 'never']
    """
    if text.lower() in ("none", "null"):
        return None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return int_list(text)
    except ValueError:
        return text


def int_list(text: str) -> list[int]:
    """Parses comma-separated integers, with optional spaces and brackets.

    >>> int_list("[1, 2]"), int_list("7")
    ([1, 2], [7])
    """
    return [int(part) for part in text.strip().removeprefix("[").removesuffix("]").split(",")]
