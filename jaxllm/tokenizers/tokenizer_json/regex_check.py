"""Rejects regular expressions that can take exponential time, or a high power of the text's length.

The pattern that splits text into words is part of the tokenizer and runs in a backtracking engine.
Nested unbounded repetitions, like ``(a+)+``, and back references can take exponential time in the
length of the text, k repetitions in a row its power of k + 1. No tokenizer in use has the former,
or more than two of the latter. The check is a small parser of its own, which
knows nothing of tokenizers.
"""

from __future__ import annotations

import re

from jaxllm.common.errors import UnsupportedError

_MAX_LENGTH = 4096
_MAX_BOUND = 64
_MAX_REPETITIONS = 3

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _WORDS_TAIL
QWEN2_PATTERN = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _WORDS_TAIL
TWO_SPACES = " {2,}"  # of T5's normalizer
LINEAR_PATTERNS = frozenset({LLAMA3_PATTERN, QWEN2_PATTERN, TWO_SPACES})
"""Regular expressions in use that take linear time."""
_BOUNDS = re.compile(r"\{(\d*)(,?)(\d*)\}")
_ESCAPE = re.compile(r"\\(?:[pP]\{\^?[A-Za-z_]+\}|x[0-9A-Fa-f]{2}|[^0-9kgKXRyY])", re.DOTALL)
_GROUP_START = re.compile(r"\((?:\?(?:[imsx]*-?[imsx]*:|=|!))?")


def check_regex(pattern: str, source: str) -> None:
    """Checks a pattern; raises on nested repetition, back references and unsupported syntax.

    >>> check_regex(r"'s| ?[\\p{L}]+|\\s+(?!\\S)|\\s+", "example")
    >>> check_regex("(a+)+b", "example")
    Traceback (most recent call last):
    jaxllm.common.errors.UnsupportedError: example: the regular expression '(a+)+b' repeats a \
repetition

    Raises:
        UnsupportedError: the pattern is longer than 4096 characters, or has anything but
            characters, classes, groups, look-ahead, alternatives and up to three non-nested
            repetitions in one alternative.
    """

    def refuse(reason: str) -> UnsupportedError:
        return UnsupportedError(f"{source}: the regular expression {pattern[:200]!r} {reason}")

    if len(pattern) > _MAX_LENGTH:
        raise refuse(f"has more than {_MAX_LENGTH} characters")
    # Repetitions in each open group: the most in a finished alternative, and those in the current.
    open_groups = [[0, 0]]
    item_repeats = False  # True if the last item contains one
    position = 0
    while position < len(pattern):
        character = pattern[position]
        if character == "(":
            match = _GROUP_START.match(pattern, position)
            if match is None or pattern.startswith("?", match.end()):
                raise refuse(f"has an unsupported group at {position}")
            open_groups.append([0, 0])
            item_repeats = False
            position = match.end()
        elif character == ")":
            if len(open_groups) == 1:
                raise refuse(f"closes a group at {position} that was not opened")
            repetitions = max(open_groups.pop())
            item_repeats = repetitions > 0
            open_groups[-1][1] += repetitions
            position += 1
        elif character == "|":
            open_groups[-1] = [max(open_groups[-1]), 0]
            item_repeats = False
            position += 1
        elif character in "*+?{":
            repeats, position = _quantifier(pattern, position)
            if position < 0:
                raise refuse("has a bound that is too large or malformed")
            if repeats and item_repeats:
                raise refuse("repeats a repetition")
            item_repeats |= repeats
            open_groups[-1][1] += repeats
        else:
            position = _skip_character(pattern, position)
            if position < 0:
                raise refuse("has an unsupported escape or class")
            item_repeats = False
        if open_groups[-1][1] > _MAX_REPETITIONS:
            raise refuse(f"has more than {_MAX_REPETITIONS} repetitions in a row")
    if len(open_groups) != 1:
        raise refuse("leaves a group open")


def _quantifier(pattern: str, position: int) -> tuple[bool, int]:
    """Parses a quantifier; returns (it repeats, position after it); -1 if it is rejected."""
    if pattern[position] == "{":
        bounds = _BOUNDS.match(pattern, position)
        if bounds is None or not (bounds[1] or bounds[3]):
            return False, -1
        largest = int((bounds[3] if bounds[2] else bounds[1]) or _MAX_BOUND)
        if largest > _MAX_BOUND or int(bounds[1] or 0) > largest:
            return False, -1
        repeats, position = largest > 1, bounds.end()
    else:
        repeats, position = pattern[position] != "?", position + 1
    if position < len(pattern) and pattern[position] in "?+":  # lazy, possessive
        position += 1
    return repeats, position


def _skip_character(pattern: str, position: int) -> int:
    """Position after one character, escape or class; -1 if it is rejected."""
    if pattern[position] == "\\":
        match = _ESCAPE.match(pattern, position)
        return match.end() if match else -1
    if pattern[position] != "[":
        return position + 1
    depth = 0
    while position < len(pattern):
        if pattern[position] == "\\":
            match = _ESCAPE.match(pattern, position)
            if match is None:
                return -1
            position = match.end()
            continue
        depth += {"[": 1, "]": -1}.get(pattern[position], 0)
        position += 1
        if depth == 0:
            return position
    return -1
