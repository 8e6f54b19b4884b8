"""Decodes token ids to text, incrementally.

A chain of stages transforms token strings. Each stage holds back text that a later token can
change: an unfinished UTF-8 character, a run of byte tokens, a space before a full stop. ``decode``
runs the same chain to its end, so that streamed pieces concatenate to its result. The cost per
token does not grow with the text.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError

MAX_IDS = 2**24


class Stage:
    """One decoding stage; it may hold strings back until ``end``."""

    def put(self, tokens: list[str]) -> list[str]:
        raise NotImplementedError

    def end(self) -> list[str]:
        return []

    def token_text(self, token: str) -> str | bytes:
        """Text of a token inside a sequence, independent of its neighbours.

        A bytes result, possibly part of a character, is final: no further stage runs on it.
        """
        return token


class StreamDecoder:
    """Decodes ids incrementally.

    ``"".join([put(ids) for ids in ...] + [end()])`` is ``decode(all ids)``, and no piece ends
    inside a character.
    """

    def __init__(self, tokens: Sequence[str | None], stages: Sequence[Stage]) -> None:
        self._tokens = tokens
        """Token of each id; None for ids that are skipped."""
        self._stages = stages

    def put(self, ids: int | Iterable[int]) -> str:
        """Adds one or more ids; returns the text that has become final, possibly ``""``."""
        table, size = self._tokens, len(self._tokens)
        found = [table[index] for index in id_list(ids) if index < size]
        tokens = [token for token in found if token is not None]
        for stage in self._stages:
            tokens = stage.put(tokens)
        return "".join(tokens)

    def end(self) -> str:
        """Returns the remaining text. The decoder must not be used afterwards."""
        tokens: list[str] = []
        for stage in self._stages:
            tokens = stage.put(tokens) + stage.end()
        return "".join(tokens)


def id_list(ids: Any) -> list[int]:
    """The ids of `iterate_ids` as a list; a list of ints is checked as a whole."""
    is_array = isinstance(ids, np.ndarray) and ids.ndim == 1 and ids.dtype.kind in "iu"
    values: Any = ids.tolist() if is_array and len(ids) <= MAX_IDS else ids
    is_plain = type(values) is list and len(values) <= MAX_IDS and set(map(type, values)) <= {int}
    return values if is_plain and min(values, default=0) >= 0 else list(iterate_ids(ids))


def iterate_ids(ids: Any) -> Iterator[int]:
    """Yields one id, or those of a list, one-dimensional array or other iterable.

    Raises:
        InputError: ``ids`` is none of these, or has something else than ids in it.
    """
    if is_id(ids):
        ids = (ids,)
    elif isinstance(ids, str | bytes | Mapping) or not hasattr(ids, "__iter__"):
        raise InputError(f"token ids: expected an int or a list of ints, found {_describe(ids)}")
    elif getattr(ids, "ndim", 1) != 1:
        raise InputError(
            f"token ids: an array of shape {ids.shape}: expected one dimension (decode row by row)"
        )
    elif hasattr(ids, "__len__") and len(ids) > MAX_IDS:
        raise InputError(f"token ids: {len(ids)} at once, but at most {MAX_IDS} are taken")
    for index in ids:
        if not is_id(index):
            raise InputError(f"token ids: expected ints, found {_describe(index)}")
        index = operator.index(index)
        if index < 0:
            raise InputError(f"token id {index} is negative and cannot be decoded")
        yield index


def is_id(value: Any) -> bool:
    """True for ints and integer scalars of NumPy and JAX."""
    if isinstance(value, bool) or getattr(value, "ndim", 0) != 0:
        return False
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _describe(value: object) -> str:
    return f"{type(value).__name__} ({str(value)[:40]})"


class CleanUp(Stage):
    """transformers' ``clean_up_tokenization_spaces``: no space before punctuation.

    Inside a pattern one of the last three characters is always a space, and replacements only
    remove spaces. So text can be cut after three characters that are not spaces.
    """

    _PATTERNS = (
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    )
    _SAFE_SPLIT = re.compile(r".*[^ ]{3}", re.DOTALL)

    def __init__(self) -> None:
        self._pending = ""

    def put(self, tokens: list[str]) -> list[str]:
        text = self._pending + "".join(tokens)
        match = self._SAFE_SPLIT.match(text)
        split = match.end() if match else 0
        self._pending = text[split:]
        return [self.clean(text[:split])]

    def end(self) -> list[str]:
        return [self.clean(self._pending)]

    @classmethod
    def clean(cls, text: str) -> str:
        """The whole text without these spaces."""
        for pattern, replacement in cls._PATTERNS:
            text = text.replace(pattern, replacement)
        return text
