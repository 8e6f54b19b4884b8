"""Encodes and pads batches of texts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import numpy as np

from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.common.renamed_arguments import is_satisfied
from jaxllm.tokenizers.batch import (
    BatchEncoding,
    Bucket,
    ListEncoding,
    Padding,
    PaddingSide,
    ReturnTensors,
    as_tensors,
    check_return_tensors,
    checked_side,
    pad_rows,
    pad_values,
    padded_length,
)
from jaxllm.tokenizers.rows import UnpaddedRows, label_array, unpadded_rows
from jaxllm.tokenizers.text_encoder import MAX_TEXT_BYTES, TextEncoder, TextOptions

FILLERS = {"attention_mask": 0, "offset_mapping": (0, 0), "special_tokens_mask": 1}
"""Values at padding."""
DETAILS = ("return_offsets_mapping", "return_special_tokens_mask")
"""Options for which an encoding says more of its tokens than their ids."""


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
    return_special_tokens_mask: bool
    return_length: bool


class BatchEncoder(TextEncoder):
    """Encodes one or more prompts, and pads lists of ids to one length.

    Attributes:
        padding_side: side of the padding: "left" or "right".
    """

    padding_side: PaddingSide

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
            add_special_tokens: add BOS and EOS as the model's tokenizer does.
            split_special_tokens: treat a special token in the text, such as ``</s>``, as plain
                text. Off by default, as in transformers; turn it on for untrusted text.
            max_bytes: maximum length of a text, in bytes of UTF-8.

        Raises:
            InputError: no prompt, an empty one without BOS, one that is too long, or that is not a
                ``str`` or has unpaired surrogates.
            UnsupportedError: another option of transformers.
        """
        unknown = options.keys() - EncodingOptions.__annotations__.keys()
        unsupported = sorted(name for name in unknown if not is_satisfied(name, options.get(name)))
        if unsupported:
            raise UnsupportedError(f"a tokenizer's call does not take {unsupported}")
        if text_target is not None:
            return self._with_labels(text, text_pair, text_target, return_tensors, options)
        for name in (*DETAILS, "return_attention_mask", "return_length"):
            checked(options.get(name), (bool, type(None)), name, "True or False")
        texts = _text_list(text)
        pairs = [None] * len(texts) if text_pair is None else _text_list(text_pair)
        one_of_each = text_pair is None or isinstance(text, str) == isinstance(text_pair, str)
        if len(pairs) != len(texts) or not one_of_each:
            raise InputError(f"text_pair: {len(pairs)} second texts for {len(texts)} texts")
        encoding: Any = {k: v for k, v in options.items() if k in TextOptions.__annotations__}
        padding: Any = {k: v for k, v in options.items() if k in PaddingOptions.__annotations__}
        spans, special = (bool(options.get(name)) for name in DETAILS)
        if spans or special:
            encoded = [
                self._encode_details(*each, with_spans=spans, **encoding)
                for each in zip(texts, pairs, strict=True)
            ]
            rows = UnpaddedRows(
                [each.ids for each in encoded],
                offset_mapping=[each.spans or [] for each in encoded] if spans else None,
                special_tokens_mask=[e.special_tokens_mask for e in encoded] if special else None,
            )
        else:
            rows = UnpaddedRows(self._encode_rows(texts, pairs, **encoding))
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
        labels = self(target, return_tensors=return_tensors, **options)
        if text is None:
            return labels
        if len(_text_list(target)) != len(_text_list(text)):
            raise InputError("text_target: expected one for each text")
        batch: Any = self(text, text_pair, return_tensors=return_tensors, **options)
        return replace(batch, labels=labels.input_ids)

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
        rows: UnpaddedRows,
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
        ids = rows.input_ids
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
            masks = rows.attention_mask or [[1] * len(row) for row in ids]
            lists = (list(map(list, values)) for values in (ids, masks))
            return ListEncoding(
                *lists,
                offset_mapping=rows.offset_mapping,
                special_tokens_mask=rows.special_tokens_mask,
                labels=rows.labels,
            )
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
        batch = as_tensors(self._arrays(rows, side, length), return_tensors)
        if return_tensors is not None:
            return batch
        lists = {name: value.tolist() for name, value in batch.items()}
        if rows.offset_mapping is not None:
            lists["offset_mapping"] = pad_values(rows.offset_mapping, (0, 0), side, length)
        return ListEncoding(**lists)

    def _arrays(self, rows: UnpaddedRows, side: PaddingSide, length: int) -> BatchEncoding:
        """Rows padded to ``length``, as NumPy arrays."""
        pad = self.pad_token_id if self.pad_token_id is not None else self.eos_token_id
        batch = pad_rows(rows.input_ids, 0 if pad is None else pad, side, length)
        padded = {
            name: np.asarray(pad_values(values, filler, side, length), np.int32)
            for name, filler in FILLERS.items()
            if (values := getattr(rows, name)) is not None
        }
        labels = None if rows.labels is None else label_array(rows.labels)
        return replace(batch, **padded, labels=labels)

    def _without_empty_rows(self, rows: UnpaddedRows) -> UnpaddedRows:
        """Rows in which BOS stands for an empty prompt."""
        empty = next(number for number, row in enumerate(rows.input_ids) if len(row) == 0)
        if self.bos_token_id is None:
            raise InputError(
                f"prompt {empty} is empty, and the tokenizer has no BOS token to begin with"
            )
        of_bos = {
            "input_ids": self.bos_token_id,
            "attention_mask": 1,
            "offset_mapping": (0, 0),
            "special_tokens_mask": 1,
        }
        filled = {
            name: [row if len(row) > 0 else [value] for row in values]
            for name, value in of_bos.items()
            if (values := getattr(rows, name)) is not None
        }
        return replace(rows, **filled)


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
