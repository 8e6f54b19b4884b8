"""Tokens and their ids: conversion both ways, special tokens, adding tokens, and saving."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, overload

from jaxllm.common.arguments import (
    TOKENIZER_ATTRIBUTES,
    checked,
    checked_list,
    checked_path,
    checks_flags,
)
from jaxllm.common.errors import InputError, TokenizerError, naming_file, quoted
from jaxllm.common.files import write_whole
from jaxllm.tokenizers.added_tokens import MAX_ADDED_TOKEN_BYTES, AddedToken
from jaxllm.tokenizers.settings import (
    FILE_NAMES,
    NAMED_TOKENS,
    TokenizerSettings,
    additional_templates,
    config_json,
)
from jaxllm.tokenizers.stream_decoder import is_id, iterate_ids

MAX_TEXT_BYTES = 1_000_000
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
        special_tokens: special tokens by text.
        special_ids: ids that ``decode(..., skip_special_tokens=True)`` skips.
        bos_token, eos_token, unk_token, sep_token, pad_token, cls_token, mask_token: texts of named
            tokens, or None; each with its id, such as ``bos_token_id``. To make another token of
            the vocabulary the pad token, assign it: ``tokenizer.pad_token = tokenizer.eos_token``.
    """

    vocab_size: int
    special_tokens: Mapping[str, AddedToken]
    special_ids: frozenset[int]
    _added: Mapping[int, AddedToken]
    _tokens_by_id: Sequence[str | None]

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

    def __len__(self) -> int:
        """Number of ids: the largest id plus one."""
        return len(self._tokens_by_id)

    def token_to_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None if it does not exist."""
        return self._token_to_id(checked(token, (str,), "token", "a str"))

    def id_to_token(self, index: int) -> str | None:
        """Token of an id, as in the vocabulary; None beyond the vocabulary."""
        if not is_id(index):
            raise InputError(f"index: expected a token id, found {quoted(index)}")
        tokens, index = self._tokens_by_id, int(index)
        return tokens[index] if 0 <= index < len(tokens) else None

    @abstractmethod
    def _token_to_id(self, token: str) -> int | None: ...

    def get_vocab(self) -> dict[str, int]:
        """Ids of all tokens, added tokens included."""
        tokens = enumerate(self._tokens_by_id)
        return {token: index for index, token in tokens if token is not None}

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
        """Tokens of one or more ids; None beyond the vocabulary."""
        indices = list(iterate_ids(ids))
        if not isinstance(ids, Iterable) or getattr(ids, "ndim", 1) == 0:
            return self.id_to_token(indices[0])
        skipped = self.special_ids if skip_special_tokens else frozenset()
        return [self.id_to_token(index) for index in indices if index not in skipped]

    def set_named_token(self, name: str, token: str | None) -> None:
        """Changes a named token, in the files that ``save`` writes too; None removes it."""
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
                content = json.loads(self._files.get(file, b"{}"))
                self._files[file] = config_json({**content, name: value})

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
    def additional_special_tokens(self) -> list[str]:
        """Special tokens without a name of their own."""
        return [token.content for token in self.settings.extra]

    extra_special_tokens = additional_special_tokens
    """transformers 5's name."""

    def get_added_vocab(self) -> dict[str, int]:
        """Ids of the added tokens, special ones included."""
        return {token.content: index for index, token in sorted(self._added.items())}

    @property
    def additional_special_tokens_ids(self) -> list[int | None]:
        """Ids of `additional_special_tokens`."""
        return [self.token_to_id(token) for token in self.additional_special_tokens]

    extra_special_tokens_ids = additional_special_tokens_ids
    """transformers 5's name."""

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

    @checks_flags
    def add_tokens(
        self,
        new_tokens: str | AddedToken | Sequence[str | AddedToken],
        special_tokens: bool = False,
    ) -> int:
        """Adds tokens at which texts are split; returns how many of them got a new id.

        A token of the vocabulary keeps its id, and is no longer split. ``save`` writes the added
        tokens. A model needs rows for new ids: ``model.resize_token_embeddings(len(tokenizer))``.

        Args:
            new_tokens: one or more tokens; ``AddedToken`` for one with options.
            special_tokens: tokens given as strings are special, so that ``skip_special_tokens``
                leaves them out.
        """
        single = isinstance(new_tokens, str | AddedToken)
        values = [new_tokens] if single else checked_list(new_tokens, "new_tokens")
        added, size = dict(self.settings.added), len(self)
        for value in values:
            if not isinstance(value, str | AddedToken) or value in ("", AddedToken("")):
                raise InputError(f"add_tokens: {quoted(value)} is not a token")
            check_text(str(value), MAX_TEXT_BYTES)
            if len(str(value).encode()) > MAX_ADDED_TOKEN_BYTES:
                raise InputError(
                    f"add_tokens: {quoted(value)} has more than {MAX_ADDED_TOKEN_BYTES} bytes"
                )
            if isinstance(value, str) and value in self.special_tokens:
                continue
            token = (
                AddedToken(value, special=special_tokens, normalized=not special_tokens)
                if isinstance(value, str)
                else value
            )
            known = {each.content: index for index, each in added.items()}
            index = known.get(token.content, self.token_to_id(token.content))
            if index is None:
                index, size = size, size + 1
            added[index] = token
        before = len(self)
        self._rebuild(replace(self.settings, added=dict(sorted(added.items()))))
        return len(self) - before

    @checks_flags
    def add_special_tokens(
        self, tokens: Mapping[str, Any], replace_extra_special_tokens: bool = True
    ) -> int:
        """Sets named tokens such as ``pad_token``, adding those that are new; returns how many are.

        Args:
            tokens: token by name; under ``additional_special_tokens`` or ``extra_special_tokens`` a
                list of further special tokens.
            replace_extra_special_tokens: the list takes the place of `additional_special_tokens`;
                otherwise it is added to them. Tokens that leave the list stay special.
        """
        lists = ("additional_special_tokens", "extra_special_tokens")
        checked(tokens, (Mapping,), "tokens", "a dict of tokens by name")
        unknown = tokens.keys() - {*NAMED_TOKENS, *lists}
        if unknown:
            raise InputError(f"{sorted(unknown)}: special tokens are {(*NAMED_TOKENS, *lists)}")
        named = {name: value for name, value in tokens.items() if name in NAMED_TOKENS}
        extra = [v for name in lists for v in checked_list(tokens.get(name) or (), name)]
        named, extra = {k: _special(v) for k, v in named.items()}, [_special(v) for v in extra]
        count = self.add_tokens([*named.values(), *extra], special_tokens=True)
        for name, value in named.items():
            self.set_named_token(name, value.content if isinstance(value, AddedToken) else value)
        special = [self.special_tokens[str(getattr(each, "content", each))] for each in extra]
        if extra:
            kept = () if replace_extra_special_tokens else self.settings.extra
            every = tuple(dict.fromkeys((*kept, *special)))
            self.settings = replace(self.settings, extra=every)
            self._set_option("additional_special_tokens", [token.content for token in every])
        return count

    @abstractmethod
    def _rebuild(self, settings: TokenizerSettings) -> None:
        """Makes the tokenizer anew with other added tokens, which ``save`` then writes."""

    def _become(self, other: Vocabulary) -> None:
        """Takes the state of another tokenizer, except for the sides of padding and truncation."""
        state = vars(self)
        sides = {name: state[name] for name in ("padding_side", "truncation_side")}
        state.clear()
        state.update({**vars(other), **sides})

    def save_pretrained(self, save_directory: str | PathLike[str]) -> tuple[str, ...]:
        """Writes the tokenizer's files, for transformers and jaxllm; returns their paths.

        Files that were loaded from a folder are written byte for byte, except for a named token
        that was changed. Files of an earlier tokenizer in the folder are removed.
        """
        folder = checked_path(save_directory, "save_directory")
        self.save(folder)
        return tuple(str(folder / name) for name in self._files)

    @property
    def file_names(self) -> tuple[str, ...]:
        """Names of the files that `save` writes."""
        return tuple(self._files)

    @classmethod
    def ids_version(cls, files: Collection[str]) -> int:
        """Number of the rules by which texts become ids, raised when they change.

        It tells that a job or run was begun with other ids. ``files`` are the names of the folder's
        tokenizer files.
        """
        return 1

    def digest(self) -> str:
        """Digest of the files that `save` writes, 16 hexadecimal digits."""
        digest = hashlib.sha256()
        for name, content in sorted(self._files.items()):
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
        return digest.hexdigest()[:16]

    def save(self, folder: str | PathLike[str]) -> None:
        """Saves the tokenizer; see :meth:`save_pretrained`."""
        folder = checked_path(folder, "folder")
        with naming_file(folder, TokenizerError, "created"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            with naming_file(folder / name, TokenizerError, "written"):
                (folder / name).parent.mkdir(exist_ok=True)
                write_whole(folder / name, content)
        # Those of an earlier tokenizer, which `load_tokenizer` would read too:
        for path in [*(folder / name for name in FILE_NAMES), *additional_templates(folder)]:
            if path.relative_to(folder).as_posix() not in self._files:
                with naming_file(path, TokenizerError, "written"):
                    path.unlink(missing_ok=True)

    if not TYPE_CHECKING:  # it would hide misspelt attributes from type checkers

        def __getattr__(self, name: str) -> Any:
            """Explains attributes of transformers' tokenizers; called for missing names only."""
            where = f"{type(self).__name__!r} object has no attribute {name!r}"
            hint = TOKENIZER_ATTRIBUTES.get(name)
            raise AttributeError(where if hint is None else f"{where}: {hint}")


def check_text(text: object, max_bytes: int) -> None:
    if isinstance(max_bytes, bool) or not isinstance(max_bytes, int):
        raise InputError(f"max_bytes is {max_bytes!r}: expected an int")
    if not isinstance(text, str):
        raise InputError(f"a text must be a str, not {type(text).__name__}")
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError as failure:
        raise InputError(
            f"the text holds an unpaired surrogate at character {failure.start}"
        ) from failure
    if size > max_bytes:
        raise InputError(
            f"the text has {size} bytes, but at most {max_bytes} are taken: pass max_bytes"
            " to allow more"
        )


def _special(token: Any) -> Any:
    """An added token that is special; other values as they are."""
    return replace(token, special=True) if isinstance(token, AddedToken) else token
