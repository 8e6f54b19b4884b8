"""Finds the known name that a misspelt one probably stands for.

A guess is made only where the two names are close. A wrong guess sends a user to another option,
while no guess lets the message list what there is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MAX_LENGTH = 100
"""Names of more characters are not compared: they come from strangers, and are no names."""
SHORT = 5
"""Below this number of letters another letter makes another word: top_k and top_p, eos and bos."""
LETTERS_PER_EDIT = 5
"""Letters of a word for each edit beyond the first."""
LEAST_PREFIX = 3
"""Letters of the shortest abbreviation."""
_WORD = re.compile(r"[^\W_]+")


def closest(name: str, names: Iterable[str]) -> str | None:
    """The known name that is close to a name; None if none is.

    Two names are close if each word is close to its counterpart: letters are added, left out,
    exchanged or swapped (about one for each five letters), or the word is cut short. A word in the
    middle may be added or left out. Case and the marks between words do not count. Numbers must
    agree.

    >>> closest("learning_rat", ["learning_rate"]), closest("max_new_tokens", ["max_tokens"])
    ('learning_rate', 'max_tokens')
    >>> closest("stop_token_ids", ["min_tokens"]), closest("top_k", ["top_p"])
    (None, None)
    """
    scored = [(score, other) for other in names if (score := _difference(name, other)) is not None]
    return min(scored)[1] if scored else None


def is_misspelt(name: str, known: str) -> bool:
    """Whether a name is a known one with a slip of the keyboard, without abbreviations.

    >>> is_misspelt("temprature", "temperature"), is_misspelt("temp", "temperature")
    (True, False)
    """
    pair = _words(name, known)
    if pair is None:
        return False
    words, others = pair
    if len(words) != len(others):
        return _slips("".join(words), "".join(others), 1) is not None
    return None not in [_slips(*both) for both in zip(words, others, strict=True)]


def _difference(name: str, other: str) -> float | None:
    """How far two names are apart; None: too far for a guess."""
    pair = _words(name, other)
    if pair is None:
        return None
    words, others = pair
    if len(words) == len(others):
        parts = [_word_difference(*both) for both in zip(words, others, strict=True)]
        return None if None in parts else sum(part for part in parts if part is not None)
    slips = _slips("".join(words), "".join(others), 1)
    if slips is not None:
        return slips
    short, long = sorted((words, others), key=len)
    has_one_more = any(long[:i] + long[i + 1 :] == short for i in range(1, len(long) - 1))
    return 1.5 if has_one_more else None


def _words(name: str, other: str) -> tuple[list[str], list[str]] | None:
    """The words of two names; None if the names cannot be close."""
    if len(name) > MAX_LENGTH or len(other) > MAX_LENGTH:
        return None
    numbers, other_numbers = (re.findall(r"\d+", each) for each in (name, other))
    words, others = (_WORD.findall(each.lower()) for each in (name, other))
    has_other_number = numbers and other_numbers and numbers != other_numbers
    return None if has_other_number or not (words and others) else (words, others)


def _word_difference(word: str, other: str) -> float | None:
    slips = _slips(word, other)
    short, long = sorted((word, other), key=len)
    if slips is None and len(short) >= LEAST_PREFIX and long.startswith(short):
        return 1
    return slips


def _slips(word: str, other: str, limit: int | None = None) -> int | None:
    """Number of slips between two words (the optimal string alignment distance); None: too many.

    A letter that is exchanged in a short word counts as two.
    """
    longest = max(len(word), len(other))
    limit = max(1, longest // LETTERS_PER_EDIT) if limit is None else limit
    if abs(len(word) - len(other)) > limit:
        return None
    exchange = 1 if longest >= SHORT else 2
    rows = [[*range(len(other) + 1)]]
    for i, letter in enumerate(word, 1):
        row = [i]
        for j, wanted in enumerate(other, 1):
            cost = min(
                rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + exchange * (letter != wanted)
            )
            if i > 1 and j > 1 and (letter, word[i - 2]) == (other[j - 2], wanted):
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1] if rows[-1][-1] <= limit else None
