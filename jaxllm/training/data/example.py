"""Encoded rows: token ids and labels.

Labels are aligned with the input tokens (the loss shifts them); -100 is ignored by the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32, Int32

from jaxllm.models.input_checks import IGNORED


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
