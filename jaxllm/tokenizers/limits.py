"""Bounds on how much tokenizer files lengthen a text.

A file of a kilobyte can turn a short prompt into gigabytes, for example with eight normalizers that
replace "a" by ten of them. So growth is computed before a file is used.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

from jaxllm.common.errors import InputError, UnsupportedError

MAX_TOKEN_BYTES = 1024
MAX_NORMALIZER_GROWTH = 1024
MAX_NORMALIZED_BYTES = 2**20
MAX_DECODER_GROWTH = 8
# Bytes of UTF-8 that a normalizer can make of one byte, over all of Unicode.
_UNICODE_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2}
TWO_SPACES = " {2,}"
"""Regular expression of T5's normalizer, which matches no empty string."""


def check_growth(spec: Mapping[str, Any], source: str) -> int:
    """Bounds the growth of texts in a checked tokenizer.json.

    Returns:
        The largest number of bytes that the normalizer can make of one byte.
    """
    growth = _growth(spec["normalizer"])
    for section, factor, limit in (
        ("normalizer", growth, MAX_NORMALIZER_GROWTH),
        ("decoder", _growth(spec["decoder"]), MAX_DECODER_GROWTH),
    ):
        if factor > limit:
            raise UnsupportedError(
                f"{source}: {section}: it can make a text more than {limit} times longer, which no"
                " known tokenizer does"
            )
    # Each may double the text, or more; Prepend adds to each part between two added tokens.
    for section, name in (
        ("pre_tokenizer", "ByteLevel"),
        ("pre_tokenizer", "Metaspace"),
        ("normalizer", "Prepend"),
    ):
        if sum(step["type"] == name for step in _steps(spec[section])) > 1:
            raise UnsupportedError(f"{source}: {section}: {name} more than once")
    # The library normalizes added tokens while it loads the file.
    added = sum(_size(token["content"]) for token in spec["added_tokens"] if token["normalized"])
    if added * growth > MAX_NORMALIZED_BYTES:
        raise UnsupportedError(
            f"{source}: added_tokens: {added} bytes, which the normalizer can make {growth} times"
            f" longer; at most {MAX_NORMALIZED_BYTES} bytes are taken"
        )
    return growth


def charsmap_growth(charsmap: bytes) -> int:
    """The longest replacement, in bytes, of a sentencepiece normalization table.

    The table is the size of a trie in 4 bytes, the trie, and replacements that end in a zero byte.
    """
    replacements = charsmap[4 + int.from_bytes(charsmap[:4], "little") :].split(b"\0")
    return max(1, *map(len, replacements))


def _steps(component: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The steps of a component, which may be a Sequence; the names of its list differ."""
    if component is None:
        return []
    lists = (component.get(name) for name in ("normalizers", "pretokenizers", "decoders"))
    return next((steps for steps in lists if steps is not None), [component])


def _growth(component: Mapping[str, Any] | None) -> int:
    growth = 1
    for step in _steps(component):
        growth *= _step_growth(step)
    return growth


def _step_growth(step: Mapping[str, Any]) -> int:
    """Bytes that a normalizer or decoder can make of one byte, rounded up."""
    match step["type"]:
        case "Replace":
            size = _size(step["content"])
            [(pattern_type, pattern)] = step["pattern"].items()
            if pattern_type == "String":
                return max(1, -(-size // _size(pattern)))
            # A regular expression may match the empty string before each byte.
            return max(1, -(-size // 2)) if pattern == TWO_SPACES else 1 + size
        case "Prepend":
            return 1 + _size(step["prepend"])
        case "Precompiled":
            return charsmap_growth(base64.b64decode(step["precompiled_charsmap"]))
        case name:
            return _UNICODE_GROWTH.get(name, 1)


def _size(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def check_normalized_size(
    normalize: Callable[[str], str], text: str, growth: int, source: str
) -> None:
    """Raises if a text is too long after normalization.

    If the bound ``growth`` does not rule that out, the text is normalized in parts to see it.
    """
    size = _size(text)
    limit = MAX_NORMALIZED_BYTES + 2 * size
    if size * growth <= limit:
        return
    step = MAX_NORMALIZED_BYTES // growth
    total = 0
    for start in range(0, len(text), step):
        total += _size(normalize(text[start : start + step]))
        if total > limit:
            raise InputError(
                f"{source}: its normalizer makes this text of {size} bytes longer than {limit}"
                " bytes: give a shorter text"
            )
