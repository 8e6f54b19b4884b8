"""Bounds on what tokenizer files can cost: how much they lengthen a text, and how long they take.

A file of a kilobyte can turn a short prompt into gigabytes, for example with eight normalizers that
replace "a" by ten of them, or search it for hours with a regular expression of quadratic cost. So
growth is computed before a file is used, and unknown regular expressions are timed on parts of a
long text before they see the whole of it.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.tokenizers.tokenizer_json.regex_check import LINEAR_PATTERNS, TWO_SPACES

MAX_TOKEN_BYTES = 1024
MAX_NORMALIZER_GROWTH = 1024
MAX_NORMALIZED_BYTES = 2**20
MAX_DECODER_GROWTH = 8
# Bytes of UTF-8 that a normalizer can make of one byte, over all of Unicode.
_UNICODE_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 11, "NFKD": 11, "Lowercase": 2}
_FIRST_PROBE_CHARACTERS = 256
_FREE_SECONDS = 0.25
_SECONDS_PER_BYTE = 4e-6  # several times what tokenizers in use take


def check_growth(spec: Mapping[str, Any], source: str) -> int:
    """Bounds the growth of texts in a checked tokenizer.json.

    Returns:
        The largest number of bytes that the normalizer can make of one byte.

    Raises:
        UnsupportedError: the normalizer, pre-tokenizer or decoder can lengthen a text too much.
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

    Raises:
        InputError: the normalized text has 1 MiB more than twice the bytes of the text.
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


def has_unknown_regex(spec: Mapping[str, Any]) -> bool:
    """True if a normalizer or pre-tokenizer has a regular expression not known to be linear."""
    steps = [*_steps(spec["normalizer"]), *_steps(spec["pre_tokenizer"])]
    patterns = {step["pattern"].get("Regex") for step in steps if "pattern" in step}
    return not patterns <= {None, *LINEAR_PATTERNS}


def check_seconds(encode: Callable[[str], Any], text: str, source: str) -> None:
    """Encodes parts of 256, 512, 1024, ... characters, to see if they take too long.

    A regular expression of quadratic or cubic cost would take hours for a text of a megabyte, and
    nothing can stop the library while it runs. What is slow can be anywhere: ``\\s+$`` matches
    spaces at once where they end the text, but takes quadratic time where another character does.

    Raises:
        InputError: the CPU time of a part, or of all parts of a length, was beyond 0.25 s and 4 µs
            per byte.
    """
    length = _FIRST_PROBE_CHARACTERS
    while length < len(text):
        total, total_size = 0.0, 0
        for first in _part_starts(len(text), length):
            part = text[first : first + length]
            start = time.thread_time()
            encode(part)
            seconds, size = time.thread_time() - start, _size(part)
            total, total_size = total + seconds, total_size + size
            if seconds > _allowed_seconds(size) or total > _allowed_seconds(total_size):
                raise InputError(
                    f"{source}: its regular expressions took {total:.1f} s for {total_size} bytes,"
                    f" in parts of {length} of {len(text)} characters: give a shorter text"
                )
        length *= 2


def _allowed_seconds(size: int) -> float:
    return max(_FREE_SECONDS, _SECONDS_PER_BYTE * size)


def _part_starts(size: int, length: int) -> Iterable[int]:
    """Where the parts of a length begin: all at every second length, else both ends.

    >>> [list(_part_starts(2000, length)) for length in (256, 512, 1024)]
    [[0, 256, 512, 768, 1024, 1280, 1536, 1744], [0, 1488], [0, 976]]
    """
    ends = (0, size - length)
    only_ends = (length // _FIRST_PROBE_CHARACTERS).bit_length() % 2 == 0
    return ends if only_ends else (*range(0, size - length, length), size - length)
