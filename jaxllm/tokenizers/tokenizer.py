"""Tokenizers as callers see them: encoding of batches, padding, and chat templates."""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, ClassVar, Literal, Self, TypedDict, Unpack, cast, overload

import numpy as np

from jaxllm.common.arguments import checked, checks_flags, is_satisfied
from jaxllm.common.errors import (
    InputError,
    TemplateError,
    TokenizerError,
    UnsupportedError,
    quoted,
)
from jaxllm.tokenizers.batch import (
    FILLERS,
    BatchEncoding,
    Bucket,
    ListEncoding,
    Padding,
    PaddingSide,
    ReturnTensors,
    Truncation,
    as_tensors,
    check_return_tensors,
    checked_side,
    pad_values,
    padded_length,
    padded_rows,
    truncate,
    unpadded_rows,
)
from jaxllm.tokenizers.chat_templates import prepare
from jaxllm.tokenizers.chats import Chat, Parts, cut_at, shared_length
from jaxllm.tokenizers.messages import plain_rows
from jaxllm.tokenizers.settings import TokenizerSettings, drop_template_files, template_option
from jaxllm.tokenizers.template_analysis import template_reads
from jaxllm.tokenizers.text_encoder import TextEncoder, TextOptions
from jaxllm.tokenizers.vocabulary import MAX_TEXT_BYTES, check_text

# Options of transformers' apply_chat_template that would become template variables here.
_UNSUPPORTED_CHAT_OPTIONS = frozenset({"return_assistant_tokens_mask", "tokenizer_kwargs"})
# Options for which an encoding says more of its tokens than their ids.
_DETAILS = ("return_offsets_mapping", "return_special_tokens_mask")


class PaddingOptions(TypedDict, total=False):
    """Options of :meth:`Tokenizer.pad`."""

    padding: Padding
    max_length: int | None
    pad_to_multiple_of: int | None
    bucket: Bucket
    padding_side: PaddingSide | None


class EncodingOptions(PaddingOptions, TextOptions, total=False):
    """Options of a tokenizer's call."""

    return_offsets_mapping: bool
    return_attention_mask: bool | None
    src_lang: str | None
    tgt_lang: str | None
    return_special_tokens_mask: bool
    return_length: bool


class Tokenizer(TextEncoder):
    """Converts text to token ids and back, with Hugging Face's names and ids.

    Attributes:
        padding_side, truncation_side: defaults of ``__call__``: "left" or "right".
    """

    padding_side: PaddingSide
    translates: ClassVar[bool] = False
    """True for the tokenizers of translation models: an empty line is translated as it is."""
    _encodes_targets = False
    """True while it encodes texts that the model should write."""

    def __init__(
        self, settings: TokenizerSettings, files: Mapping[str, bytes], padding_side: PaddingSide
    ) -> None:
        super().__init__(settings, files)
        for name, default in (("padding_side", padding_side), ("truncation_side", "right")):
            side = settings.options.get(name, default)
            setattr(
                self, name, checked_side(side, TokenizerError, f"tokenizer_config.json: {name}")
            )

    @overload
    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        return_tensors: None = None,
        **options: Unpack[EncodingOptions],
    ) -> list[int]: ...
    @overload
    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        return_tensors: Literal["np", "jax"],
        **options: Unpack[EncodingOptions],
    ) -> Any: ...
    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        *,
        return_tensors: ReturnTensors = None,
        **options: Unpack[EncodingOptions],
    ) -> Any:
        """Encodes a text, or a pair of texts; options and errors are those of ``__call__``.

        Args:
            text: the text.
            text_pair: a second text; Llama gives ``BOS text BOS pair``, T5 ``text </s> pair </s>``.
            return_tensors: None for a list of ids; "np" or "jax" for an array [1, T] of int32.
        """
        if not isinstance(text, str):
            raise InputError(f"a text must be a str, not {type(text).__name__}")
        return self(text, text_pair, return_tensors=return_tensors, **options).input_ids

    @overload
    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        text_pair: str | Sequence[str] | None = None,
        text_target: str | Sequence[str] | None = None,
        *,
        return_tensors: Literal["np", "jax"],
        **options: Unpack[EncodingOptions],
    ) -> BatchEncoding: ...
    @overload
    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        text_pair: str | Sequence[str] | None = None,
        text_target: str | Sequence[str] | None = None,
        *,
        return_tensors: None = None,
        **options: Unpack[EncodingOptions],
    ) -> ListEncoding: ...
    def __call__(
        self,
        text: str | Sequence[str] | None = None,
        text_pair: str | Sequence[str] | None = None,
        text_target: str | Sequence[str] | None = None,
        *,
        return_tensors: ReturnTensors = None,
        **options: Unpack[EncodingOptions],
    ) -> BatchEncoding | ListEncoding:
        """Encodes one or more prompts, as transformers does with the same arguments.

        ``tokenizer(texts, padding=True, return_tensors="np")`` gives a model its arrays. Other than
        in transformers, a text longer than ``max_length`` is an error without ``truncation``.

        Args:
            text: one or more prompts. In arrays an empty prompt becomes BOS if the tokenizer has
                one.
            text_pair: as many second texts; see :meth:`encode`.
            text_target: as many texts that the model should write; their ids, padded like the
                prompts' with the pad token, are the ``labels``. Without ``text`` the result is
                theirs alone.
            return_tensors: "np" or "jax" for arrays [B, T] of int32; None for lists, and one list
                if ``text`` is one string (the default).
            padding: True or "longest" pads to the longest prompt, "max_length" to ``max_length``,
                False not at all (the default without ``bucket``).
            truncation: True or "longest_first" shortens the longer text until there are at most
                ``max_length`` tokens; "only_first" and "only_second" shorten that text.
            max_length: maximum tokens of a prompt, special tokens included; a longer one is an
                error without ``truncation``. None: the tokenizer's ``model_max_length`` for
                ``truncation`` and ``padding="max_length"``, otherwise no limit. Without any limit
                ``truncation`` warns that it cuts nothing.
            pad_to_multiple_of: rounds the padded length up to a multiple; needs ``padding``.
            bucket: the same, or ``"power_of_two"``, so that few lengths are compiled; pads by
                itself.
            padding_side: "left" or "right"; the tokenizer's own by default.
            return_offsets_mapping: ``offset_mapping`` [B, T, 2] too, start and end of each token
                in its text, in characters; only tokenizers of a tokenizer.json have it.
            return_attention_mask: False leaves the mask out of lists.
            return_special_tokens_mask: ``special_tokens_mask`` [B, T] too, 1 at tokens that were
                added to the texts and at padding.
            return_length: ``length`` [B] too, the number of tokens with padding.
            src_lang, tgt_lang: languages of this call's texts and targets, for translation models.
            add_special_tokens: add BOS and EOS as the model's tokenizer does.
            split_special_tokens: treat a special token in the text, such as ``</s>``, as plain
                text. Off by default, as in transformers; turn it on for untrusted text.
            max_bytes: maximum length of a text, in bytes of UTF-8.
        """
        unknown = options.keys() - EncodingOptions.__annotations__.keys()
        unsupported = sorted(name for name in unknown if not is_satisfied(name, options.get(name)))
        if unsupported:
            raise UnsupportedError(f"a tokenizer's call does not take {unsupported}")
        languages: Any = {name: options.pop(name, None) for name in ("src_lang", "tgt_lang")}
        if any(language is not None for language in languages.values()):
            own = self.with_languages(**languages)
            return own(text, text_pair, text_target, return_tensors=return_tensors, **options)
        if text_target is not None:
            return self._with_labels(text, text_pair, text_target, return_tensors, options)
        for name in (*_DETAILS, "return_attention_mask", "return_length"):
            checked(options.get(name), (bool, type(None)), name, "True or False")
        texts = _text_list(text)
        pairs = [None] * len(texts) if text_pair is None else _text_list(text_pair)
        one_of_each = text_pair is None or isinstance(text, str) == isinstance(text_pair, str)
        if len(pairs) != len(texts) or not one_of_each:
            raise InputError(f"text_pair: {len(pairs)} second texts for {len(texts)} texts")
        encoding: Any = {k: v for k, v in options.items() if k in TextOptions.__annotations__}
        padding: Any = {k: v for k, v in options.items() if k in PaddingOptions.__annotations__}
        spans, mask = (bool(options.get(name)) for name in _DETAILS)
        rows = self._encode_rows(texts, pairs, with_spans=spans, with_mask=mask, **encoding)
        batch = self._pad(rows, return_tensors, **padding)
        if options.get("return_attention_mask") is False:
            if not isinstance(batch, ListEncoding):
                raise UnsupportedError("return_attention_mask=False: arrays have their mask")
            batch = replace(batch, attention_mask=None)
        lengths: Any = [len(row) for row in cast(list[Any], batch.input_ids)]
        if isinstance(batch, ListEncoding) and isinstance(text, str):
            batch = ListEncoding(**{name: value[0] for name, value in batch.items()})
        if not options.get("return_length"):
            return batch
        if isinstance(batch, ListEncoding):
            return replace(batch, length=lengths)
        return as_tensors(replace(batch, length=np.asarray(lengths, np.int32)), return_tensors)

    def _with_labels(
        self, text: Any, text_pair: Any, target: Any, return_tensors: Any, options: Any
    ) -> Any:
        """The encoding of texts, with the ids of their targets as labels."""
        labels = self.for_targets()(target, return_tensors=return_tensors, **options)
        if text is None:
            return labels
        if len(_text_list(target)) != len(_text_list(text)):
            raise InputError("text_target: expected one for each text")
        batch: Any = self(text, text_pair, return_tensors=return_tensors, **options)
        return replace(batch, labels=labels.input_ids)

    def with_languages(self, src_lang: str | None = None, tgt_lang: str | None = None) -> Self:
        """A copy for texts in `src_lang` and targets in `tgt_lang`; None: as it is.

        Raises:
            InputError: the tokenizer has no such language, or none at all.
        """
        for name, language in (("src_lang", src_lang), ("tgt_lang", tgt_lang)):
            if language is not None:
                raise InputError(f"{name}: a {type(self).__name__} has no languages; leave it out")
        return self

    def target_fields(self, tgt_lang: str) -> dict[str, int]:
        """Generation settings with which a model writes in a language.

        Raises:
            InputError: as `with_languages`.
        """
        self.with_languages(tgt_lang=tgt_lang)
        return {}

    def with_target(self, fields: Mapping[str, Any], tgt_lang: str | None) -> dict[str, Any]:
        """Generation settings in which the settings of `target_fields` are set.

        Args:
            fields: the settings.
            tgt_lang: the language; None: the tokenizer's `tgt_lang`, unless `fields` name one.

        Raises:
            InputError: as `with_languages`, or a setting contradicts the language.
        """
        own = {} if tgt_lang is None else self.target_fields(tgt_lang)
        for name, value in own.items():
            if fields.get(name) not in (None, value):
                raise InputError(
                    f"{name}: {quoted(fields[name])} contradicts tgt_lang {quoted(tgt_lang)}, "
                    f"which is {value}; leave one of the two out"
                )
        return {**fields, **own}

    def encode_target(self, text: str, settings: Any) -> list[int]:
        """Ids of a text that the model should write, without an end token. The language with which
        a translation begins (`forced_bos_token_id` of the generation settings) is the first."""
        ids = self.for_targets().encode(text, add_special_tokens=False)
        code = settings.forced_bos_token_id if self.translates and settings is not None else None
        return ids if code is None else [code, *ids]

    def is_blank(self, text: str) -> bool:
        """True for a text that is empty, or has spaces alone."""
        return not text.strip()

    def check_not_blank(self, text: str, name: str) -> None:
        """Raises InputError for a text that `is_blank`; `name` is its field."""
        if self.is_blank(text):
            raise InputError(f"{name}: has no text, found {text[:20]!r}; it must not be empty")

    def for_targets(self) -> Self:
        """A copy that encodes the texts which the model should write."""
        copied = copy.copy(self)
        copied._encodes_targets = True
        return copied

    @overload
    def pad(
        self,
        rows: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        return_tensors: Literal["np", "jax"],
        **options: Unpack[PaddingOptions],
    ) -> BatchEncoding: ...
    @overload
    def pad(
        self,
        rows: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        return_tensors: None = None,
        **options: Unpack[PaddingOptions],
    ) -> ListEncoding: ...
    def pad(
        self,
        rows: Sequence[Sequence[int]] | Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        return_tensors: ReturnTensors = None,
        **options: Unpack[PaddingOptions],
    ) -> BatchEncoding | ListEncoding:
        """Pads rows to one length; options and errors are those of ``__call__``.

        ``padding`` is True by default.

        Args:
            rows: lists of ids; or, as in transformers, dicts with ``input_ids`` (the outputs of
                calls), or one dict of lists. ``attention_mask`` is padded with 0, ``labels`` are
                returned as they are.
            return_tensors: as for ``__call__``.
        """
        return self._pad(unpadded_rows(rows), return_tensors, **{"padding": True, **options})

    def _pad(
        self,
        rows: ListEncoding,
        return_tensors: ReturnTensors,
        *,
        padding: Padding | None = None,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        bucket: Bucket = None,
        padding_side: PaddingSide | None = None,
    ) -> BatchEncoding | ListEncoding:
        if padding is None:
            padding = bucket is not None
        checked(padding, (bool, str), "padding", "True, False or a strategy")
        check_return_tensors(return_tensors)
        side = checked_side(self.padding_side if padding_side is None else padding_side, InputError)
        if bucket is not None and pad_to_multiple_of is not None:
            raise InputError("give bucket or pad_to_multiple_of, not both")
        if pad_to_multiple_of is not None and padding in (False, "do_not_pad"):
            raise InputError("pad_to_multiple_of: give padding=True with it, or leave it out")
        if max_length is not None or padding == "max_length":
            max_length = self._max_length(max_length, "padding='max_length'")
        ids: Any = rows.input_ids
        if not ids:
            raise InputError("the batch is empty: give at least one prompt")
        for number, row in enumerate(ids):
            if max_length is not None and len(row) > max_length:
                raise InputError(
                    f"prompt {number} has {len(row)} tokens, but max_length is {max_length}"
                )
        if return_tensors is not None and not all(map(len, ids)):
            rows = self._without_empty_rows(rows)
            ids = rows.input_ids
        length = padded_length(
            ids, padding, max_length, pad_to_multiple_of if bucket is None else bucket
        )
        if length is None and return_tensors is None:
            masks: Any = rows.attention_mask or [[1] * len(row) for row in ids]
            lists = {"input_ids": list(map(list, ids)), "attention_mask": list(map(list, masks))}
            return replace(rows, **lists)
        if length is None:
            length = len(ids[0])
            if any(len(row) != length for row in ids):
                raise InputError(
                    "the prompts have different lengths: an array needs padding=True, or"
                    " truncation and padding='max_length'"
                )
        if length * len(ids) > MAX_TEXT_BYTES:
            raise InputError(
                f"{len(ids)} rows of {length} tokens: an array has at most {MAX_TEXT_BYTES}; lower"
                " max_length or pad_to_multiple_of"
            )
        pad = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
        batch = padded_rows(rows, 0 if pad is None else pad, side, length)
        if return_tensors is not None:
            return as_tensors(batch, return_tensors)
        lists = {name: value.tolist() for name, value in batch.items()}
        if rows.offset_mapping is not None:
            spans: Any = rows.offset_mapping
            lists["offset_mapping"] = pad_values(spans, (0, 0), side, length)
        return ListEncoding(**lists)

    def _without_empty_rows(self, rows: ListEncoding) -> ListEncoding:
        """Rows in which BOS stands for an empty prompt."""
        if self.bos_token_id is None:
            ids: Any = rows.input_ids
            empty = next(number for number, row in enumerate(ids) if len(row) == 0)
            raise InputError(
                f"prompt {empty} is empty, and the tokenizer has no BOS token to begin with"
            )
        values = {"input_ids": self.bos_token_id, **FILLERS, "attention_mask": 1}
        filled: dict[str, Any] = {
            name: [row if len(row) > 0 else [values[name]] for row in column]
            for name, column in rows.items()
            if name != "labels"
        }
        return replace(rows, **filled)

    @property
    def chat_template(self) -> str | None:
        """Default chat template (Jinja source), or None."""
        return self.settings.chat_templates.get("default")

    @chat_template.setter
    def chat_template(self, template: str | Mapping[str, str] | None) -> None:
        kinds = (str, Mapping, type(None))
        checked(template, kinds, "chat_template", "a template, a dict of them by name or None")
        templates = {"default": template} if isinstance(template, str) else dict(template or {})
        for name, each in templates.items():
            check_text(checked(name, (str,), "chat_template", "names"), MAX_TEXT_BYTES)
            check_text(each, MAX_TEXT_BYTES)
        self.settings = replace(self.settings, chat_templates=templates)
        drop_template_files(self._files)
        self._set_option("chat_template", template_option(templates))

    @contextmanager
    def as_target_tokenizer(self) -> Generator[None]:
        """Context in which texts are encoded as targets, as old scripts do; see ``text_target``."""
        self._encodes_targets = True
        try:
            yield
        finally:
            self._encodes_targets = False

    @checks_flags
    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]] | str,
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_tensors: ReturnTensors = None,
        return_dict: bool = False,
        padding: Padding = False,
        truncation: Truncation = False,
        max_length: int | None = None,
        tools: Sequence[Mapping[str, Any]] | str | None = None,
        chat_template: str | None = None,
        max_bytes: int = MAX_TEXT_BYTES,
        **kwargs: Any,
    ) -> Any:
        """Applies the chat template to a conversation, or to each of several; returns ids or text.

        The ids are those of transformers, except that a special token in a message or tool is plain
        text. No special tokens are added to the template's own.

        Args:
            messages: ``{"role": ..., "content": ...}``, and other keys that the template reads; or
                a list of such conversations. A content is a text or a list of parts
                ``{"type": "text", "text": ...}``.
            add_generation_prompt: append the start of the assistant's turn; None: unless
                `continue_final_message` (transformers: not).
            continue_final_message: end inside the last message, so that the model goes on with it.
            tokenize: return ids; if False, the text.
            return_tensors: "np" or "jax" for int32 [B, T]; None for a list.
            return_dict: return ids and mask, as a call of the tokenizer does (transformers 5: the
                default).
            padding, truncation, max_length: as for ``__call__``.
            tools: JSON schemas of functions, for templates with tools; a list, or JSON text.
            chat_template: a template, or the name of one of the tokenizer's.
            max_bytes: maximum length of the text that is tokenized, in bytes of UTF-8.
            **kwargs: further variables for the template.

        Returns:
            ``list[int]`` for one conversation, or a list of them; ``str`` with ``tokenize=False``;
            an array or an encoding with ``return_tensors`` or ``return_dict``.
        """
        unsupported = _UNSUPPORTED_CHAT_OPTIONS.intersection(kwargs)
        if unsupported:
            raise UnsupportedError(f"apply_chat_template does not take {sorted(unsupported)}")
        if continue_final_message and add_generation_prompt:
            raise InputError(
                "add_generation_prompt cannot be combined with continue_final_message; give one"
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        variables = {"add_generation_prompt": add_generation_prompt, "tools": tools, **kwargs}
        given: Any = messages if isinstance(messages, Sequence) else plain_rows(messages)
        single = not _are_conversations(given)
        conversations: dict[str, Any] = {"messages": given}
        if not single:
            conversations = {f"messages[{n}]": each for n, each in enumerate(plain_rows(given))}
        chats = [
            Chat.of(
                self.settings,
                chat_template,
                each,
                variables,
                name=name,
                continues=continue_final_message,
            )
            for name, each in conversations.items()
        ]
        if not tokenize:
            texts = [chat.text() for chat in chats]
            return texts[0] if single else texts
        rows = [self._encode_chat(chat.parts(self.special_tokens), max_bytes) for chat in chats]
        limit = self._truncation_length(truncation, max_length)
        if limit is not None:
            side = self.truncation_side
            rows = [truncate(row, None, limit, truncation, side)[0] for row in rows]
        batch = self.pad(
            rows, padding=padding, max_length=max_length, return_tensors=return_tensors
        )
        if isinstance(batch, ListEncoding) and single:
            batch = ListEncoding(batch.input_ids[0], batch.attention_mask[0])  # pyright: ignore
        return batch if return_dict else batch.input_ids

    def marked_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        chat_template: str | None = None,
    ) -> list[tuple[int, int]]:
        """The tokens that a chat template marks with ``{% generation %}``, for training.

        Args:
            messages, tools, chat_template: as for `apply_chat_template`.

        Returns:
            For each mark its first token, and the token after its last, among the ids of
            `apply_chat_template` without a generation prompt. As in transformers, a token that is
            marked in part belongs to the mark.
        """
        variables = {"add_generation_prompt": False, "tools": tools}
        chat = Chat.of(self.settings, chat_template, messages, variables)
        parts = chat.parts(self.special_tokens)
        ids = self._encode_chat(parts)
        result: list[tuple[int, int]] = []
        for span in chat.marked_spans():
            before, until = (self._encode_chat(cut_at(parts, position)) for position in span)
            shared = shared_length(ids, until)
            end = shared if shared == len(until) else shared + 1
            result.append((shared_length(ids, before), end))
        return result

    def prepare_chats(self) -> None:
        """Compiles the chat templates, so that processes which are forked later need not."""
        for template in self.settings.chat_templates.values():
            with suppress(TemplateError):
                prepare(template, self.special_tokens)
                template_reads(template)

    def _encode_chat(self, parts: Parts, max_bytes: int = sys.maxsize) -> list[int]:
        """Token ids of a rendered chat."""
        if isinstance(parts, str):
            check_text(parts, max_bytes)
            return self._encode_texts([parts])[0]
        check_text("".join(p if isinstance(p, str) else p.content for p in parts), max_bytes)
        return self._encode_parts(parts)


def _text_list(texts: object) -> list[Any]:
    """The texts of a batch: one string, or a list or other sequence of them."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(f"expected a str or a list of str, found {type(texts).__name__}")
    dtype = getattr(texts, "dtype", None)
    if dtype is not None and getattr(dtype, "kind", None) not in ("U", "O", "T"):
        raise InputError(f"expected a str or a list of str, found an array of {dtype}")
    return list(texts)


def _are_conversations(messages: Any) -> bool:
    """True for a list of conversations, False for the messages of one."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        return False
    return bool(messages) and all(
        isinstance(each, Sequence) and not isinstance(each, str | bytes) for each in messages
    )
