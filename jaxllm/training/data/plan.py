"""Which examples stand in which row of which batch of an epoch, before anything is read.

A plan is a pure function of the seed, the epoch and the lengths of the examples. It knows nothing
of processes, so the order of the data does not depend on their number; and any batch of any epoch
is found without those before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int, Int64

from jaxllm.tokenizers import bucket_length
from jaxllm.training.data.config import Bucket
from jaxllm.training.data.packing import pack

# Lengths below are not told apart: the time saved is less than that of compiling one more.
SHORTEST = 16


@dataclass(frozen=True)
class Plan:
    """The batches of one epoch, each example in exactly one row.

    Attributes:
        members: Examples, row after row.
        offsets: Row r has ``members[offsets[r]:offsets[r + 1]]``; the last batch is filled up with
            rows that have none.
        shapes: Length of each batch's rows, on each side.
    """

    members: Int64[np.ndarray, " N"]
    offsets: Int64[np.ndarray, " E"]
    shapes: Int64[np.ndarray, "batches K"]

    def __len__(self) -> int:
        return len(self.shapes)

    @property
    def batch_size(self) -> int:
        return (len(self.offsets) - 1) // len(self)

    def row(self, batch: int, number: int) -> Int64[np.ndarray, " n"]:
        """The examples in a row of a batch."""
        row = batch * self.batch_size + number
        return self.members[self.offsets[row] : self.offsets[row + 1]]

    def padding(self, lengths: Int[np.ndarray, "N K"]) -> float:
        """The share of all positions that are padding, 0 to 1."""
        places = int(self.shapes.sum()) * self.batch_size
        return 1.0 - int(lengths[self.members].sum()) / places


@dataclass(frozen=True)
class Planner:
    """What a plan follows from, but for the lengths and the epoch.

    Args:
        batch_size: Rows of a batch.
        limits: Most tokens of a row, on each side.
        packing: Whether rows, all as long as the limits, hold several examples.
        bucket: How lengths are rounded up without packing; see `DataConfig`.
        shuffle: Whether each epoch has an order of its own; the order given otherwise.
        seed: Of that order.
    """

    batch_size: int
    limits: tuple[int, ...]
    packing: bool = False
    bucket: Bucket = "power_of_two"
    shuffle: bool = True
    seed: int = 0

    def plan(self, lengths: Int[np.ndarray, "N K"], epoch: int) -> Plan:
        """The batches of an epoch, 0 being the first; at least one example."""
        order = self._permutation(len(lengths), epoch, 0)
        if self.packing:
            rows = pack(lengths, order, self.limits)
            rows = [rows[n] for n in self._permutation(len(rows), epoch, 1)]
            batches = [rows[n : n + self.batch_size] for n in range(0, len(rows), self.batch_size)]
            shapes = np.tile(np.asarray(self.limits, np.int64), (len(batches), 1))
            return _plan(batches, shapes, self.batch_size)
        groups, shapes = self._by_length(lengths, order)
        turn = self._permutation(len(groups), epoch, 1)
        return _plan([groups[n][:, None].tolist() for n in turn], shapes[turn], self.batch_size)

    def _permutation(self, count: int, epoch: int, use: int) -> Int64[np.ndarray, " count"]:
        """A shuffled order. NumPy keeps the streams of its bit generators from version to version,
        which it does not promise for ``Generator.permutation``."""
        if not self.shuffle:
            return np.arange(count)
        bits = np.random.Philox(np.random.SeedSequence([self.seed, epoch, use]))
        return np.argsort(bits.random_raw(count), kind="stable")

    def _by_length(
        self, lengths: Int[np.ndarray, "N K"], order: Int64[np.ndarray, " N"]
    ) -> tuple[list[Int64[np.ndarray, " b"]], Int64[np.ndarray, "batches K"]]:
        """Batches of examples of one bucket; what is left of all buckets goes together, by length,
        so that one batch at most is not full."""
        sizes = self._bucket_sizes(lengths)
        buckets, bucket_of = np.unique(sizes, axis=0, return_inverse=True)
        full, left = [], []
        for bucket in range(len(buckets)):
            mine = order[bucket_of[order] == bucket]
            whole = len(mine) // self.batch_size * self.batch_size
            full += list(mine[:whole].reshape(-1, self.batch_size))
            left.append(mine[whole:])
        rest = np.concatenate(left)
        full += [rest[n : n + self.batch_size] for n in range(0, len(rest), self.batch_size)]
        return full, np.stack([sizes[batch].max(axis=0) for batch in full])

    def _bucket_sizes(self, lengths: Int[np.ndarray, "N K"]) -> Int64[np.ndarray, "N K"]:
        limits = np.asarray(self.limits, np.int64)
        if self.bucket is None:
            return np.tile(limits, (len(lengths), 1))
        longest = int(lengths.max())
        rounded = np.zeros(longest + 1, np.int64)
        for length in range(1, longest + 1):
            rounded[length] = max(SHORTEST, bucket_length(length, self.bucket))
        return np.minimum(rounded[lengths], limits)


def _plan(
    batches: Sequence[Sequence[Sequence[int]]],
    shapes: Int64[np.ndarray, "batches K"],
    batch_size: int,
) -> Plan:
    counts = np.zeros((len(batches), batch_size), np.int64)
    for number, batch in enumerate(batches):
        counts[number, : len(batch)] = [len(row) for row in batch]
    members = [example for batch in batches for row in batch for example in row]
    offsets = np.concatenate([[0], np.cumsum(counts)])
    return Plan(np.asarray(members, np.int64), offsets, shapes)
