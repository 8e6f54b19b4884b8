"""Encodes rows in threads and keeps the examples in memory, those of a source or of a window."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import ClassVar

import grain
import numpy as np
from jaxtyping import Float32, Int64

from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.training.data.config import ModelInfo, OnTooLong
from jaxllm.training.data.example import CausalExample, EncodedRow, PreferenceExample
from jaxllm.training.data.formats import Format
from jaxllm.training.data.rows import Rows

EncodingProgress = Callable[[int, int], None]

"""Called as ``progress(done, total)``."""

THREADS = 4
CHUNK_ROWS = 32
"""Rows that a thread encodes at a time, since handing one over takes as long as encoding it."""
PREFETCHED_CHUNKS = 8


@dataclass(frozen=True)
class Counts:
    """Counts of rows, examples and tokens.

    Attributes:
        rows: rows of the source.
        examples: examples made from them.
        truncated, dropped: rows that were too long and were truncated or dropped.
        split: rows that became several examples.
        empty: rows left out because they have no label: an empty text, a row truncated before
            the answer began, or a preference between equal answers.
        tokens: tokens of the examples, on both sides for seq2seq and of both answers of a pair.
        learnt: labels that count in the loss (for a classifier, examples).
    """

    rows: int = 0
    examples: int = 0
    truncated: int = 0
    dropped: int = 0
    split: int = 0
    empty: int = 0
    tokens: int = 0
    learnt: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __str__(self) -> str:
        """
        >>> print(Counts(rows=3, examples=2, dropped=1, tokens=90, learnt=40))
        2 examples of 3 rows (1 dropped), 90 tokens, 40 of them learnt
        """
        names = ("truncated", "dropped", "split", "empty")
        notes = [f"{getattr(self, name)} {name}" for name in names if getattr(self, name)]
        note = f" ({', '.join(notes)})" if notes else ""
        return (
            f"{self.examples} examples of {self.rows} rows{note}, {self.tokens} tokens, "
            f"{self.learnt} of them learnt"
        )


@dataclass(frozen=True)
class Examples:
    """Encoded rows: those of a whole source, or of a window of a `Stream`.

    Attributes:
        items: the examples in the order of the rows.
        counts: counts of rows, examples and tokens.
        sha256: hash of the source (the files), for the run card.
        numbers: number in the source of each example's row; None: the items are the source.
        sizes: `tokens`, if they are known without the items.
    """

    items: Sequence[EncodedRow] = field(repr=False)
    counts: Counts
    sha256: str
    numbers: Int64[np.ndarray, " N"] | None = None
    sizes: Int64[np.ndarray, "N S K"] | None = field(default=None, repr=False)
    windows: ClassVar[int] = 1

    @property
    def total(self) -> int:
        """Number of examples of the source."""
        return len(self.items)

    def read(self, epoch: int, start: int = 0) -> Iterator[Examples]:
        """The only window of an epoch, as `Stream.read` gives those of a stream."""
        return iter((self,)[start:])

    def in_order(self) -> Examples:
        return self

    @cached_property
    def lengths(self) -> Int64[np.ndarray, "N K"]:
        """Number of tokens of each example (of encoder and decoder for seq2seq; of the longer
        sequence of a pair)."""
        return self.tokens.max(axis=1)

    @cached_property
    def digest(self) -> str:
        """Hash of tokens and labels; equal for equal data, tokenizer, format and length limits."""
        sequences = (sequence for example in self.items for sequence in example.sequences)
        return digest_arrays(
            x for sequence in sequences for x in (sequence.input_ids, sequence.labels)
        )

    @cached_property
    def tokens(self) -> Int64[np.ndarray, "N S K"]:
        """Number of tokens of each sequence of each example, on each side."""
        if self.sizes is not None:
            return self.sizes
        lengths = [[sequence.lengths for sequence in x.sequences] for x in self.items]
        return np.asarray(lengths, np.int64)

    @cached_property
    def reference_digest(self) -> str | None:
        """Hash of the reference's log-probabilities; None if there are none."""
        references = [x.reference for x in self.items if isinstance(x, PreferenceExample)]
        values = [reference for reference in references if reference is not None]
        return digest_arrays(values) if values else None

    def with_reference(self, logps: Float32[np.ndarray, "N 2"]) -> Examples:
        """The examples with the log-probabilities of the reference model.

        Raises:
            DataError: they are not pairs of answers.
        """
        items = []
        for example, reference in zip(self.items, logps, strict=True):
            if not isinstance(example, PreferenceExample):
                raise DataError("reference: only pairs of answers have one (format: preference)")
            items.append(replace(example, reference=reference))
        return replace(self, items=tuple(items))


def digest_arrays(arrays: Iterable[np.ndarray]) -> str:
    """Hash of the dtypes, shapes and values of arrays."""
    digest = hashlib.sha256()
    for values in arrays:
        digest.update(f"{values.dtype.str}{values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class RowEncoder:
    """Encodes the rows of a source by their number.

    Args:
        limits, on_too_long: as `fit`.
    """

    rows: Rows
    encode: Format
    model: ModelInfo
    limits: tuple[int, ...]
    on_too_long: OnTooLong = "error"

    def __call__(self, index: int) -> tuple[list[EncodedRow], Counts]:
        """The examples of a row, and their counts.

        Raises:
            DataError: the row does not fit its format, is too long (if that is an error), or has
                ids beyond the model's vocabulary.
        """
        try:
            example = self.encode(self.rows[index])
            _check_ids(example, self.model)
            return fit(example, self.limits, self.on_too_long)
        except JaxLLMError as failure:
            where = self.rows.where(index)
            text = str(failure)
            raise DataError(text if text.startswith(where) else f"{where}: {text}") from failure

    def several(self, indices: Sequence[int]) -> Iterator[tuple[list[EncodedRow], Counts]]:
        """Encodes rows in threads; the results are in the order of `indices`."""
        starts = range(0, len(indices), CHUNK_ROWS)
        if not starts:
            return iter(())
        chunks = grain.MapDataset.source(starts).map(
            lambda start: [self(index) for index in indices[start : start + CHUNK_ROWS]]
        )
        options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=PREFETCHED_CHUNKS)
        return itertools.chain.from_iterable(chunks.to_iter_dataset(options))


def encode_rows(
    encoder: RowEncoder, progress: EncodingProgress = lambda done, total: None
) -> Examples:
    """Encodes every row of a source.

    Args:
        progress: called as ``progress(done, total)`` after every row.

    Raises:
        DataError: as `RowEncoder`; or no example is left.
    """
    rows = encoder.rows
    items: list[EncodedRow] = []
    counts = Counts()
    for done, (row_examples, count) in enumerate(encoder.several(range(len(rows))), start=1):
        items += row_examples
        counts += count
        progress(done, len(rows))
    if not items:
        raise DataError(f"{rows.name}: nothing to learn from: {counts}")
    return Examples(tuple(items), counts, rows.sha256())


def fit(
    example: EncodedRow, limits: tuple[int, ...], on_too_long: OnTooLong
) -> tuple[list[EncodedRow], Counts]:
    """Applies `on_too_long` to an example; the resulting examples are within the limits.

    Raises:
        DataError: the example is too long and `on_too_long` is "error".
    """
    pieces: list[EncodedRow] = [example]
    change: dict[str, int] = {}
    if any(length > limit for length, limit in zip(example.lengths, limits, strict=True)):
        match on_too_long:
            case "truncate":
                pieces, change = [example.truncate(limits)], {"truncated": 1}
            case "split" if isinstance(example, CausalExample):
                pieces, change = [*example.split(limits[0])], {"split": 1}
            case "drop":
                pieces, change = [], {"dropped": 1}
            case _:
                raise DataError(
                    f"{_spell(example.lengths)} tokens, but max_length is {_spell(limits)}; raise "
                    "it, or set on_too_long to 'truncate' or 'drop' ('split' for texts)"
                )
    learnt = [piece for piece in pieces if piece.learnt]
    return learnt, Counts(
        rows=1,
        examples=len(learnt),
        empty=int(bool(pieces) and not learnt),
        tokens=sum(sum(part.lengths) for piece in learnt for part in piece.sequences),
        learnt=sum(piece.learnt for piece in learnt),
        **change,
    )


def _check_ids(example: EncodedRow, model: ModelInfo) -> None:
    sides = [sequence.input_ids for sequence in example.sequences]
    if model.kind == "seq2seq":
        sides += [sequence.labels for sequence in example.sequences]
    largest = max(int(ids.max(initial=0)) for ids in sides)
    if largest >= model.vocab_size:
        raise DataError(
            f"the tokenizer gives the id {largest}, but the model has {model.vocab_size} "
            "(vocab_size): it is another model's tokenizer"
        )


def _spell(lengths: tuple[int, ...]) -> str:
    return " and ".join(map(str, lengths))
