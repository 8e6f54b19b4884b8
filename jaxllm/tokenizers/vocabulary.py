"""Tokens and their ids: conversion both ways, and named special tokens (BOS, EOS, pad, ...)."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from jaxllm.common.arguments import checked, checked_list, checks_flags
from jaxllm.common.errors import InputError, TokenizerError, quoted
from jaxllm.common.renamed_arguments import TOKENIZER_ATTRIBUTES
from jaxllm.tokenizers.files import NAMED_TOKENS
from jaxllm.tokenizers.settings import AddedToken, TokenizerSettings
from jaxllm.tokenizers.stream_decoder import is_id, iterate_ids

NO_MAX_LENGTH = int(1e30)
"""transformers' ``model_max_length`` of a tokenizer that has none."""


class _NamedToken:
    """Attribute of a named token, such as ``pad_token``: its text, or None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, vocabulary: Vocabulary, owner: type) -> str | None:
        token = vocabulary.settings.named.get(self._name)
        return None if token is None else token.content

    def __set__(self, vocabulary: Vocabulary, token: str | None) -> None:
        vocabulary.set_named_token(self._name, token)


class _NamedTokenId:
    """Attribute of a named token's id, such as ``pad_token_id``, or None."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name.removesuffix("_id")

    def __get__(self, vocabulary: Vocabulary, owner: type) -> int | None:
        token = vocabulary.settings.named.get(self._name)
        return None if token is None else vocabulary.token_to_id(token.content)

    def __set__(self, vocabulary: Vocabulary, index: int | None) -> None:
        token = None if index is None else vocabulary.convert_ids_to_tokens(index)
        if index is not None and token is None:
            raise InputError(f"{self._name}_id: no token has the id {index}")
        vocabulary.set_named_token(self._name, token)


class Vocabulary(ABC):
    """Tokens with ids, some of them special.

    Attributes:
        settings: special tokens, flags and chat templates.
        vocab_size: size of the vocabulary without added tokens; ``len(...)`` includes them.
        special_ids: ids that ``decode(..., skip_special_tokens=True)`` skips.
        bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token: texts of named
            tokens, or None; each with its id, such as ``bos_token_id``. To make another token of
            the vocabulary the pad token, assign it: ``tokenizer.pad_token = tokenizer.eos_token``.
    """

    vocab_size: int
    special_ids: frozenset[int]
    _added: Mapping[int, AddedToken]

    bos_token, bos_token_id = _NamedToken(), _NamedTokenId()
    eos_token, eos_token_id = _NamedToken(), _NamedTokenId()
    unk_token, unk_token_id = _NamedToken(), _NamedTokenId()
    sep_token, sep_token_id = _NamedToken(), _NamedTokenId()
    pad_token, pad_token_id = _NamedToken(), _NamedTokenId()
    cls_token, cls_token_id = _NamedToken(), _NamedTokenId()
    mask_token, mask_token_id = _NamedToken(), _NamedTokenId()

    def __init__(self, settings: TokenizerSettings, files: Mapping[str, bytes]) -> None:
        self.settings = settings
        self._files = dict(files)

    @abstractmethod
    def __len__(self) -> int:
        """Number of ids: the largest id plus one."""

    def token_to_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None if it does not exist."""
        return self._token_to_id(checked(token, (str,), "token", "a str"))

    def id_to_token(self, index: int) -> str | None:
        """Token of an id, as in the vocabulary; None beyond the vocabulary."""
        if not is_id(index):
            raise InputError(f"index: expected a token id, found {quoted(index)}")
        return self._id_to_token(int(index))

    @abstractmethod
    def _token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def _id_to_token(self, index: int) -> str | None: ...

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, AddedToken]:
        """Special tokens by text."""

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens, added tokens included."""
        tokens = ((self.id_to_token(index), index) for index in range(len(self)))
        return {token: index for token, index in tokens if token is not None}

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...
    @overload
    def convert_tokens_to_ids(self, tokens: list[str] | tuple[str, ...]) -> list[int | None]: ...
    def convert_tokens_to_ids(
        self, tokens: str | list[str] | tuple[str, ...]
    ) -> int | list[int | None] | None:
        """Ids of one or more tokens; that of the unknown token, or None, for other strings."""
        if not isinstance(tokens, str):
            return [self._id_or_unknown(token) for token in checked_list(tokens, "tokens")]
        return self._id_or_unknown(tokens)

    def _id_or_unknown(self, token: str) -> int | None:
        index = self.token_to_id(token)
        return self.unk_token_id if index is None else index

    @overload
    def convert_ids_to_tokens(self, ids: int, skip_special_tokens: bool = False) -> str | None: ...
    @overload
    def convert_ids_to_tokens(
        self, ids: Iterable[int], skip_special_tokens: bool = False
    ) -> list[str | None]: ...
    @checks_flags
    def convert_ids_to_tokens(
        self, ids: int | Iterable[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """Tokens of one or more ids; None beyond the vocabulary.

        Raises:
            InputError: not an id, or not a list or one-dimensional array of ids.
        """
        indices = list(iterate_ids(ids))
        if not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
            return self.id_to_token(indices[0])
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return [self.id_to_token(index) for index in indices if index not in skipped]

    def set_named_token(self, name: str, token: str | None) -> None:
        """Changes a named token, in the files that ``save`` writes too; None removes it.

        Raises:
            InputError: the token is not in the vocabulary, so that no model has learnt it.
        """
        if token is not None and not (
            isinstance(token, str) and self.token_to_id(token) is not None
        ):
            raise InputError(f"{name}: {quoted(token)} is not a token of the vocabulary")
        named = {key: value for key, value in self.settings.named.items() if key != name}
        if token is not None:
            named[name] = self.special_tokens.get(token, AddedToken(token))
        self.settings = replace(self.settings, named=named)
        self._set_option(name, token)

    def _set_option(self, name: str, value: object) -> None:
        """Sets a field of tokenizer_config.json, in the files that ``save`` writes too."""
        options = {**self.settings.options, name: value}
        self.settings = replace(self.settings, options=options)
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            is_kept = file in self._files and name.endswith(("_token", "_tokens"))
            if is_kept or file == "tokenizer_config.json":
                content = {**json.loads(self._files.get(file, b"{}")), name: value}
                self._files[file] = json.dumps(content, ensure_ascii=False, indent=2).encode()

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Texts of the named tokens, by name."""
        named = self.settings.named
        return {name: named[name].content for name in NAMED_TOKENS if name in named}

    @property
    def model_input_names(self) -> list[str]:
        """Names of what an encoding gives a model."""
        return ["input_ids", "attention_mask"]

    @property
    def extra_special_tokens(self) -> list[str]:
        """transformers 5's name of `additional_special_tokens`."""
        return self.additional_special_tokens

    @property
    def extra_special_tokens_ids(self) -> list[int | None]:
        """transformers 5's name of `additional_special_tokens_ids`."""
        return self.additional_special_tokens_ids

    @property
    def additional_special_tokens(self) -> list[str]:
        """Special tokens without a name of their own."""
        return [token.content for token in self.settings.extra]

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the added tokens, special ones included."""
        return {token.content: index for index, token in sorted(self._added.items())}

    @property
    def additional_special_tokens_ids(self) -> list[int | None]:
        """Ids of `additional_special_tokens`."""
        return [self.token_to_id(token) for token in self.additional_special_tokens]

    @property
    def all_special_tokens(self) -> list[str]:
        """Named and additional special tokens, each once."""
        named = self.special_tokens_map.values()
        return list(dict.fromkeys([*named, *self.additional_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of `all_special_tokens`."""
        ids = map(self.token_to_id, self.all_special_tokens)
        return [index for index in ids if index is not None]

    @property
    def model_max_length(self) -> int:
        """``model_max_length`` of tokenizer_config.json; 1e30 without one."""
        value: Any = self.settings.options.get("model_max_length")
        if value is None:
            return NO_MAX_LENGTH
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise TokenizerError(f"tokenizer_config.json: model_max_length is {quoted(value)}")
        return int(min(value, NO_MAX_LENGTH))

    @model_max_length.setter
    def model_max_length(self, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise InputError(f"model_max_length: expected a positive number, found {quoted(value)}")
        self._set_option("model_max_length", min(value, NO_MAX_LENGTH))

    if not TYPE_CHECKING:  # it would hide misspelt attributes from type checkers

        def __getattr__(self, name: str) -> Any:
            """Explains attributes of transformers' tokenizers; called for missing names only."""
            where = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = TOKENIZER_ATTRIBUTES.get(name)
            raise AttributeError(where if hint is None else f"{where}: {hint}")
