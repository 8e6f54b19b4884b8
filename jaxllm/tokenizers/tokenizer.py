"""Base class of tokenizers: encodes, pads batches, decodes, applies chat templates, saves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.errors import InputError, TemplateError, TokenizerError, UnsupportedError
from jaxllm.tokenizers.batch import BatchEncoding, Bucket, PaddingSide, checked_side, pad_rows
from jaxllm.tokenizers.chat import templates as chat
from jaxllm.tokenizers.settings import AddedToken, TokenizerSettings
from jaxllm.tokenizers.stream_decoder import Stage, StreamDecoder

MAX_TEXT_BYTES = 1_000_000
# Options of transformers' apply_chat_template that would become template variables here.
_UNSUPPORTED_CHAT_OPTIONS = frozenset(
    {
        "continue_final_message",
        "max_length",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenizer_kwargs",
        "truncation",
    }
)


class Tokenizer(ABC):
    """Converts text to token ids and back, with Hugging Face's names and ids.

    Attributes:
        vocab_size: size of the vocabulary without added tokens; ``len(tokenizer)`` includes them.
        bos_token_id, eos_token_id, pad_token_id, unk_token_id: ids, or None.
        special_ids: ids that ``decode(..., skip_special_tokens=True)`` skips.
        padding_side: default of ``__call__``: "left" or "right".
    """

    vocab_size: int
    special_ids: frozenset[int]
    padding_side: PaddingSide

    def __init__(
        self, settings: TokenizerSettings, files: Mapping[str, bytes], padding_side: PaddingSide
    ) -> None:
        self.settings = settings
        self._files = dict(files)
        side = settings.options.get("padding_side", padding_side)
        self.padding_side = checked_side(side, TokenizerError, "tokenizer_config.json: ")

    @abstractmethod
    def __len__(self) -> int:
        """Number of ids: the largest id plus one."""

    @abstractmethod
    def token_to_id(self, token: str) -> int | None:
        """Id of a token of the vocabulary; None if it does not exist."""

    @abstractmethod
    def id_to_token(self, index: int) -> str | None:
        """Token of an id, as in the vocabulary; None beyond the vocabulary."""

    @abstractmethod
    def _encode_text(self, text: str) -> list[int]:
        """Encodes a text, parsing special tokens in it; adds none."""

    @abstractmethod
    def _encode_parts(self, parts: Sequence[str | AddedToken]) -> list[int]:
        """Encodes a text whose special tokens are already split off; adds none.

        If ``_encode_text`` would parse the same special tokens, the ids are the same.
        """

    @abstractmethod
    def _add_special_tokens(self, ids: list[int], pair: list[int] | None) -> list[int]:
        """Adds BOS, EOS and similar tokens to one or two lists of ids."""

    @abstractmethod
    def _decode_stages(self, skip_special_tokens: bool) -> list[Stage]:
        """Makes new stages that decode tokens to text."""

    @property
    @abstractmethod
    def special_tokens(self) -> Mapping[str, AddedToken]:
        """Special tokens by text."""

    def _named_id(self, name: str) -> int | None:
        token = self.settings.named.get(name)
        return None if token is None else self.token_to_id(token.content)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    @property
    def pad_token_id(self) -> int | None:
        return self._named_id("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named_id("unk_token")

    @property
    def chat_template(self) -> str | None:
        """Default chat template (Jinja source), or None."""
        return self.settings.chat_templates.get("default")

    def encode(
        self,
        text: str,
        pair: str | None = None,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> list[int]:
        """Encodes a text, or a pair of texts.

        Args:
            text: the text.
            pair: a second text; Llama gives ``BOS text BOS pair``, T5 ``text </s> pair </s>``.
            add_special_tokens: add BOS and EOS as the model's tokenizer does.
            split_special_tokens: treat a special token in the text, such as ``</s>``, as plain
                text. Off by default, as in transformers; turn it on for untrusted text.
            max_bytes: maximum length of a text, in bytes of UTF-8.

        Raises:
            InputError: a text is not a ``str``, is too long, or has unpaired surrogates.
        """
        if split_special_tokens is None:
            split_special_tokens = self.settings.flag("split_special_tokens", False)
        encoded = []
        for part in (text,) if pair is None else (text, pair):
            _check_text(part, max_bytes)
            ids = self._encode_parts([part]) if split_special_tokens else self._encode_text(part)
            encoded.append(ids)
        if not add_special_tokens:
            return [index for ids in encoded for index in ids]
        return self._add_special_tokens(encoded[0], encoded[1] if pair is not None else None)

    def encode_user(self, text: str, *, max_bytes: int = MAX_TEXT_BYTES) -> list[int]:
        """Encodes untrusted text: special tokens in it are plain text; adds none."""
        return self.encode(
            text, add_special_tokens=False, split_special_tokens=True, max_bytes=max_bytes
        )

    def decode(self, ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Decodes ids. Ids beyond the vocabulary (of a padded embedding) are skipped.

        Raises:
            InputError: not an id, or not a list or one-dimensional array of ids.
        """
        stream = self.stream_decoder(skip_special_tokens)
        return stream.put(ids) + stream.end()

    def stream_decoder(self, skip_special_tokens: bool = True) -> StreamDecoder:
        """Makes an incremental decoder for generated ids; see :class:`StreamDecoder`."""
        skipped = self.special_ids if skip_special_tokens else frozenset()

        def id_to_token(index: int) -> str | None:
            return None if index in skipped else self.id_to_token(index)

        return StreamDecoder(id_to_token, self._decode_stages(skip_special_tokens))

    def token_bytes(self) -> tuple[bytes | None, ...]:
        """UTF-8 bytes of each id inside a text; None for an id without a token.

        A byte-level or byte token may be part of a character. A special token is its own text.
        Spaces that ``decode`` removes or adds between tokens are ignored, as in transformers.
        """
        return self._token_bytes

    @cached_property
    def _token_bytes(self) -> tuple[bytes | None, ...]:
        stages = self._decode_stages(skip_special_tokens=False)

        def encode_token(token: str) -> bytes:
            for stage in stages:
                text = stage.token_text(token)
                if isinstance(text, bytes):
                    return text
                token = text
            return token.encode("utf-8")

        tokens = map(self.id_to_token, range(len(self)))
        return tuple(None if token is None else encode_token(token) for token in tokens)

    def __call__(
        self,
        texts: str | Sequence[str],
        *,
        padding_side: PaddingSide | None = None,
        bucket: Bucket = None,
        add_special_tokens: bool = True,
        split_special_tokens: bool | None = None,
        max_length: int | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
    ) -> BatchEncoding:
        """Encodes and pads a batch of prompts.

        Args:
            texts: one or more prompts. An empty prompt becomes BOS if the tokenizer has one.
            padding_side: "left" or "right"; the tokenizer's own by default.
            bucket: None pads to the longest prompt. An int rounds that length up to a multiple of
                it, ``"power_of_two"`` to a power of two, so that few lengths are compiled.
            add_special_tokens, split_special_tokens, max_bytes: as for :meth:`encode`.
            max_length: maximum tokens of a prompt; a longer one is an error.

        Raises:
            InputError: no prompt, an empty one without BOS, or one that is too long.
        """
        side = checked_side(padding_side or self.padding_side, InputError)
        rows = [
            self.encode(
                text,
                add_special_tokens=add_special_tokens,
                split_special_tokens=split_special_tokens,
                max_bytes=max_bytes,
            )
            for text in _text_list(texts)
        ]
        return self.pad(rows, padding_side=side, bucket=bucket, max_length=max_length)

    def pad(
        self,
        rows: Sequence[Sequence[int]],
        *,
        padding_side: PaddingSide | None = None,
        bucket: Bucket = None,
        max_length: int | None = None,
    ) -> BatchEncoding:
        """Pads lists of ids to one length; arguments and errors are those of ``__call__``."""
        side = checked_side(padding_side or self.padding_side, InputError)
        if len(rows) == 0:
            raise InputError("the batch is empty: give at least one prompt")
        rows = [self._bos_if_empty(row, number) for number, row in enumerate(rows)]
        for number, row in enumerate(rows):
            if max_length is not None and len(row) > max_length:
                raise InputError(
                    f"prompt {number} has {len(row)} tokens, but max_length is {max_length}"
                )
        pad = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
        return pad_rows(rows, 0 if pad is None else pad, side, bucket)

    def _bos_if_empty(self, row: Sequence[int], number: int) -> Sequence[int]:
        if len(row) > 0:
            return row
        if self.bos_token_id is None:
            raise InputError(
                f"prompt {number} is empty, and the tokenizer has no BOS token to begin with"
            )
        return [self.bos_token_id]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tokenize: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
        **kwargs: Any,
    ) -> list[int] | str:
        """Applies the chat template to a conversation; returns ids or text.

        The ids are those of transformers, except that a special token in a message or tool is plain
        text. No special tokens are added to the template's own.

        Args:
            messages: ``{"role": ..., "content": ...}``, and other keys that the template reads.
            add_generation_prompt: append the start of the assistant's turn.
            tokenize: return ids; if False, the text.
            tools: JSON schemas of functions, for templates with tools.
            chat_template: a template, or the name of one of the tokenizer's.
            max_bytes: maximum length of the text that is tokenized, in bytes of UTF-8.
            **kwargs: further variables for the template.

        Raises:
            TemplateError: there is no template, or it is too large, too slow, or failed.
            InputError: the messages are no list of dicts of JSON values, or become too long.
            UnsupportedError: an option of transformers that is not a template variable.
        """
        unsupported = _UNSUPPORTED_CHAT_OPTIONS.intersection(kwargs)
        if unsupported:
            raise UnsupportedError(f"apply_chat_template does not take {sorted(unsupported)}")
        if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
            raise InputError(f"messages: expected a list of dicts, found {type(messages).__name__}")
        for message in messages:
            if not isinstance(message, Mapping):
                raise InputError(
                    f"messages: expected a list of dicts, found a {type(message).__name__} in it"
                )
        template = self._select_template(chat_template, tools is not None)
        variables: dict[str, Any] = {
            name: token.content for name, token in self.settings.named.items()
        }
        if self.settings.extra:
            variables["additional_special_tokens"] = [t.content for t in self.settings.extra]
        variables |= {"add_generation_prompt": add_generation_prompt, **kwargs}
        untrusted = {"messages": messages, "tools": tools}
        if "documents" in variables:
            untrusted["documents"] = variables.pop("documents")
        if not tokenize:
            return chat.render(template, {**untrusted, **variables})
        rendered = chat.render_parts(template, untrusted, variables, self.special_tokens)
        parts = [rendered] if isinstance(rendered, str) else rendered
        _check_text("".join(p if isinstance(p, str) else p.content for p in parts), max_bytes)
        return (
            self._encode_text(rendered) if isinstance(rendered, str) else self._encode_parts(parts)
        )

    def _select_template(self, chat_template: str | None, has_tools: bool) -> str:
        templates = self.settings.chat_templates
        if chat_template is not None:
            if not isinstance(chat_template, str):
                raise InputError(
                    f"chat_template: expected a str, found {type(chat_template).__name__}"
                )
            return templates.get(chat_template, chat_template)
        if has_tools and "tool_use" in templates:
            return templates["tool_use"]
        if "default" not in templates:
            raise TemplateError(
                "this tokenizer has no default chat template: pass chat_template="
                + (f", for example the name of one of {sorted(templates)}" if templates else "...")
            )
        return templates["default"]

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes the tokenizer's files, for transformers and jaxllm.

        Files that were loaded from a folder are written byte for byte.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            (folder / name).write_bytes(content)


def _text_list(texts: Any) -> list[Any]:
    """The texts of a batch: one string, or a list or other sequence of them."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(f"expected a str or a list of str, found {type(texts).__name__}")
    return list(texts)


def _check_text(text: Any, max_bytes: int) -> None:
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
