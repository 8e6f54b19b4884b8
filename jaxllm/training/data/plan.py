"""Assigns examples to the rows and batches of an epoch, with optional packing.

A plan is a pure function of the seed, the epoch and the example lengths. It does not depend on the
number of processes, and any epoch is planned without computing earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64

from jaxllm.tokenizers import bucket_length
from jaxllm.tokenizers.batch import Bucket

MIN_BUCKET = 16
"""Smallest bucket; smaller ones save less time than their compilation takes."""
WINDOW_ROWS = 512
"""Rows per packing window."""


@dataclass(frozen=True)
class EpochPlan:
    """The batches of one epoch, or of a window of it; each example is in exactly one row."""

    members: Int64[np.ndarray, " N"]
    """Example numbers, concatenated over the rows."""
    offsets: Int64[np.ndarray, " offsets"]
    """Row r holds ``members[offsets[r]:offsets[r + 1]]``; the last batch is padded with rows
    without examples."""
    shapes: Int64[np.ndarray, "batches K"]
    """Row length of each batch, on each side."""
    rest: Int64[np.ndarray, " rest"]
    """Numbers of the examples that are left to the next window."""

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def batch_size(self) -> int:
        return (len(self.offsets) - 1) // len(self)

    def row(self, batch: int, number: int) -> Int64[np.ndarray, " n"]:
        """Example numbers in a row of a batch."""
        row = batch * self.batch_size + number
        return self.members[self.offsets[row] : self.offsets[row + 1]]

    def padding(self, lengths: Int[np.ndarray, "N *S K"]) -> float:
        """Share of all positions that are padding, 0 to 1; S: sequences of an example."""
        if not len(self):
            return 0.0
        sequences = lengths.shape[1] if lengths.ndim == 3 else 1
        places = int(self.shapes.sum()) * self.batch_size * sequences
        return 1.0 - int(lengths[self.members].sum()) / places


@dataclass(frozen=True)
class Planner:
    """Plans an epoch from the lengths of the examples.

    Args:
        batch_size: rows per batch.
        limits: maximum tokens of a row, on each side.
        packing: put several examples into each row; all rows have the lengths `limits`.
        bucket: rounding of lengths without packing; see `DataConfig`.
        shuffle: use a new order in each epoch; False: the order of the examples.
        seed: seed of the order.
        group_by_length: make batches of one bucket, and put into packed rows what fills them best;
            False: batches and packed rows have consecutive examples.
    """

    batch_size: int
    limits: tuple[int, ...]
    packing: bool = False
    bucket: Bucket = "power_of_two"
    shuffle: bool = True
    seed: int = 0
    group_by_length: bool = True

    def plan(
        self, lengths: Int[np.ndarray, "N K"], epoch: int, *, is_last: bool = True
    ) -> EpochPlan:
        """Plans an epoch (0, 1, ...), or a window of it.

        Args:
            is_last: no window follows, so the last batch is filled up with padding rows. Otherwise
                only full batches are made and `rest` has the other examples: without packing the
                examples of the last batch, with packing the examples of the rows that have the
                most padding, or of the last rows without `group_by_length`.
        """
        order = self._permutation(len(lengths), epoch, 0)
        if self.packing:
            if self.group_by_length:
                rows = pack(lengths, order, self.limits)
                fill = [(lengths[row].sum(axis=0) / self.limits).max() for row in rows]
                fullest = np.argsort(-np.asarray(fill), kind="stable")
            else:
                rows = pack_in_order(lengths, order, self.limits)
                fullest = np.arange(len(rows))
            whole = len(rows) if is_last else len(rows) // self.batch_size * self.batch_size
            kept = np.sort(fullest[:whole])
            rest = [example for n in fullest[whole:] for example in rows[n]]
            rows = [rows[kept[n]] for n in self._permutation(whole, epoch, 1)]
            batches = [rows[n : n + self.batch_size] for n in range(0, whole, self.batch_size)]
            shapes = np.tile(np.asarray(self.limits, np.int64), (len(batches), 1))
        else:
            groups, shapes, rest = self._by_length(lengths, order, is_last=is_last)
            turn = self._permutation(len(groups), epoch, 1)
            batches, shapes = [groups[n][:, None].tolist() for n in turn], shapes[turn]
        counts = np.zeros((len(batches), self.batch_size), np.int64)
        for number, batch in enumerate(batches):
            counts[number, : len(batch)] = [len(row) for row in batch]
        members = [example for batch in batches for row in batch for example in row]
        offsets = np.concatenate([[0], np.cumsum(counts)])
        return EpochPlan(
            np.asarray(members, np.int64), offsets, shapes, np.sort(np.asarray(rest, np.int64))
        )

    def _permutation(self, count: int, epoch: int, use: int) -> Int64[np.ndarray, " count"]:
        """Shuffled order, or 0, 1, ... without `shuffle`.

        Sorts random bits: NumPy keeps the streams of its bit generators from version to version,
        but not the results of ``Generator.permutation``.
        """
        if not self.shuffle:
            return np.arange(count)
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch, use]))
        return np.argsort(bits.random_raw(count), kind="stable")

    def _by_length(
        self, lengths: Int[np.ndarray, "N K"], order: Int64[np.ndarray, " N"], *, is_last: bool
    ) -> tuple[
        list[Int64[np.ndarray, " b"]], Int64[np.ndarray, "batches K"], Int64[np.ndarray, " rest"]
    ]:
        """Batches of one bucket each, their lengths, and the examples that are left over.

        The remainders of all buckets are batched together, in order of length, so that at most one
        batch is not full.
        """
        sizes, size = self._bucket_sizes(lengths), self.batch_size
        buckets, bucket_of = np.unique(sizes, axis=0, return_inverse=True)
        if not self.group_by_length:
            buckets, bucket_of = sizes[:1], np.zeros(len(sizes), np.int64)
        batches, remainders = [], [order[:0]]
        for bucket in range(len(buckets)):
            mine = order[bucket_of[order] == bucket]
            whole = len(mine) // size * size
            batches += list(mine[:whole].reshape(-1, size))
            remainders.append(mine[whole:])
        remainder = np.concatenate(remainders)
        whole = len(remainder) if is_last else len(remainder) // size * size
        batches += [remainder[n : n + size] for n in range(0, whole, size)]
        shapes = np.array([sizes[batch].max(axis=0) for batch in batches], np.int64)
        return batches, shapes.reshape(-1, len(self.limits)), remainder[whole:]

    def _bucket_sizes(self, lengths: Int[np.ndarray, "N K"]) -> Int64[np.ndarray, "N K"]:
        limits = np.asarray(self.limits, np.int64)
        if self.bucket is None:
            return np.tile(limits, (len(lengths), 1))
        longest = int(lengths.max(initial=0))
        rounded = np.zeros(longest + 1, np.int64)
        for length in range(1, longest + 1):
            rounded[length] = max(MIN_BUCKET, bucket_length(length, self.bucket))
        return np.minimum(rounded[lengths], limits)


def pack(
    lengths: Int[np.ndarray, "N K"],
    order: Int[np.ndarray, " N"],
    limits: tuple[int, ...],
    window_rows: int = WINDOW_ROWS,
) -> list[list[int]]:
    """Packs examples into rows; each example of `order` is in exactly one row.

    First-fit decreasing (Johnson 1973), within windows of the shuffled order: sorting all examples
    would pack the same ones together in every epoch.

    Args:
        lengths: number of tokens of each example, on each side (encoder and decoder, for T5).
        order: example numbers in shuffled order, which is cut into windows.
        limits: maximum tokens of a row, on each side; no example is longer.
        window_rows: size of a window, as the number of rows that its examples fill.

    >>> pack(np.array([[3], [6], [2], [5]]), np.arange(4), (8,))
    [[1, 2], [3, 0]]
    """
    rows: list[list[int]] = []
    shares = (lengths / np.asarray(limits)).max(axis=1)
    window_of = np.cumsum(shares[order]) // window_rows
    for part in np.split(order, np.flatnonzero(np.diff(window_of)) + 1):
        rows += _first_fit(lengths, part[np.argsort(-shares[part], kind="stable")], limits)
    return rows


def pack_in_order(
    lengths: Int[np.ndarray, "N K"], order: Int[np.ndarray, " N"], limits: tuple[int, ...]
) -> list[list[int]]:
    """Packs consecutive examples into rows, of which each is as long as its limits allow.

    >>> pack_in_order(np.array([[3], [6], [2], [5]]), np.arange(4), (8,))
    [[0], [1, 2], [3]]
    """
    rows: list[list[int]] = []
    free = np.zeros(len(limits), np.int64)
    for example in order:
        if not rows or (free < lengths[example]).any():
            rows.append([])
            free = np.asarray(limits, np.int64)
        rows[-1].append(int(example))
        free = free - lengths[example]
    return rows


def _first_fit(
    lengths: Int[np.ndarray, "N K"], order: Int[np.ndarray, " n"], limits: tuple[int, ...]
) -> list[list[int]]:
    """Puts each example into the first row with enough free tokens on every side."""
    rows: list[list[int]] = []
    free = np.tile(np.asarray(limits), (len(order), 1))
    for example in order:
        # The next new row is always empty, so a fit always exists.
        fits = (free[: len(rows) + 1] >= lengths[example]).all(axis=1)
        row = int(np.argmax(fits))
        if row == len(rows):
            rows.append([])
        rows[row].append(int(example))
        free[row] -= lengths[example]
    return rows
