"""Formats: encode a row as an example.

The tokens in the loss depend on their field, never on their ids: if the pad token is also the EOS,
labels of the EOS must stay, or the model never learns to stop.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from jaxllm.common.errors import DataError
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.byte_level import ids_are_bytes
from jaxllm.training.data.example import CausalExample, EncodedRow, Example, Seq2SeqExample
from jaxllm.training.data.rows import Row

PART_CHARACTERS = 1 << 20
"""Longer texts are encoded in parts: the tokenizers library uses a hundred bytes per token."""


class Format(Protocol):
    """Encodes one row of any length."""

    def __call__(self, row: Row) -> EncodedRow:
        """Encodes a row.

        Raises:
            DataError: the row does not have this format; names the field.
        """
        ...


@dataclass(frozen=True)
class TextFormat:
    """Text: labels are all tokens and the EOS after them.

    A `bytes` value (from a file of type `bytes`) needs a byte tokenizer, whose ids are the bytes.
    """

    tokenizer: Tokenizer
    eos: int
    field: str

    def __call__(self, row: Row) -> Example:
        value = get(row, self.field, str, bytes)
        if isinstance(value, bytes):
            if not ids_are_bytes(self.tokenizer):
                raise DataError(f"{self.field}: bytes need a tokenizer whose ids are bytes")
            ids = np.append(np.frombuffer(value, np.uint8).astype(np.int32), np.int32(self.eos))
        else:
            ids = int32([*encode_document(self.tokenizer, value), self.eos])
        return CausalExample.of(ids)


@dataclass(frozen=True)
class PromptCompletionFormat:
    """Prompt and completion: labels are the completion and its EOS.

    The two are encoded separately, as in generation, which continues from the prompt's tokens.
    """

    tokenizer: Tokenizer
    eos: int
    prompt: str
    completion: str

    def __call__(self, row: Row) -> Example:
        prompt = encode_beginning(self.tokenizer, get(row, self.prompt, str))
        completion = encode_continuation(self.tokenizer, get(row, self.completion, str))
        ids = int32([*prompt, *completion, self.eos])
        return CausalExample.of(ids, learnt_from=len(prompt))


@dataclass(frozen=True)
class Seq2SeqFormat:
    """Encoder-decoder (T5): source for the encoder, target for the decoder; both end with EOS."""

    tokenizer: Tokenizer
    eos: int
    source: str
    target: str
    prefix: str

    def __call__(self, row: Row) -> Example:
        source = self.prefix + get(row, self.source, str)
        target = get(row, self.target, str)
        source_ids, target_ids = (
            int32(with_end(encode(self.tokenizer, text), self.eos)) for text in (source, target)
        )
        return Seq2SeqExample(source_ids, target_ids)


def get(row: Row, name: str, *types: type) -> Any:
    """Returns a field of a row.

    Raises:
        DataError: the field is missing or has a value of another type.
    """
    if name not in row:
        raise DataError(
            f"{name}: no such field; the row has {', '.join(map(str, row)) or 'none'} (names of "
            "fields can be set)"
        )
    value = row[name]
    if type(value) not in types:
        expected = " or ".join(kind.__name__ for kind in types)
        raise DataError(f"{name}: expected {expected}, found {str(value)[:60]!r}")
    return value


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text with the tokenizer's special tokens (BOS, EOS)."""
    return tokenizer.encode(text, max_bytes=sys.maxsize)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False, max_bytes=sys.maxsize)


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that continues another one.

    sentencepiece prepends a space to a text, which is wrong for a continuation. So the text is
    encoded after a line break, whose ids are then removed if they are unchanged.
    """
    before, both = plain(tokenizer, "\n"), plain(tokenizer, "\n" + text)
    if both[: len(before)] == before:
        return both[len(before) :]
    return plain(tokenizer, text)


def encode_beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that will be continued: with the tokenizer's BOS, without EOS."""
    return tokenizer.encode_beginning(text, max_bytes=sys.maxsize)


def encode_document(tokenizer: Tokenizer, text: str, size: int = PART_CHARACTERS) -> list[int]:
    """Like `encode_beginning`, but encodes a long text in parts that end at line ends."""
    ids: list[int] = []
    start = 0
    while start < len(text) or start == 0:
        stop = start + size
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        part = text[start:stop]
        ids += encode_continuation(tokenizer, part) if start else encode_beginning(tokenizer, part)
        start = stop
    return ids


def with_end(ids: list[int], eos: int) -> list[int]:
    """Appends EOS unless the ids already end with it."""
    return ids if ids and ids[-1] == eos else [*ids, eos]


def int32(ids: list[int]) -> Int32[np.ndarray, " T"]:
    return np.asarray(ids, np.int32)
