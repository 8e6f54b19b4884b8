"""Strict JSON parsing for untrusted files.

Python's ``json`` accepts duplicate keys (the last one wins), ``NaN``, ``Infinity`` and numbers that
overflow to infinity, and lone surrogates that cannot be encoded as UTF-8. A checkpoint with any of
these is damaged or malicious, so this reader rejects it and names the file.
"""

from __future__ import annotations

import json
import math
import re
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.errors import ConfigError, JaxLLMError, naming_file
from jaxllm.common.files import check_is_file, check_not_placeholder

MAX_VALUES = 2**22
"""Most brackets, colons and commas: a few bytes of JSON can become a hundred in Python."""
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(
    path: str | PathLike[str],
    *,
    max_bytes: int,
    max_depth: int = 64,
    error: type[JaxLLMError] = ConfigError,
) -> Any:
    """Reads one JSON file; rejects content that two JSON parsers could read differently.

    Args:
        path: the file.
        max_bytes: largest file size that is read.
        max_depth: deepest nesting of lists and objects; ``{}`` has depth 1.
        error: error class for a malformed file.

    Raises:
        MissingFileError: there is no such file.
        error: the file is too large, not UTF-8, not JSON, too deep, or has duplicate keys,
            a number that is not finite, an unpaired surrogate, or more than `MAX_VALUES` values.
    """
    path = Path(path)
    check_is_file(path)
    with naming_file(path, error, "read"):
        size = path.stat().st_size
        if size > max_bytes:
            raise error(f"{path}: {size} bytes, but at most {max_bytes} are read")
        data = path.read_bytes()
    check_not_placeholder(path, data, error)
    return parse_json(data, source=str(path), max_depth=max_depth, error=error)


def parse_json(
    data: bytes,
    *,
    source: str,
    max_depth: int = 64,
    error: type[JaxLLMError] = ConfigError,
) -> Any:
    """Parses JSON bytes as `read_json` does; ``source`` names them in errors.

    >>> parse_json(b'{"a": [1, 2.5]}', source="example")
    {'a': [1, 2.5]}
    >>> parse_json(b'{"a": 1, "a": 2}', source="example")
    Traceback (most recent call last):
    jaxllm.common.errors.ConfigError: example: the key 'a' appears twice in one object
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise error(f"{source}: the key {twice!r} appears twice in one object")
        return result

    def finite(text: str) -> float:
        number = float(text)
        if not math.isfinite(number):
            raise error(f"{source}: the number {text[:40]} is not finite")
        return number

    if len(data) > MAX_VALUES and sum(map(data.count, (b"[", b"{", b":", b","))) > MAX_VALUES:
        raise error(f"{source}: more than {MAX_VALUES} brackets, colons and commas")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_float=finite,
            parse_constant=finite,
        )
    except UnicodeDecodeError as failure:
        raise error(f"{source}: not UTF-8 (byte {failure.start})") from failure
    except RecursionError as failure:
        raise error(f"{source}: nested deeper than {max_depth} levels") from failure
    except json.JSONDecodeError as failure:
        raise error(f"{source}: not JSON: {failure}") from failure
    except JaxLLMError:
        raise
    except ValueError as failure:  # an integer of more digits than Python converts
        raise error(f"{source}: {failure}") from failure

    _check_depth(value, source, max_depth, error)
    if _SURROGATE_ESCAPE.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as failure:
            raise error(f"{source}: a string holds an unpaired surrogate") from failure
    return value


def _check_depth(value: object, source: str, max_depth: int, error: type[JaxLLMError]) -> None:
    level = [value] if isinstance(value, dict | list) else []
    depth = 0
    while level:
        depth += 1
        if depth > max_depth:
            raise error(f"{source}: nested deeper than {max_depth} levels")
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
