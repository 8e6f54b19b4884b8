"""Batches of an epoch after the other, with a position that is saved and restored.

Global batch n of an epoch is the same on every number of processes; each reads its own rows of it.
A position is two numbers, and is found at once: nothing before it is read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import grain

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.training.data.collate import Batch, collate
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.examples import Counts, Examples
from jaxllm.training.data.plan import Plan, Planner

AHEAD = 4


@dataclass(frozen=True)
class Shard:
    """Which rows of every global batch a process has: the `index`-th of `count` equal parts.

    Raises:
        ConfigError: the batch cannot be divided so.
    """

    batch_size: int
    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.count < 1 or self.batch_size % self.count:
            raise ConfigError(
                f"batch_size: {self.batch_size} rows cannot be divided among {self.count} "
                "processes; give a multiple"
            )
        if not 0 <= self.index < self.count:
            raise ConfigError(f"process_index: expected 0 to {self.count - 1}, found {self.index}")

    @property
    def rows(self) -> range:
        size = self.batch_size // self.count
        return range(self.index * size, (self.index + 1) * size)


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch by their number; a source for grain."""

    examples: Examples
    model: ModelInfo
    plan: Plan
    packed: bool
    rows: range

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Batch:
        items = self.examples.items
        rows = [[items[n] for n in self.plan.row(index, number)] for number in self.rows]
        shape = tuple(self.plan.shapes[index].tolist())
        like = items[0].labels
        return collate(rows, shape, self.model, packed=self.packed, like=like)

    @property
    def padding(self) -> float:
        """The share of the epoch's positions that are padding."""
        return self.plan.padding(self.examples.lengths)

    def __iter__(self) -> Iterator[Batch]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[Batch]:
        """From batch `start` on; a thread makes the next ones in the meantime."""
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=AHEAD)
        batches = grain.MapDataset.source(self)[start:]
        return iter(batches.to_iter_dataset(options)) if len(batches) else iter(())


class Batches(Iterator[Batch]):
    """A process's rows of each global batch, epoch after epoch.

    Attributes:
        examples: The encoded data; ``examples.counts`` says what became of the rows.
        epoch, batch: The position: the batch that comes next.

    Args:
        epochs: How many; None: without end.
    """

    def __init__(
        self,
        examples: Examples,
        model: ModelInfo,
        planner: Planner,
        shard: Shard,
        epochs: int | None = None,
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs: expected 1 or more, found {epochs}")
        self.examples = examples
        self.epoch, self.batch = 0, 0
        self._model, self._planner, self._shard, self._epochs = model, planner, shard, epochs
        self._open()

    def _open(self) -> None:
        self._current = self.epoch_at(self.epoch)
        self._iterator = self._current.iterate(self.batch)

    def epoch_at(self, epoch: int) -> Epoch:
        """The batches of any epoch; of packed rows there may be some more or fewer than before."""
        plan = self._planner.plan(self.examples.lengths, epoch)
        return Epoch(self.examples, self._model, plan, self._planner.packing, self._shard.rows)

    @property
    def counts(self) -> Counts:
        return self.examples.counts

    @property
    def batches_per_epoch(self) -> int:
        """Batches of the current epoch."""
        return len(self._current)

    @property
    def padding(self) -> float:
        """The share of the current epoch's positions that are padding, 0 to 1."""
        return self._current.padding

    def __next__(self) -> Batch:
        if self.batch == len(self._current):
            if self._epochs is not None and self.epoch + 1 >= self._epochs:
                raise StopIteration
            self.epoch, self.batch = self.epoch + 1, 0
            self._open()
        batch = next(self._iterator)
        self.batch += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position and what it is a position in, of types that JSON has."""
        return {"epoch": self.epoch, "batch": self.batch, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state()`, on any number of processes.

        Raises:
            DataError: It is of other data or settings, or no position in these.
        """
        identity = self._identity()
        names = {"epoch", "batch", *identity}
        if set(state) != names:
            raise DataError(
                f"data state: expected the fields {', '.join(sorted(names))}, found "
                f"{', '.join(sorted(map(str, state)))}"
            )
        for name, value in identity.items():
            if state[name] != value:
                raise DataError(
                    f"data state: {name} was {state[name]!r} and is now {value!r}; a run goes on "
                    "only with the data, tokenizer and settings that it was started with"
                )
        epoch, batch = state["epoch"], state["batch"]
        for name, value in (("epoch", epoch), ("batch", batch)):
            if type(value) is not int or value < 0:
                raise DataError(f"data state: {name} is {value!r}, not a number from 0 on")
        if self._epochs is not None and epoch >= self._epochs:
            raise DataError(f"data state: epoch {epoch}, but there are {self._epochs} (0 first)")
        count = len(self.epoch_at(epoch))
        if batch > count:
            raise DataError(f"data state: batch {batch} of epoch {epoch}, which has {count}")
        self.epoch, self.batch = epoch, batch
        self._open()

    def _identity(self) -> dict[str, Any]:
        planner = self._planner
        return {
            "examples": self.examples.digest,
            "batch_size": planner.batch_size,
            "max_length": list(planner.limits),
            "packing": planner.packing,
            "bucket": planner.bucket,
            "shuffle": planner.shuffle,
            "seed": planner.seed,
        }
