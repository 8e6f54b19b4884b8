"""Base of the tokenizers that find added tokens in Python, as transformers' slow tokenizers do."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Self

from jaxllm.common.errors import TokenizerError
from jaxllm.tokenizers.batch import PaddingSide
from jaxllm.tokenizers.settings import (
    MAX_ADDED_TOKENS,
    AddedToken,
    TokenizerSettings,
    config_json,
)
from jaxllm.tokenizers.token_finder import TokenFinder
from jaxllm.tokenizers.tokenizer import Tokenizer


class SlowTokenizer(Tokenizer):
    """Splits texts at added tokens; subclasses split the texts between them into pieces.

    Args:
        settings: special tokens, flags and chat templates.
        files: contents of the files that ``save`` writes.
        padding_side: default if the settings have none.
        pieces: the vocabulary without added tokens, by id.
        known: added tokens by id, from the settings and from the class.
        source: name of the file, for messages.
    """

    def __init__(
        self,
        settings: TokenizerSettings,
        files: Mapping[str, bytes],
        padding_side: PaddingSide,
        *,
        pieces: Sequence[str],
        known: Mapping[int, AddedToken],
        source: str,
    ) -> None:
        super().__init__(settings, files, padding_side)
        self._pieces, self._source = pieces, source
        piece_ids = {piece: index for index, piece in enumerate(pieces)}
        self._added = place_added_tokens(piece_ids, known, settings, source)
        self._tokens = {token.content: token for token in self._added.values()}
        self._added_ids = {token.content: index for index, token in self._added.items()}
        self._ids_by_token = {**piece_ids, **self._added_ids}
        # True if an added token is a piece too, with another id.
        self._has_remapped_pieces = any(
            piece_ids.get(token, index) != index for token, index in self._added_ids.items()
        )
        named = {token.content for token in (*settings.named.values(), *settings.extra)}
        self.special_tokens = {
            text: token for text, token in self._tokens.items() if token.special or text in named
        }
        self.special_ids = frozenset(self._added_ids[text] for text in self.special_tokens)
        self._any_added = TokenFinder(self._tokens)
        self._plain_added = TokenFinder(self._tokens.keys() - self.special_tokens.keys())

    @abstractmethod
    def _tokenize(self, text: str) -> list[str]:
        """Splits a text without added tokens into pieces."""

    @abstractmethod
    def _ids(
        self, rows: Sequence[Sequence[str | AddedToken]], finder: TokenFinder
    ) -> list[list[int]]:
        """The ids of the added tokens and pieces of texts."""

    @abstractmethod
    def _remade(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> Self:
        """The same tokenizer with other settings and files."""

    def __len__(self) -> int:
        return max(len(self._pieces), max(self._added, default=-1) + 1)

    def _token_to_id(self, token: str) -> int | None:
        return self._ids_by_token.get(token)

    def _id_to_token(self, index: int) -> str | None:
        if index in self._added:
            return self._added[index].content
        return self._pieces[index] if 0 <= index < len(self._pieces) else None

    def _rebuild(self, settings: TokenizerSettings) -> None:
        settings = replace(settings, added={**self._added, **settings.added})
        self._become(self._remade(settings, with_added_tokens(self._files, settings)))
        # Without T5's sentinels, if the list was replaced.
        self.settings = replace(self.settings, extra=settings.extra)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        return self._ids([[text] for text in texts], self._any_added)

    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        return self._ids([parts], self._plain_added)[0]

    def _text_tokens(self, text: str) -> list[str]:
        return self._split([text], self._any_added)

    def _items(
        self, parts: Sequence[str | AddedToken], finder: TokenFinder
    ) -> list[str | AddedToken]:
        """Splits a text into added tokens and the texts between them."""
        return split_added_tokens(parts, self._tokens, finder)

    def _split(self, parts: Sequence[str | AddedToken], finder: TokenFinder) -> list[str]:
        """Splits a text into added tokens and pieces."""
        tokens: list[str] = []
        for item in self._items(parts, finder):
            tokens += [item.content] if isinstance(item, AddedToken) else self._tokenize(item)
        return tokens


def place_added_tokens(
    piece_ids: Mapping[str, int],
    known: Mapping[int, AddedToken],
    settings: TokenizerSettings,
    source: str,
) -> dict[int, AddedToken]:
    """Assigns ids to added tokens: special tokens without an id get the next free ones."""
    added = dict(sorted(known.items()))
    ids = {**piece_ids}
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
    limit = len(piece_ids) + MAX_ADDED_TOKENS
    if max(added, default=0) > limit:
        raise TokenizerError(f"{source}: an added token has the id {max(added)}, beyond {limit}")
    return added


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


def with_added_tokens(files: Mapping[str, bytes], settings: TokenizerSettings) -> dict[str, bytes]:
    """A tokenizer's files with the added tokens of the settings in tokenizer_config.json.

    Once it lists them, no other file's are read; so it gets the named tokens too.
    """
    config = json.loads(files.get("tokenizer_config.json", b"{}"))
    added = sorted(settings.added.items())
    config["added_tokens_decoder"] = {str(index): asdict(token) for index, token in added}
    config |= {name: token.content for name, token in settings.named.items()}
    return {**files, "tokenizer_config.json": config_json(config)}


def with_eos(ids: list[int], pair: list[int] | None, eos: int | None) -> list[int]:
    """Adds T5's EOS after one or two sequences that do not end with it."""

    def ended(ids: list[int]) -> list[int]:
        return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]

    return ended(ids) if pair is None else ended(ids) + ended(pair)
