"""Added tokens: assigns their ids, and splits text at them as transformers' slow tokenizers do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace

import tokenizers

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.settings import MAX_ADDED_TOKENS, AddedToken, TokenizerSettings


def place_added_tokens(
    pieces: Sequence[str], known: Mapping[int, AddedToken], settings: TokenizerSettings, source: str
) -> dict[int, AddedToken]:
    """Assigns ids to added tokens: special tokens without an id get the next free ones."""
    added = dict(sorted(known.items()))
    ids = {piece: index for index, piece in enumerate(pieces)}
    ids |= {token.content: index for index, token in added.items()}
    placed = {token.content for token in added.values()}
    for token in (*settings.named.values(), *settings.extra):
        if token.content not in placed:
            index = ids.setdefault(token.content, len(ids))
            if index in added:
                raise TokenizerError(
                    f"{source}: {token.content!r} and {added[index].content!r} get the id {index}"
                )
            added[index] = replace(token, special=True)
            placed.add(token.content)
    if len(added) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"{source}: {len(added)} added tokens, but at most {MAX_ADDED_TOKENS}")
    limit = len(pieces) + MAX_ADDED_TOKENS
    if max(added, default=0) > limit:
        raise TokenizerError(f"{source}: an added token has the id {max(added)}, beyond {limit}")
    return added


def with_added_tokens(files: Mapping[str, bytes], settings: TokenizerSettings) -> dict[str, bytes]:
    """A tokenizer's files with the added tokens of the settings in tokenizer_config.json.

    Once it lists them, no other file's are read; so it gets the named tokens too.
    """
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    added = sorted(settings.added.items())
    config["added_tokens_decoder"] = {str(index): asdict(token) for index, token in added}
    config |= {name: token.content for name, token in settings.named.items()}
    text = json.dumps(config, ensure_ascii=False, indent=2)
    return {**files, "tokenizer_config.json": text.encode()}


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


def with_eos(ids: list[int], pair: list[int] | None, eos: int | None) -> list[int]:
    """Adds T5's EOS after one or two sequences that do not end with it."""

    def ended(ids: list[int]) -> list[int]:
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    return ended(ids) if pair is None else ended(ids) + ended(pair)


def split_added_tokens(
    parts: Sequence[str | AddedToken], tokens: Mapping[str, AddedToken], finder: TokenFinder
) -> list[str | AddedToken]:
    """Splits text at added tokens, which may strip adjacent white space.

    Args:
        parts: strings, and tokens found before.
        tokens: added tokens by text.
        finder: finds the tokens to split at.
    """
    items: list[str | AddedToken] = []
    for part in parts:
        if not isinstance(part, str):
            items.append(part)
            continue
        start = 0
        for token_start, end in finder.spans(part):
            items += [part[start:token_start], tokens[part[token_start:end]]]
            start = end
        items.append(part[start:])
    items = [item for item in items if item != ""]
    for i, token in enumerate(items):
        if isinstance(token, str):
            continue
        left = items[i - 1] if i > 0 else ""
        right = items[i + 1] if i + 1 < len(items) else ""
        left_text = left if isinstance(left, str) else ""
        right_text = right if isinstance(right, str) else ""
        if token.lstrip and left_text:
            items[i - 1] = left_text.rstrip()
        if token.rstrip and right_text:
            items[i + 1] = right_text.lstrip()
        if token.single_word and left_text and left_text[-1] != " ":
            items[i - 1 : i + 1] = [f"{items[i - 1]}{token.content}", ""]
        elif token.single_word and right_text and right_text[0] != " ":
            items[i : i + 2] = ["", f"{token.content}{items[i + 1]}"]
    return [item for item in items if item != ""]
