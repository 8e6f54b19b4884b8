"""A row becomes an example.

What is learnt follows from where a token comes from, never from its id: the pad may be the EOS,
whose label must stay, or the model never learns to stop.
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
from jaxllm.training.data.example import CausalExample, Example, Seq2SeqExample
from jaxllm.training.data.rows import Row

# Longer texts are encoded in parts: the tokenizers library needs a hundred bytes a token.
PART_CHARACTERS = 1 << 20


class Format(Protocol):
    """Encodes one row, however long it is."""

    def __call__(self, row: Row) -> Example:
        """Raises DataError, naming the field, for a row that is not of this format."""
        ...


@dataclass(frozen=True)
class TextFormat:
    """Every token of a text is learnt, and the EOS behind it.

    A `bytes` value (of a file of type `bytes`) is its own ids, for a tokenizer of bytes.
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
    """The completion and its EOS are learnt, the prompt is not.

    The two are encoded apart, as at generation, where the model goes on from the prompt's tokens.
    """

    tokenizer: Tokenizer
    eos: int
    prompt: str
    completion: str

    def __call__(self, row: Row) -> Example:
        prompt = beginning(self.tokenizer, get(row, self.prompt, str))
        completion = continuation(self.tokenizer, get(row, self.completion, str))
        ids = int32([*prompt, *completion, self.eos])
        return CausalExample.of(ids, learnt_from=len(prompt))


@dataclass(frozen=True)
class Seq2SeqFormat:
    """T5's pairs: the encoder reads the source, the decoder learns the target; EOS ends both."""

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
    """A field of a row, of one of these types."""
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
    """Ids of a whole text, with the BOS or EOS that the tokenizer puts around one."""
    return tokenizer.encode(text, max_bytes=sys.maxsize)


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text and nothing around it."""
    return tokenizer.encode(text, add_special_tokens=False, max_bytes=sys.maxsize)


def continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on after another one.

    Sentencepiece puts a space before a text, which is not there in the middle of one; so the text
    is encoded behind a line break, whose ids are then taken away, where that can be done.
    """
    before, both = plain(tokenizer, "\n"), plain(tokenizer, "\n" + text)
    if both[: len(before)] == before:
        return both[len(before) :]
    return plain(tokenizer, text)


def beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that goes on: with the BOS that the tokenizer puts before one, without EOS."""
    mark = encode(tokenizer, "a")
    body = plain(tokenizer, "a")
    front = next((n for n in range(len(mark)) if mark[n : n + len(body)] == body), 0)
    return mark[:front] + plain(tokenizer, text)


def encode_document(tokenizer: Tokenizer, text: str, size: int = PART_CHARACTERS) -> list[int]:
    """`beginning`, in parts that end at line ends where the text is long."""
    ids: list[int] = []
    start = 0
    while start < len(text) or start == 0:
        stop = start + size
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        part = text[start:stop]
        ids += continuation(tokenizer, part) if start else beginning(tokenizer, part)
        start = stop
    return ids


def with_end(ids: list[int], eos: int) -> list[int]:
    """The ids, ended by EOS; a tokenizer may have put it there already."""
    return ids if ids and ids[-1] == eos else [*ids, eos]


def int32(ids: list[int]) -> Int32[np.ndarray, " T"]:
    return np.asarray(ids, np.int32)
