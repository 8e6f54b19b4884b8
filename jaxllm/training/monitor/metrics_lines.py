"""Lines of metrics.jsonl and metrics.csv: values plain_value, written and parse_line."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable
from io import StringIO
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, RunError

Value = float | int | bool | str | None
MetricsRow = dict[str, Any]
"""`step`, an int, and a `Value` for each metric."""

NONFINITE = "nonfinite"


def is_number(value: Any) -> bool:
    """True for a single number of Python, numpy or JAX.

    >>> is_number(1.5), is_number(np.float32(2)), is_number("a"), is_number(None)
    (True, True, False, False)
    """
    if value is None or isinstance(value, str):
        return False
    array = np.asarray(value)
    return array.size == 1 and (array.dtype.kind in "biuf" or array.dtype.name == "bfloat16")


def is_torn(line: bytes) -> bool:
    """True if a line is incomplete JSON, as a killed process may leave it."""
    try:
        json.loads(line)
    except ValueError:
        return True
    return False


def parse_line(line: bytes, where: str) -> MetricsRow:
    """Parses a line of metrics.jsonl; `where` names the line in errors."""
    try:
        row = json.loads(line)
    except ValueError as failure:
        raise RunError(f"{where}: not JSON ({failure}); move the file away") from None
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        raise RunError(f"{where}: expected an object with an integer step; move the file away")
    try:
        return row | {name: float(text) for name, text in row.pop(NONFINITE, {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise RunError(
            f"{where}: {NONFINITE}: expected fields that are nan or inf; move the file away"
        ) from None


def plain_value(name: str, x: Any) -> Value:
    """Converts a metric to a JSON and CSV value."""
    if x is None or isinstance(x, str):
        return x
    array = np.asarray(x)
    if not is_number(array):
        raise InputError(
            f"metrics[{name!r}]: expected a number or a string, found {array.dtype} of shape "
            f"{array.shape}"
        )
    return array.astype(float).item() if array.dtype.name == "bfloat16" else array.item()


def json_line(row: MetricsRow) -> bytes:
    """Formats a row as a line of metrics.jsonl."""
    bad = {
        name: str(value)
        for name, value in row.items()
        if isinstance(value, float) and not math.isfinite(value)
    }
    fields: dict[str, Any] = {name: None if name in bad else x for name, x in row.items()}
    if bad:
        fields[NONFINITE] = bad
    return (json.dumps(fields, allow_nan=False) + "\n").encode()


def csv_line(values: Iterable[Value]) -> bytes:
    """Formats values as a line of metrics.csv."""
    text = StringIO()
    csv.writer(text, lineterminator="\n").writerow(list(values))
    return text.getvalue().encode("utf-8")
