"""Added tokens, at which texts are split: reads them from files, and finds them in texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tokenizers

from jaxllm.common.errors import TokenizerError, quoted

MAX_ADDED_TOKENS = 2**17
MAX_ADDED_TOKEN_BYTES = 256
_FLAGS = ("special", "normalized", "lstrip", "rstrip", "single_word")
MAX_START, MAX_STARTS = 5, 64
"""Length and largest number of the beginnings of tokens that a text is searched for."""


@dataclass(frozen=True)
class AddedToken:
    """A token at which text is split before the vocabulary's model runs.

    ``lstrip`` and ``rstrip`` strip the white space on its left and right; ``single_word`` prevents
    matches inside a word; ``normalized`` matches in the normalised text.
    """

    content: str
    special: bool = True
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def __str__(self) -> str:
        return self.content


Parts = Sequence[str | AddedToken]
"""A text whose added tokens, or some of them, are split off."""


def parse_added_token(value: object, source: str, *, special: bool = True) -> AddedToken:
    """Parses a token: a string, or the object that transformers writes."""
    if isinstance(value, str):
        _check_length(value, source)
        return AddedToken(value, special=special)
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TokenizerError(f"{source}: {quoted(value)} is not a token (a string, or an object)")
    if not value["content"]:
        raise TokenizerError(f"{source}: the token's content is empty")
    _check_length(value["content"], source)
    unknown = set(value) - {"content", "id", "__type", *_FLAGS}
    if unknown:
        raise TokenizerError(f"{source}: a token has the unknown fields {quoted(sorted(unknown))}")
    flags = {name: value[name] for name in _FLAGS if name in value}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TokenizerError(f"{source}: {name} is {quoted(flag)}, not true or false")
    return AddedToken(value["content"], **{"special": special, **flags})


def _check_length(content: str, source: str) -> None:
    if len(content.encode("utf-8", "surrogatepass")) > MAX_ADDED_TOKEN_BYTES:
        raise TokenizerError(
            f"{source}: the token {content[:20]!r}... has more than {MAX_ADDED_TOKEN_BYTES} bytes"
        )


def tokens_by_id(
    entries: Iterable[tuple[object, object, str]], source: str
) -> dict[int, AddedToken]:
    """Parses added tokens, which are not special unless they say so; returns them by id, in order.

    Args:
        entries: id, token and place in the file.
        source: name of the file and its field, for messages.
    """
    added: dict[int, AddedToken] = {}
    contents: set[str] = set()
    for index, value, where in entries:
        token = parse_added_token(value, where, special=False)
        if type(index) is not int or index < 0:
            raise TokenizerError(f"{where}: {quoted(token.content)} has the id {quoted(index)}")
        if index in added:
            raise TokenizerError(f"{source}: two tokens have the id {index}")
        if token.content in contents:
            raise TokenizerError(f"{source}: {quoted(token.content)} appears under two ids")
        added[index] = token
        contents.add(token.content)
        if len(added) > MAX_ADDED_TOKENS:
            raise TokenizerError(f"{source}: more than {MAX_ADDED_TOKENS} added tokens")
    return dict(sorted(added.items()))


def tokens_of_list(entries: object, source: str) -> dict[int, AddedToken]:
    """The ``added_tokens`` of tokenizer.json by id, in order."""
    if not isinstance(entries, list):
        raise TokenizerError(f"{source}: {type(entries).__name__}, not a list")

    def items() -> Iterator[tuple[object, object, str]]:
        for number, entry in enumerate(entries):
            where = f"{source}[{number}]"
            if not isinstance(entry, dict):
                raise TokenizerError(f"{where}: {type(entry).__name__}, not an object")
            yield entry.get("id"), entry, where

    return tokens_by_id(items(), source)


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


def place_added_tokens(
    piece_ids: Mapping[str, int],
    known: Mapping[int, AddedToken],
    special: Iterable[AddedToken],
    source: str,
) -> dict[int, AddedToken]:
    """Ids of the known added tokens, and the next free ones for special tokens without an id."""
    added = dict(sorted(known.items()))
    ids = {**piece_ids}
    ids |= {token.content: index for index, token in added.items()}
    placed = {token.content for token in added.values()}
    for token in special:
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
    limit = len(piece_ids) + MAX_ADDED_TOKENS
    if max(added, default=0) > limit:
        raise TokenizerError(f"{source}: an added token has the id {max(added)}, beyond {limit}")
    return added


def split_added_tokens(
    parts: Parts, tokens: Mapping[str, AddedToken], finder: TokenFinder
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
