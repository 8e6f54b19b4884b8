"""Finds tokens in texts."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers

MAX_START, MAX_STARTS = 5, 64
"""Length and largest number of the beginnings of tokens that a text is searched for."""


class TokenFinder:
    """Finds tokens in texts: the leftmost first, and the longest of those that begin there.

    Many tokens are found by the automaton of the tokenizers library, whose time does not depend on
    their number.

    >>> TokenFinder(["<s>", "</s>"]).spans("a</s><s>")
    [(1, 5), (5, 8)]
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        tokens = tuple(tokens)
        self._tokens, self._starts = frozenset(tokens), {token[:MAX_START] for token in tokens}
        self._lengths = sorted({len(token) for token in tokens}, reverse=True)
        added = [tokenizers.AddedToken(token, normalized=False) for token in tokens]
        # Without a vocabulary, the text between added tokens has no tokens.
        self._backend = tokenizers.Tokenizer(tokenizers.models.BPE()) if added else None
        if self._backend is not None:
            self._backend.add_special_tokens(added)

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Start and end of each token in a text."""
        if self._backend is None:
            return []
        if len(self._starts) > MAX_STARTS:
            return self._backend.encode(text).offsets
        # A search for few strings is faster than the automaton.
        spans: list[tuple[int, int]] = []
        for position in self._candidates(text):
            if not spans or position >= spans[-1][1]:
                some = (text[position : position + length] for length in self._lengths)
                token = next((each for each in some if each in self._tokens), None)
                spans += [] if token is None else [(position, position + len(token))]
        return spans

    def _candidates(self, text: str) -> list[int]:
        """Positions at which a token may begin, in order."""
        positions = []
        for start in self._starts:
            position = text.find(start)
            while position >= 0:
                positions.append(position)
                position = text.find(start, position + 1)
        return sorted(positions)

    def find_all(self, text: str) -> list[str]:
        return [text[start:end] for start, end in self.spans(text)]
