"""Batches over several epochs, with a position that can be saved and restored.

Batch n of an epoch does not depend on the number of processes; each process reads its own rows.
A position is an epoch and a batch number; for a `Stream` also a window, and the examples that the
previous window left over. Restoring it reads no earlier data.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
from jaxtyping import Int64

from jaxllm.common.errors import ConfigError, DataError
from jaxllm.models.input_checks import IGNORED
from jaxllm.training.data.config import ModelInfo
from jaxllm.training.data.examples import (
    Counts,
    Example,
    Examples,
    PreferenceExample,
    require_grain,
)
from jaxllm.training.data.plan import EpochPlan, Planner
from jaxllm.training.data.stream import Stream

PREFETCHED_BATCHES = 4
"""Number of batches that a thread prefetches."""
_OTHER = "resume from another checkpoint"

HostBatch = dict[str, np.ndarray]
"""Arrays [B, ...] by model argument name."""
ExampleRows = Sequence[Sequence[Example]]
PairRows = Sequence[Sequence[PreferenceExample]]


def rows_of_process(batch_size: int, index: int, count: int) -> range:
    """The rows of every batch that one process reads: part `index` of `count` equal parts.

    Raises:
        ConfigError: `count` does not divide the batch, or `index` is out of range.
    """
    if batch_size < 1 or count < 1 or batch_size % count:
        raise ConfigError(
            f"batch_size: {batch_size} rows cannot be divided among {count} processes; give a "
            "multiple"
        )
    if not 0 <= index < count:
        raise ConfigError(f"process_index: expected 0 to {count - 1}, found {index}")
    size = batch_size // count
    return range(index * size, (index + 1) * size)


Source = Examples | Stream


@dataclass(frozen=True)
class Epoch:
    """Batches of one epoch, or of a window of it, by number; a random-access source for grain."""

    examples: Examples
    model: ModelInfo
    plan: EpochPlan
    packed: bool
    rows: range

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> HostBatch:
        items = self.examples.items
        rows = [[items[n] for n in self.plan.row(index, number)] for number in self.rows]
        shape = tuple(self.plan.shapes[index].tolist())
        if isinstance(items[0], PreferenceExample):
            has_reference = items[0].reference is not None
            pairs = cast(PairRows, rows)
            return collate_pairs(pairs, shape, self.model, has_reference=has_reference)
        like = items[0].labels
        return collate(cast(ExampleRows, rows), shape, self.model, packed=self.packed, like=like)

    def tokens(self, index: int) -> Int64[np.ndarray, "N K"]:
        """Number of tokens of every sequence of a batch over all processes, on each side."""
        rows = range(self.plan.batch_size)
        members = np.concatenate([self.plan.row(index, number) for number in rows])
        tokens = self.examples.tokens
        return tokens[members].reshape(-1, tokens.shape[-1])

    @property
    def members(self) -> list[list[int]]:
        """Numbers of the examples of each batch over all processes, in the order of its rows."""
        rows = range(self.plan.batch_size)
        batches = range(len(self))
        return [[int(n) for row in rows for n in self.plan.row(batch, row)] for batch in batches]

    @property
    def left_over(self) -> list[list[int]]:
        """The examples that are left to the next window, as `Stream.read` takes them."""
        places = self.examples.places
        return [] if places is None else places[self.plan.rest].tolist()

    @property
    def padding(self) -> float:
        """Share of the epoch's positions that are padding, 0 to 1."""
        return self.plan.padding(self.examples.tokens)

    def __iter__(self) -> Iterator[HostBatch]:
        return self.iterate()

    def iterate(self, start: int = 0) -> Iterator[HostBatch]:
        """Batches from number `start` on; a thread prefetches the next ones."""
        grain = require_grain()
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=PREFETCHED_BATCHES)
        batches = grain.MapDataset.source(self)[start:]
        return iter(batches.to_iter_dataset(options)) if len(batches) else iter(())


@dataclass(frozen=True)
class EpochBatches:
    """Batches of whole epochs. The examples of a stream are read again at each iteration.

    The result of `epoch_batches` has every example once, unshuffled.
    """

    examples: Source
    model: ModelInfo
    planner: Planner
    rows: range

    def windows(
        self, epoch: int = 0, start: int = 0, carried: Sequence[list[int]] = ()
    ) -> Iterator[Epoch]:
        """The windows of an epoch from number `start` on; rows in memory are one window."""
        if epoch == 0 and not isinstance(self.examples, Stream):
            yield self._in_memory
            return
        yield from self._read(epoch, start, carried)

    def _read(
        self, epoch: int = 0, start: int = 0, carried: Sequence[list[int]] = ()
    ) -> Iterator[Epoch]:
        for examples, plan in self.examples.read(self.planner, epoch, start, carried):
            yield Epoch(examples, self.model, plan, self.planner.packing, self.rows)

    @cached_property
    def _in_memory(self) -> Epoch:
        """The first epoch of examples in memory, which is planned once."""
        if isinstance(self.examples, Stream):  # list() asks for the length, and would read it twice
            raise TypeError(
                "the batches of a stream are not known before it is read; iterate over them, or "
                "set streaming to false"
            )
        return next(self._read())

    def __len__(self) -> int:
        return len(self._in_memory)

    def __bool__(self) -> bool:
        return True  # without this, that of a stream would ask for its length

    def __getitem__(self, index: int) -> HostBatch:
        return self._in_memory[index]

    @property
    def members(self) -> list[list[int]]:
        """`Epoch.members` of examples in memory."""
        return self._in_memory.members

    @property
    def padding(self) -> float:
        """`Epoch.padding` of examples in memory."""
        return self._in_memory.padding

    def __iter__(self) -> Iterator[HostBatch]:
        for window in self.windows():
            yield from window


class Batches(Iterator[HostBatch]):
    """Iterates over one process's rows of each global batch, for several epochs.

    Attributes:
        examples: the encoded data; ``examples.counts`` counts kept and dropped rows.
        epoch, window, batch: the position: numbers of the next batch.
        carried: part of the position: the examples that the previous window left over.

    Args:
        epochs: number of epochs; None: unlimited.
        process: index and count of the processes; see `rows_of_process`.
    """

    def __init__(
        self,
        examples: Source,
        model: ModelInfo,
        planner: Planner,
        epochs: int | None = None,
        process: tuple[int, int] = (0, 1),
    ) -> None:
        if epochs is not None and epochs < 1:
            raise ConfigError(f"epochs: expected 1 or more, found {epochs}")
        self.examples = examples
        self.epoch, self.window, self.batch = 0, 0, 0
        self.carried: list[list[int]] = []
        self._model, self._planner, self._epochs = model, planner, epochs
        self._process = process
        self._windows: Iterator[Epoch] = iter(())
        self._iterator: Iterator[HostBatch] = iter(())
        self._open_window: Epoch | None = None

    def with_examples(self, examples: Source) -> Batches:
        """The same batches, from the start, of examples with the same lengths."""
        return Batches(examples, self._model, self._planner, self._epochs, self._process)

    def in_order(self, batch_size: int) -> EpochBatches:
        """Every example once, unshuffled but grouped by length, in batches of another size."""
        source = self.examples.in_order() if isinstance(self.examples, Stream) else self.examples
        grouped = {"shuffle": False, "group_by_length": True}
        planner = replace(self._planner, batch_size=batch_size, **grouped)
        rows = rows_of_process(batch_size, *self._process)
        return EpochBatches(source, self._model, planner, rows)

    def next_tokens(self) -> Int64[np.ndarray, "N K"]:
        """`Epoch.tokens` of the next batch."""
        return self._advance().tokens(self.batch)

    @property
    def _current(self) -> Epoch:
        """The window of the position; opens it at its first use."""
        if self._open_window is None:
            self._open(self.epoch, self.window, self.batch, self.carried)
        assert self._open_window is not None
        return self._open_window

    def _open(
        self, epoch: int, window: int = 0, batch: int = 0, carried: Sequence[list[int]] = ()
    ) -> None:
        """Moves to a position.

        Raises:
            DataError: the window has fewer batches; the position is unchanged.
        """
        rows = rows_of_process(self._planner.batch_size, *self._process)
        batches = EpochBatches(self.examples, self._model, self._planner, rows)
        windows = batches.windows(epoch, window, carried)
        current = next(windows)
        if batch > len(current):
            raise DataError(
                f"data state: batch {batch} of epoch {epoch}, which has {len(current)}; {_OTHER}"
            )
        self.epoch, self.window, self.batch, self.carried = epoch, window, batch, [*carried]
        self._windows, self._open_window = windows, current
        self._iterator = current.iterate(batch)

    @property
    def counts(self) -> Counts:
        """Counts of rows, examples and tokens; those of a stream are estimated from a sample."""
        return self.examples.counts

    @property
    def batches_per_epoch(self) -> int:
        """Number of batches of the current epoch; that of a stream is estimated from a sample."""
        if isinstance(self.examples, Stream):
            return self.examples.batches_per_epoch(self._planner)
        return len(self._current)

    @property
    def summary(self) -> str:
        """Counts and steps per epoch as a text, which says if they are estimated."""
        if not isinstance(self.examples, Stream):
            return f"{self.counts}; steps per epoch: {self.batches_per_epoch}"
        sample = self.examples.sample
        longest = " and ".join(map(str, sample.lengths.max(axis=0)))
        return (
            f"streamed, about {self.counts}; steps per epoch: about {self.batches_per_epoch} "
            f"(estimated from {sample.counts.rows} rows, the longest of {longest} tokens)"
        )

    @property
    def padding(self) -> float:
        """Share of the positions of the current epoch, or window, that are padding, 0 to 1."""
        return self._current.padding

    def _advance(self) -> Epoch:
        """Opens the next window or epoch if the current one is over, and returns it.

        Raises:
            StopIteration: it was the last one.
            DataError: all windows of an epoch are without examples.
        """
        current, empty = self._current, 0
        while self.batch == len(current):
            empty = 0 if len(current) else empty + 1
            if empty == self.examples.windows:
                raise DataError(f"{self.examples.windows} windows in a row have no examples")
            if self.window + 1 < self.examples.windows:
                # Opened again, should this fail.
                self.window, self.batch, self.carried = self.window + 1, 0, current.left_over
                self._open_window = None
                current = self._open_window = next(self._windows)
                self._iterator = current.iterate()
            elif self._epochs is not None and self.epoch + 1 >= self._epochs:
                raise StopIteration
            else:
                self._open(self.epoch + 1)
                current = self._current
        return current

    def __next__(self) -> HostBatch:
        self._advance()
        batch = next(self._iterator)
        self.batch += 1
        return batch

    def state(self) -> dict[str, Any]:
        """The position, with digest and settings of the data, as JSON values."""
        return {**self._position(), **self._identity()}

    def _position(self) -> dict[str, Any]:
        position: dict[str, Any] = {"epoch": self.epoch, "batch": self.batch}
        if isinstance(self.examples, Stream):
            position |= {"window": self.window, "carried": self.carried}
        return position

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state()`, on any number of processes.

        Raises:
            DataError: the state was saved with other data or settings, or its position is out of
                range.
        """
        identity, position = self._identity(), self._position()
        names = {*position, *identity}
        if ("window" in state) != ("window" in names) and "epoch" in state:
            before = "streamed" if "window" in state else "kept in memory"
            raise DataError(
                f"data state: the rows were {before} and are not now; set data.streaming to "
                f"{str('window' in state).lower()}"
            )
        if names - set(state) == {"carried"}:
            raise DataError(
                "data state: the field 'carried' is missing, since an earlier version of jaxllm "
                "saved the streamed run; start the run anew"
            )
        if set(state) != names:
            raise DataError(
                f"data state: expected the fields {', '.join(sorted(names))}, found "
                f"{', '.join(sorted(map(str, state)))}"
            )
        for name, value in identity.items():
            if state[name] != value:
                raise DataError(
                    f"data state: {name} was {state[name]!r} and is now {value!r}; a run resumes "
                    "only with the data, tokenizer and settings that it was started with"
                )
        for name in position.keys() - {"carried"}:
            if type(state[name]) is not int or state[name] < 0:
                raise DataError(
                    f"data state: {name} is {state[name]!r}, not a number from 0 on; {_OTHER}"
                )
        epoch, window, batch = state["epoch"], state.get("window", 0), state["batch"]
        if self._epochs is not None and epoch >= self._epochs:
            raise DataError(
                f"data state: epoch {epoch}, but there are {self._epochs} (0 first); {_OTHER}"
            )
        if window >= self.examples.windows:
            raise DataError(
                f"data state: window {window}, but an epoch has {self.examples.windows}; {_OTHER}"
            )
        carried = state.get("carried", [])
        if isinstance(self.examples, Stream) and not self.examples.are_sizes(carried):
            raise DataError(
                f"data state: carried is {str(carried)[:60]}, not places of distinct examples "
                f"within max_length; {_OTHER}"
            )
        self._open(epoch, window, batch, carried)

    def _identity(self) -> dict[str, Any]:
        planner, examples = self._planner, self.examples
        reference = examples.reference_digest
        return {
            "examples": examples.digest,
            "batch_size": planner.batch_size,
            "max_length": list(planner.limits),
            "packing": planner.packing,
            "bucket": planner.bucket,
            "shuffle": planner.shuffle,
            "seed": planner.seed,
            **({"window_rows": examples.window_rows} if isinstance(examples, Stream) else {}),
            **({} if reference is None else {"reference": reference}),
        }


def collate(
    rows: ExampleRows, shape: tuple[int, ...], model: ModelInfo, *, packed: bool, like: np.ndarray
) -> HostBatch:
    """Builds the arrays of a batch, padded on the right; a row without examples is all padding.

    Args:
        rows: the examples of each row, at most one unless packed.
        shape: length of the rows: (tokens,), or (encoder, decoder) for seq2seq.
        model: its `kind` decides the form of the labels; its pad id fills `input_ids`.
        packed: rows have `segment_ids` in place of `attention_mask`.
        like: labels of any example, for the shape and dtype of a classifier's padding rows.

    Returns:
        int32 [B, T]: `input_ids`, and `attention_mask` or `segment_ids` (0 at padding, documents
        1, 2, ...). `labels` int32 [B, T], -100 where no loss is computed; for seq2seq [B, D],
        packed with `decoder_segment_ids`. Classification: `labels` int32 [B], or float32 [B] or
        [B, C] with `weights` float32 [B], 0 for padding rows.
    """
    inputs = [[example.input_ids for example in row] for row in rows]
    batch = {"input_ids": _fill(inputs, shape[0], model.pad_token_id or 0)}
    if packed:
        batch["segment_ids"] = _fill(_segment_ids(inputs), shape[0], 0)
    else:
        batch["attention_mask"] = _fill(
            [[np.ones_like(x) for x in row] for row in inputs], shape[0], 0
        )
    if model.kind == "classification":
        ignored = np.full_like(like, IGNORED if like.dtype == np.int32 else 0)
        batch["labels"] = np.stack([row[0].labels if row else ignored for row in rows])
        if like.dtype != np.int32:
            batch["weights"] = np.array([len(row) > 0 for row in rows], np.float32)
        return batch
    labels = [[example.labels for example in row] for row in rows]
    batch["labels"] = _fill(labels, shape[-1], IGNORED)
    if packed and model.kind == "seq2seq":
        batch["decoder_segment_ids"] = _fill(_segment_ids(labels), shape[1], 0)
    return batch


def collate_pairs(
    rows: PairRows, shape: tuple[int, ...], model: ModelInfo, *, has_reference: bool
) -> HostBatch:
    """Builds the arrays of a batch of pairs: those of `collate` for both answers.

    Returns:
        The arrays of `collate` as [B, 2, T], chosen before rejected; and `reference_logps` float32
        [B, 2] if the examples have them (`has_reference`), 0 for padding rows.
    """
    pairs = [row[0] if row else None for row in rows]
    sides = []
    for side in (0, 1):
        sequences = [[] if pair is None else [pair.sequences[side]] for pair in pairs]
        sides.append(collate(sequences, shape, model, packed=False, like=np.zeros(0, np.int32)))
    batch = {name: np.stack([side[name] for side in sides], axis=1) for name in sides[0]}
    if has_reference:
        none = np.zeros(2, np.float32)
        logps = [none if pair is None else cast(np.ndarray, pair.reference) for pair in pairs]
        batch["reference_logps"] = np.stack(logps)
    return batch


def _fill(rows: Sequence[Sequence[np.ndarray]], length: int, value: int) -> np.ndarray:
    """Concatenates each row's arrays and pads with `value`."""
    result = np.full((len(rows), length), value, np.int32)
    for number, arrays in enumerate(rows):
        if arrays:
            joined = np.concatenate(arrays)
            result[number, : len(joined)] = joined
    return result


def _segment_ids(rows: Sequence[Sequence[np.ndarray]]) -> list[list[np.ndarray]]:
    """Segment ids: 1 for each token of a row's first array, 2 for the second, ..."""
    return [[np.full_like(x, number) for number, x in enumerate(row, 1)] for row in rows]
