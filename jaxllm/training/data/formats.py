"""Formats: encode a row as an example.

The tokens in the loss depend on their field, never on their ids: if the pad token is also the EOS,
labels of the EOS must stay, or the model never learns to stop.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from jaxllm.common.cells import Cells, printable
from jaxllm.common.errors import ConfigError, DataError, InputError
from jaxllm.models.config_checks import is_float32_number
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.byte_level import ids_are_bytes
from jaxllm.tokenizers.translation_tokenizers import WithLanguages
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.examples import (
    CausalExample,
    ClassificationExample,
    Example,
    Seq2SeqExample,
)
from jaxllm.training.data.rows import Row

PART_CHARACTERS = 1 << 20
"""Longer texts are encoded in parts: the tokenizers library uses a hundred bytes per token."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextFormat:
    """Text: labels are all tokens and the EOS after them.

    A `bytes` value (from a file of type `bytes`) needs a byte tokenizer, whose ids are the bytes.
    """

    tokenizer: Tokenizer
    eos: int
    field: str

    def __call__(self, row: Row) -> Example:
        raw = row.raw if isinstance(row, Cells) and ids_are_bytes(self.tokenizer) else row
        value = get(raw, self.field, str, bytes)
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

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer."""
        ids = encode_beginning(self.tokenizer, get(row, self.prompt, str))
        return ids, get(row, self.completion, str)


@dataclass(frozen=True)
class Seq2SeqFormat:
    """Encoder-decoder (T5): source for the encoder, target for the decoder; both end with EOS.

    With a tokenizer that has language codes they have those of the row's languages, from the fields
    `src_lang` and `tgt_lang`, or of the tokenizer's. A target without a language is an error.
    """

    tokenizer: Tokenizer
    eos: int
    source: str
    target: str
    prefix: str
    src_lang: str = "src_lang"
    tgt_lang: str = "tgt_lang"

    def __call__(self, row: Row) -> Example:
        tokenizer = tokenizer_of(row, self.tokenizer, self.src_lang, self.tgt_lang)
        source = self.prefix + get(row, self.source, str)
        target = get(row, self.target, str)
        return Seq2SeqExample(
            int32(encode_ended(tokenizer, source, self.eos)),
            int32(encode_ended(tokenizer.for_targets(), target, self.eos)),
        )

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer."""
        tokenizer = tokenizer_of(row, self.tokenizer, self.src_lang, self.tgt_lang)
        ids = encode_ended(tokenizer, self.prefix + get(row, self.source, str), self.eos)
        return ids, get(row, self.target, str)


def tokenizer_of(
    row: Row, tokenizer: Tokenizer, src_lang: str = "src_lang", tgt_lang: str = "tgt_lang"
) -> Tokenizer:
    """The tokenizer with the languages of a row.

    Args:
        src_lang, tgt_lang: names of their fields; a row need not have those of the default names.

    Raises:
        InputError: the tokenizer has no such language, or nothing names the target's language.
    """
    names = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    is_used = isinstance(tokenizer, WithLanguages)
    languages = {
        name: get(row, field, str)
        for name, field in names.items()
        if (field in row and is_used) or field != name
    }
    own = tokenizer.with_languages(**languages) if languages else tokenizer
    if isinstance(own, WithLanguages) and own.tgt_lang is None:
        raise InputError(
            f"{tgt_lang}: the row names no language of its target; add this field to the rows, or "
            "tgt_lang to the model's tokenizer_config.json"
        )
    return own


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


def encode_ended(tokenizer: Tokenizer, text: str, eos: int) -> list[int]:
    """Encodes a text with the tokenizer's special tokens, and EOS unless the ids end with it."""
    ids = encode(tokenizer, text)
    is_ended = isinstance(tokenizer, WithLanguages) or ids[-1:] == [eos]
    return ids if is_ended else [*ids, eos]


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False, max_bytes=sys.maxsize)


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that continues another one.

    sentencepiece prepends a space to a text, which is wrong for a continuation. So the text is
    encoded after a line break, whose ids are then removed. Another character stands in for the
    break if the break's ids change, or if it is unknown and would swallow an unknown beginning of
    the text.
    """
    for start in ("\n", ".", "a"):
        before, both = plain(tokenizer, start), plain(tokenizer, start + text)
        swallows = bool(before) and plain(tokenizer, 2 * start) == before
        if both[: len(before)] == before and not swallows:
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


def int32(ids: list[int]) -> Int32[np.ndarray, " T"]:
    return np.asarray(ids, np.int32)


@dataclass(frozen=True)
class ClassificationFormat:
    """Encodes a text and its label according to the model's `problem_type`."""

    tokenizer: Tokenizer
    field: str
    label: str
    labels: Labels

    def __call__(self, row: Row) -> ClassificationExample:
        ids = encode(self.tokenizer, get(row, self.field, str))
        if not ids:
            raise DataError(f"{self.field}: empty, and the tokenizer has no BOS to stand for it")
        if self.label not in row:
            raise DataError(f"{self.label}: no such field; the row has {', '.join(map(str, row))}")
        try:
            return ClassificationExample(int32(ids), self.labels(row[self.label]))
        except DataError as failure:
            raise DataError(f"{self.label}: {failure}") from None


@dataclass(frozen=True)
class Labels:
    """Converts the label of a row to an array.

    - `single_label_classification`: a class number, or a class name if there are names: int32 [].
    - `multi_label_classification`: a list of numbers or names (the others are 0), or one float or
      boolean for each class: float32 [C].
    - `regression`: a number, or a list of C numbers for C outputs: float32 [] or [C].

    >>> labels = Labels("multi_label_classification", 3, ("red", "green", "blue"))
    >>> labels(["blue", "red"]).tolist(), labels([0.0, 1.0, 0.5]).tolist()
    ([1.0, 0.0, 1.0], [0.0, 1.0, 0.5])
    >>> Labels("regression", 1)("3.5").item()
    3.5
    """

    problem_type: str
    count: int
    names: tuple[str, ...] = ()

    def __call__(self, value: Any) -> Int32[np.ndarray, ""] | Float32[np.ndarray, "*C"]:
        value = self._from_text(value)
        match self.problem_type:
            case "single_label_classification":
                return np.asarray(self._number(value), np.int32)
            case "multi_label_classification":
                return self._several(value)
            case _:
                return self._numbers(value)

    def _from_text(self, value: Any) -> Any:
        """The number or the list in a text, such as a cell of CSV, that is no class name."""
        if isinstance(value, str) and value not in self.names:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(value)
        return value

    def _number(self, value: Any) -> int:
        if isinstance(value, str):
            if not self.names:
                raise DataError(f"{value!r} is a name: list the classes in label_names")
            if value not in self.names:
                raise DataError(f"{value!r} is none of {', '.join(self.names)}")
            return self.names.index(value)
        value = printable(value)  # integers with gaps, which pandas stores as floats
        if type(value) is not int or not 0 <= value < self.count:
            raise DataError(f"expected a class, 0 to {self.count - 1}, found {str(value)[:60]!r}")
        return value

    def _several(self, value: Any) -> Float32[np.ndarray, " C"]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise DataError(f"expected a list of classes, found {str(value)[:60]!r}")
        if value and all(type(item) in (float, bool) for item in value):
            if len(value) != self.count or not all(0 <= item <= 1 for item in value):
                raise DataError(f"expected {self.count} numbers from 0 to 1, found {list(value)}")
            return np.asarray(value, np.float32)
        numbers = [self._number(item) for item in value]
        if len(set(numbers)) != len(numbers):
            raise DataError(
                f"{list(value)} lists a class twice; one value for each class is written with "
                "floats or booleans"
            )
        result = np.zeros(self.count, np.float32)
        result[numbers] = 1.0
        return result

    def _numbers(self, value: Any) -> Float32[np.ndarray, "*C"]:
        values = (
            list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        )
        if len(values) != self.count or not all(map(is_float32_number, values)):
            expected = "a number" if self.count == 1 else f"{self.count} numbers"
            raise DataError(f"expected {expected}, found {str(value)[:60]!r}")
        return np.asarray(values if self.count > 1 else values[0], np.float32)


def problem_of(model: ModelInfo) -> str:
    """Problem type of a classifier; the default depends on its number of outputs.

    >>> problem_of(ModelInfo(kind="classification", vocab_size=9, num_labels=1))
    'regression'
    """
    if model.problem_type is not None:
        return model.problem_type
    return "regression" if model.num_labels == 1 else "single_label_classification"


def labels_of(model: ModelInfo, names: tuple[str, ...]) -> Labels:
    """Makes the label converter of a model.

    Raises:
        ConfigError: the number of names is not the model's number of classes.
    """
    problem = problem_of(model)
    if names and problem == "regression":
        raise ConfigError("label_names: a regression has no classes")
    if names and len(names) != model.num_labels:
        raise ConfigError(
            f"label_names: {len(names)} names, but the model has {model.num_labels} classes "
            "(num_labels)"
        )
    return Labels(problem, model.num_labels, names)
