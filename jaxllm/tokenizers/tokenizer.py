"""Base class of tokenizers: encodes, pads batches, decodes, applies chat templates, saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from jaxllm.common.atomic_file import write_whole
from jaxllm.common.errors import (
    InputError,
    TemplateError,
    TokenizerError,
    UnsupportedError,
    naming_file,
)
from jaxllm.tokenizers.batch import (
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
    pad_rows,
    padded_length,
    unpadded,
)
from jaxllm.tokenizers.chat import templates as chat
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.text_encoder import MAX_TEXT_BYTES, TextEncoder, check_text

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


class PaddingOptions(TypedDict, total=False):
    """Options of :meth:`Tokenizer.pad`."""

    padding: Padding
    max_length: int | None
    pad_to_multiple_of: int | None
    bucket: Bucket
    padding_side: PaddingSide | None


class EncodingOptions(PaddingOptions, total=False):
    """Options of a tokenizer's call."""

    truncation: Truncation
    add_special_tokens: bool
    split_special_tokens: bool | None
    max_bytes: int


_ONLY_PADDING = PaddingOptions.__annotations__.keys() - {"max_length"}


class Tokenizer(TextEncoder):
    """Converts text to token ids and back, with Hugging Face's names and ids.

    Attributes:
        padding_side, truncation_side: defaults of ``__call__``: "left" or "right".
    """

    padding_side: PaddingSide
    truncation_side: PaddingSide

    def __init__(
        self, settings: TokenizerSettings, files: Mapping[str, bytes], padding_side: PaddingSide
    ) -> None:
        super().__init__(settings, files)
        for name, default in (("padding_side", padding_side), ("truncation_side", "right")):
            side = settings.options.get(name, default)
            setattr(
                self, name, checked_side(side, TokenizerError, f"tokenizer_config.json: {name}")
            )

    @property
    def chat_template(self) -> str | None:
        """Default chat template (Jinja source), or None."""
        return self.settings.chat_templates.get("default")

    @overload
    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: Literal["np", "jax"] = "np",
        **options: Unpack[EncodingOptions],
    ) -> BatchEncoding: ...
    @overload
    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: None,
        **options: Unpack[EncodingOptions],
    ) -> ListEncoding: ...
    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        *,
        return_tensors: ReturnTensors = "np",
        **options: Unpack[EncodingOptions],
    ) -> BatchEncoding | ListEncoding:
        """Encodes and pads one or more prompts, as transformers does with the same arguments.

        The defaults differ: transformers pads nothing and returns lists (``padding=False,
        return_tensors=None``), and a longer text than ``max_length`` is no error there.

        Args:
            text: one or more prompts. In arrays an empty prompt becomes BOS if the tokenizer has
                one.
            text_pair: as many second texts; see :meth:`encode`.
            return_tensors: "np" or "jax" for arrays [B, T] of int32; None for lists, and one list
                if ``text`` is one string.
            padding: True or "longest" pads to the longest prompt, "max_length" to ``max_length``,
                False not at all.
            truncation: True or "longest_first" shortens the longer text until there are at most
                ``max_length`` tokens; "only_first" and "only_second" shorten that text.
            max_length: maximum tokens of a prompt, special tokens included; a longer one is an
                error without ``truncation``. None: the tokenizer's ``model_max_length`` for
                ``truncation`` and ``padding="max_length"``, otherwise no limit.
            pad_to_multiple_of: rounds the padded length up to a multiple.
            bucket: the same, or ``"power_of_two"``, so that few lengths are compiled.
            padding_side: "left" or "right"; the tokenizer's own by default.
            add_special_tokens, split_special_tokens, max_bytes: as for :meth:`encode`.

        Raises:
            InputError: no prompt, an empty one without BOS, or one that is too long.
            UnsupportedError: another option of transformers.
        """
        unknown = options.keys() - EncodingOptions.__annotations__.keys()
        if unknown:
            raise UnsupportedError(f"a tokenizer's call does not take {sorted(unknown)}")
        texts = _text_list(text)
        pairs = [None] * len(texts) if text_pair is None else _text_list(text_pair)
        one_of_each = text_pair is None or isinstance(text, str) == isinstance(text_pair, str)
        if len(pairs) != len(texts) or not one_of_each:
            raise InputError(f"text_pair: {len(pairs)} second texts for {len(texts)} texts")
        encoding: Any = {k: v for k, v in options.items() if k not in _ONLY_PADDING}
        rows = [self.encode(*both, **encoding) for both in zip(texts, pairs, strict=True)]
        padding: Any = {k: v for k, v in options.items() if k in PaddingOptions.__annotations__}
        batch = self.pad(rows, return_tensors=return_tensors, **padding)
        if isinstance(batch, ListEncoding) and isinstance(text, str):
            return ListEncoding(*(rows[0] for rows in batch.values()))
        return batch

    @overload
    def pad(
        self,
        rows: Sequence[Sequence[int]],
        *,
        return_tensors: Literal["np", "jax"] = "np",
        **options: Unpack[PaddingOptions],
    ) -> BatchEncoding: ...
    @overload
    def pad(
        self,
        rows: Sequence[Sequence[int]],
        *,
        return_tensors: ReturnTensors,
        **options: Unpack[PaddingOptions],
    ) -> BatchEncoding | ListEncoding: ...
    def pad(
        self,
        rows: Sequence[Sequence[int]],
        *,
        return_tensors: ReturnTensors = "np",
        padding: Padding = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        bucket: Bucket = None,
        padding_side: PaddingSide | None = None,
    ) -> BatchEncoding | ListEncoding:
        """Pads lists of ids to one length; arguments and errors are those of ``__call__``."""
        check_return_tensors(return_tensors)
        side = checked_side(padding_side or self.padding_side, InputError)
        if bucket is not None and pad_to_multiple_of is not None:
            raise InputError("give bucket or pad_to_multiple_of, not both")
        if not hasattr(rows, "__len__") or not all(hasattr(row, "__len__") for row in rows):
            raise InputError(f"rows: expected lists of token ids, found {str(rows)[:60]}")
        if len(rows) == 0:
            raise InputError("the batch is empty: give at least one prompt")
        if max_length is not None or padding == "max_length":
            max_length = self._max_length(max_length, "padding='max_length'")
        if return_tensors is not None:
            rows = [self._bos_if_empty(row, number) for number, row in enumerate(rows)]
        for number, row in enumerate(rows):
            if max_length is not None and len(row) > max_length:
                raise InputError(
                    f"prompt {number} has {len(row)} tokens, but max_length is {max_length}"
                )
        length = padded_length(
            rows, padding, max_length, pad_to_multiple_of if bucket is None else bucket
        )
        if length is None:
            if return_tensors is None:
                return unpadded([list(row) for row in rows])
            length = len(rows[0])
            if any(len(row) != length for row in rows):
                raise InputError(
                    "the prompts have different lengths: an array needs padding=True, or"
                    " truncation and padding='max_length'"
                )
        pad = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
        batch = pad_rows(rows, 0 if pad is None else pad, side, length)
        if return_tensors is None:
            return ListEncoding(batch.input_ids.tolist(), batch.attention_mask.tolist())
        return as_tensors(batch, return_tensors)

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
        check_text("".join(p if isinstance(p, str) else p.content for p in parts), max_bytes)
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

    def save_pretrained(self, save_directory: str | PathLike[str]) -> tuple[str, ...]:
        """Writes the tokenizer's files, for transformers and jaxllm; returns their paths.

        Files that were loaded from a folder are written byte for byte, except for a named token
        that was changed.

        Raises:
            TokenizerError: a file cannot be written.
        """
        self.save(save_directory)
        return tuple(str(Path(save_directory) / name) for name in self._files)

    def save(self, folder: str | PathLike[str]) -> None:
        """Saves the tokenizer; see :meth:`save_pretrained`."""
        folder = Path(folder)
        with naming_file(folder, TokenizerError, "created"):
            folder.mkdir(parents=True, exist_ok=True)
        for name, content in self._files.items():
            with naming_file(folder / name, TokenizerError, "written"):
                write_whole(folder / name, content)


def _text_list(texts: Any) -> list[Any]:
    """The texts of a batch: one string, or a list or other sequence of them."""
    if isinstance(texts, str):
        return [texts]
    if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
        raise InputError(f"expected a str or a list of str, found {type(texts).__name__}")
    dtype = getattr(texts, "dtype", None)
    if dtype is not None and getattr(dtype, "kind", None) not in ("U", "O", "T"):
        raise InputError(f"expected a str or a list of str, found an array of {dtype}")
    return list(texts)
