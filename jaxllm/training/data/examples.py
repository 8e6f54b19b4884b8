"""Examples: rows as token ids and labels, how they are encoded in threads, and sets of them.

Labels are aligned with the input tokens (the loss shifts them); -100 is ignored by the loss.
"""

from __future__ import annotations

import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32, Int32, Int64

from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.common.optional_packages import require
from jaxllm.models.input_checks import IGNORED
from jaxllm.training.data.config import ModelInfo, OnTooLong
from jaxllm.training.data.plan import EpochPlan, Planner
from jaxllm.training.data.rows import Row, Rows

EncodingProgress = Callable[[int, int], None]
"""Called as ``progress(done, total)``."""
THREADS = 4
CHUNK_ROWS = 32
"""Rows that a thread encodes at a time, since handing one over takes as long as encoding it."""
PREFETCHED_CHUNKS = 8


def require_grain() -> Any:
    """The package `grain`, whose threads read ahead; it comes with the extra `train`."""
    return require("grain", extra="train", purpose="training runs")


@dataclass(frozen=True)
class Example(ABC):
    """Token ids (of the encoder, for an encoder-decoder) and labels."""

    input_ids: Int32[np.ndarray, " T"]
    labels: np.ndarray

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens: (tokens,), or (encoder, decoder)."""
        return (len(self.input_ids),)

    @property
    def learnt(self) -> int:
        """Number of labels that count in the loss."""
        return int(np.count_nonzero(self.labels != IGNORED))

    @property
    def sequences(self) -> tuple[Example, ...]:
        """The sequences that the model reads: one."""
        return (self,)

    @abstractmethod
    def truncate(self, limits: tuple[int, ...]) -> Example:
        """Truncates to at most `limits` tokens on each side."""


@dataclass(frozen=True)
class CausalExample(Example):
    """One label for each token; the first is -100, since no token precedes it."""

    labels: Int32[np.ndarray, " T"]

    @classmethod
    def of(cls, ids: Int32[np.ndarray, " T"], learnt_from: int = 0) -> CausalExample:
        """An example whose labels are all tokens from position `learnt_from` on.

        >>> CausalExample.of(np.array([5, 6, 7, 8], np.int32), 2).labels.tolist()
        [-100, -100, 7, 8]
        """
        labels = ids.copy()
        labels[: max(learnt_from, 1)] = IGNORED
        return cls(ids, labels)

    def truncate(self, limits: tuple[int, ...]) -> CausalExample:
        """Truncates the sequence. Adds no EOS, since the text does not end there."""
        return CausalExample(self.input_ids[: limits[0]], self.labels[: limits[0]])

    def split(self, limit: int) -> list[CausalExample]:
        """Splits into pieces that overlap by one token: all tokens but the first are labels once.

        >>> pieces = CausalExample.of(np.arange(5, dtype=np.int32)).split(3)
        >>> [(piece.input_ids.tolist(), piece.labels.tolist()) for piece in pieces]
        [([0, 1, 2], [-100, 1, 2]), ([2, 3, 4], [-100, 3, 4])]
        """
        starts = range(0, len(self.input_ids) - 1, limit - 1)
        return [CausalExample.of(self.input_ids[start : start + limit]) for start in starts]


@dataclass(frozen=True)
class Seq2SeqExample(Example):
    """`labels` are the tokens that the decoder generates."""

    labels: Int32[np.ndarray, " D"]

    @property
    def lengths(self) -> tuple[int, ...]:
        return len(self.input_ids), len(self.labels)

    def truncate(self, limits: tuple[int, ...]) -> Seq2SeqExample:
        """Truncates both sides: the source keeps its EOS, as in transformers.

        A truncated target has no EOS, so that the model does not learn to stop there.
        """
        source, target = self.input_ids, self.labels[: limits[1]]
        if len(source) > limits[0]:
            source = np.append(source[: limits[0] - 1], source[-1])
        return Seq2SeqExample(source, target)


@dataclass(frozen=True)
class ClassificationExample(Example):
    """`labels` is a class (int32 []), one number for each label (float32 [C]), or the number or
    numbers of a regression (float32 [] or [C])."""

    labels: Int32[np.ndarray, ""] | Float32[np.ndarray, "*C"]

    @property
    def learnt(self) -> int:
        return 1

    def truncate(self, limits: tuple[int, ...]) -> ClassificationExample:
        return ClassificationExample(self.input_ids[: limits[0]], self.labels)


@dataclass(frozen=True)
class PreferenceExample:
    """Two answers to one prompt, of which the first is preferred."""

    chosen: Example
    rejected: Example
    reference: Float32[np.ndarray, " 2"] | None = None
    """Log-probabilities of the answers under the reference model; None: not computed yet."""

    @property
    def sequences(self) -> tuple[Example, ...]:
        return self.chosen, self.rejected

    @property
    def lengths(self) -> tuple[int, ...]:
        """Number of tokens of the longer sequence, on each side."""
        return tuple(map(max, self.chosen.lengths, self.rejected.lengths))

    @property
    def learnt(self) -> int:
        """Number of labels of both answers; 0 if one has none, or if the answers are equal."""
        first, second = self.sequences
        if np.array_equal(first.labels, second.labels) or not (first.learnt and second.learnt):
            return 0
        return first.learnt + second.learnt

    def truncate(self, limits: tuple[int, ...]) -> PreferenceExample:
        """Truncates both sequences."""
        chosen, rejected = (sequence.truncate(limits) for sequence in self.sequences)
        return replace(self, chosen=chosen, rejected=rejected)


EncodedRow = Example | PreferenceExample
Format = Callable[[Row], EncodedRow]
"""Encodes one row of any length; raises a DataError that names the field for another row."""


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
        places: of a window, the place and the tokens of each example (`stream.Sizes`).
        sizes: `tokens`, if they are known without the items.
    """

    items: Sequence[EncodedRow] = field(repr=False)
    counts: Counts
    sha256: str
    places: Int64[np.ndarray, "N w"] | None = None
    sizes: Int64[np.ndarray, "N S K"] | None = field(default=None, repr=False)
    windows: ClassVar[int] = 1

    @property
    def total(self) -> int:
        """Number of examples of the source."""
        return len(self.items)

    def read(
        self, planner: Planner, epoch: int, start: int = 0, carried: Sequence[list[int]] = ()
    ) -> Iterator[tuple[Examples, EpochPlan]]:
        """The only window of an epoch with its plan, in the form of `Stream.read`."""
        yield self, planner.plan(self.lengths, epoch)

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
        grain = require_grain()
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
