"""A data set that is too large to keep: its rows are read and encoded again in every epoch.

An epoch is a permutation of all rows (grain's index shuffle), cut into windows. A window is
planned as a small data set is as a whole, except that the examples of a batch that is not full go
over to the next window. They are part of the position of a run, so that it resumes without reading
earlier windows. Each process encodes its share of a window. All learn the lengths of all examples,
which the plan needs, and each encodes the examples of its own rows of a batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32, Int64

from jaxllm.common.errors import DataError
from jaxllm.common.validation import to_plain
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data.config import DataConfig
from jaxllm.training.data.examples import (
    Counts,
    EncodedRow,
    Examples,
    PreferenceExample,
    RowEncoder,
    digest_arrays,
    require_grain,
)
from jaxllm.training.data.large_files import LARGE_BYTES
from jaxllm.training.data.plan import EpochPlan, Planner
from jaxllm.training.data.rows import Rows

STREAMED_ROWS = 1_000_000
"""A set of more rows, or of more than `LARGE_BYTES`, is streamed unless its config says not to."""
WINDOW_ROWS = 8192
WINDOW_BYTES = 8 << 20
"""A window has at most these rows and bytes, but at least `WINDOW_BATCHES` batches."""
WINDOW_BATCHES = 16
SAMPLE_ROWS = 1000
SAMPLE_BYTES = 4 << 20
_NOT_ENCODING = ("path", "dataset", "streaming", "packing", "bucket", "shuffle", "seed")
"""Fields that do not change the examples of a row."""

Place = tuple[int, int]
"""Row of the source, and number within the row, of an example."""
Sizes = Int32[np.ndarray, "n w"]
"""Place, and tokens of each sequence on each side, of examples."""
Gather = Callable[[Callable[[], Sizes]], Sequence[Sizes]]
"""Calls a function in all processes and returns the results of all, in the order of processes. An
error in one of them is raised in all."""


@dataclass(frozen=True)
class Peers:
    """The processes that encode the windows of a stream together: this is number `index`.

    By default a process encodes whole windows by itself.
    """

    index: int = 0
    count: int = 1
    gather: Gather = lambda act: [act()]


ALONE = Peers()


def random_sample(encoder: RowEncoder) -> Examples:
    """Counts and sizes, but not the items, of the examples of some rows.

    Raises:
        DataError: as `RowEncoder`; or there is no example.
    """
    total, size = len(encoder.rows), encoder.rows.size
    fitting = SAMPLE_BYTES * total // size if size else total
    count = min(total, SAMPLE_ROWS, max(1, fitting))
    encoded = [*encoder.several(sorted(shuffled(range(count), total, seed=0)))]
    items = [item for some, _ in encoded for item in some]
    counts = sum((count for _, count in encoded), Counts())
    if not items:
        raise DataError(f"{encoder.rows.name}: nothing to learn from in a sample: {counts}")
    return Examples((), counts, "", sizes=Examples(items, counts, "").tokens)


def filled_rows(sample: Examples, planner: Planner) -> float:
    """Rows of batches that one row of the source fills, on average."""
    plan = planner.plan(sample.lengths, 0)
    return np.count_nonzero(np.diff(plan.offsets)) / sample.counts.rows


def shuffled(positions: range, total: int, seed: int) -> list[int]:
    """Rows at some positions of a permutation of `total` rows."""
    shuffle = require_grain().experimental.index_shuffle
    return [shuffle(n, max_index=total - 1, seed=seed, rounds=4) for n in positions]


@dataclass(frozen=True)
class Stream:
    """The examples of a data set, window by window.

    Attributes:
        digest: hash of the files and of all settings that change the examples.
        window_rows: rows of the source in a window.
        sample: what is known of the examples before they are read.
        seed: seed of the order; None: the order of the rows.
        reference: log-probabilities of the answers of each row under a reference model.
    """

    encoder: RowEncoder
    digest: str
    window_rows: int
    sample: Examples
    seed: int | None
    peers: Peers = ALONE
    reference: Float32[np.ndarray, "N 2"] | None = None

    @property
    def total(self) -> int:
        """Number of rows."""
        return len(self.encoder.rows)

    @property
    def sha256(self) -> str:
        return self.encoder.rows.digest()

    @property
    def windows(self) -> int:
        """Number of windows of an epoch."""
        return -(-self.total // self.window_rows)

    @property
    def counts(self) -> Counts:
        """Counts of an epoch, estimated from the sample."""
        known = self.sample.counts
        scaled = {f.name: getattr(known, f.name) * self.total // known.rows for f in fields(known)}
        return Counts(**scaled)

    @property
    def reference_digest(self) -> str | None:
        return None if self.reference is None else digest_arrays([self.reference])

    def with_reference(self, logps: Float32[np.ndarray, "N 2"]) -> Stream:
        """The stream with log-probabilities of a reference model, by number of the row."""
        return replace(self, reference=logps)

    def in_order(self) -> Stream:
        return replace(self, seed=None)

    def batches_per_epoch(self, planner: Planner) -> int:
        """Number of batches of an epoch, estimated from the sample."""
        share = filled_rows(self.sample, planner) / planner.batch_size
        return max(1, math.ceil(self.total * share - 1e-9))

    def order(self, epoch: int, window: int) -> list[int]:
        """The rows of a window: a part of a permutation that differs between epochs."""
        first = window * self.window_rows
        positions = range(first, min(first + self.window_rows, self.total))
        if self.seed is None:
            return list(positions)
        seed = int(np.random.SeedSequence([self.seed, epoch]).generate_state(1)[0])
        return shuffled(positions, self.total, seed)

    def read(
        self, planner: Planner, epoch: int, start: int = 0, carried: Sequence[list[int]] = ()
    ) -> Iterator[tuple[Examples, EpochPlan]]:
        """The windows of an epoch from number `start` on, and their plans; a thread encodes the
        next one.

        Args:
            carried: `Epoch.left_over` of the previous window.

        Raises:
            DataError: as `RowEncoder`; or the rows lack an example of `carried`.
        """
        numbers, ended = range(start, self.windows), threading.Event()
        grain = require_grain()
        shares = grain.MapDataset.source(numbers).map(lambda n: self._share(epoch, n, ended))
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        iterator = iter(shares.to_iter_dataset(options))
        known: dict[Place, EncodedRow] = {}

        def make(row: int, piece: int, *tokens: int) -> EncodedRow:
            pieces = self.encoder(row)[0]
            found = [_token_counts(example) for example in pieces]
            if found[piece : piece + 1] != [[*tokens]]:
                raise DataError(
                    f"{self.encoder.rows.where(row)}: expected {[*tokens]} tokens in piece {piece} "
                    f"of the row, found pieces of {str(found)[:60]} tokens: the data state does "
                    "not fit the file; resume from another checkpoint"
                )
            return self._with_reference(row, pieces[piece])

        rest = np.asarray(carried, np.int64).reshape(-1, self.width)
        try:
            for window in numbers:
                mine, sizes = self._gathered(iterator)
                known, every = known | mine, np.concatenate([rest, sizes])
                items = WindowItems(every, known, make)
                tokens = every[:, 2:].reshape(-1, *self.sample.tokens.shape[1:])
                examples = Examples(items, Counts(), "", every, tokens)
                is_last = window + 1 == self.windows
                number = epoch * self.windows + window
                plan = planner.plan(examples.lengths, number, is_last=is_last)
                yield examples, plan
                rest = every[plan.rest]
                places = map(tuple, rest[:, :2].tolist())
                known = {place: known[place] for place in places if place in known}
        finally:  # the thread stops encoding the next window
            ended.set()

    @property
    def width(self) -> int:
        """Numbers that `Sizes` has for each example."""
        return 2 + self.sample.tokens[0].size

    def are_sizes(self, value: Any) -> bool:
        """True if a value is a list of `Sizes` of distinct examples within the limits."""
        if not isinstance(value, list) or not all(
            isinstance(each, list)
            and len(each) == self.width
            and all(type(n) is int and 0 <= n < 2**31 for n in each)
            and each[0] < self.total
            and all(map(operator.le, each[2:], itertools.cycle(self.encoder.limits)))
            for each in value
        ):
            return False
        return len({(row, piece) for row, piece, *_ in value}) == len(value)

    def _share(
        self, epoch: int, window: int, ended: threading.Event
    ) -> tuple[dict[Place, EncodedRow], Sizes]:
        """The examples that this process encodes of a window, and their sizes."""
        order, peers = self.order(epoch, window), self.peers
        first, last = (len(order) * n // peers.count for n in (peers.index, peers.index + 1))
        rows = order[first:last]
        items: dict[Place, EncodedRow] = {}
        sizes: list[list[int]] = []
        for row, (some, _) in zip(rows, self.encoder.several(rows), strict=True):
            if ended.is_set():
                break
            for piece, example in enumerate(some):
                items[row, piece] = self._with_reference(row, example)
                sizes.append([row, piece, *_token_counts(example)])
        return items, np.asarray(sizes, np.int32).reshape(-1, self.width)

    def _gathered(
        self, shares: Iterator[tuple[dict[Place, EncodedRow], Sizes]]
    ) -> tuple[dict[Place, EncodedRow], Sizes]:
        """The examples that this process has encoded of the next window, and the sizes of all."""
        mine: dict[Place, EncodedRow] = {}

        def sizes() -> Sizes:
            items, result = next(shares)
            mine.update(items)
            return result

        return mine, np.concatenate(self.peers.gather(sizes))

    def _with_reference(self, row: int, example: EncodedRow) -> EncodedRow:
        if self.reference is None or not isinstance(example, PreferenceExample):
            return example
        return replace(example, reference=self.reference[row])


def _token_counts(example: EncodedRow) -> list[int]:
    return [n for sequence in example.sequences for n in sequence.lengths]


class WindowItems(Sequence[EncodedRow]):
    """The examples at some places. An example that is not `known` is encoded at its first use."""

    def __init__(
        self,
        places: Int64[np.ndarray, "N w"],
        known: dict[Place, EncodedRow],
        make: Callable[..., EncodedRow],
    ) -> None:
        self._places, self._known, self._make = places, known, make

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        row, piece, *tokens = self._places[index].tolist()
        if (row, piece) not in self._known:
            self._known[row, piece] = self._make(row, piece, *tokens)
        return self._known[row, piece]


def open_stream(
    config: DataConfig, tokenizer: Tokenizer, encoder: RowEncoder, planner: Planner, peers: Peers
) -> Stream | None:
    """Makes the stream of a source, if its config says that it is streamed, or leaves it open and
    there are many rows; None if one window would have all rows and it need not stream.

    Raises:
        DataError: as `random_sample`; or there are no rows, or too many.
    """
    rows, streams = encoder.rows, config.streaming
    if streams is None:
        streams = rows.size > LARGE_BYTES or len(rows) > STREAMED_ROWS
    if not streams:
        return None
    if not 0 < len(rows) < 2**31:
        raise DataError(f"{rows.name}: has {len(rows)} rows; expected 1 to {2**31 - 1}")
    sample = random_sample(encoder)
    window = window_rows(rows, filled_rows(sample, planner), planner.batch_size)
    if window >= len(rows) and not config.streaming:
        return None
    settings = {k: v for k, v in to_plain(config).items() if k not in _NOT_ENCODING}
    known = [rows.digest(), settings, tokenizer.digest(), asdict(encoder.model), encoder.limits]
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    seed = planner.seed if planner.shuffle else None
    return Stream(encoder, digest, window, sample, seed, peers)


def window_rows(rows: Rows, filled: float, batch_size: int) -> int:
    """Rows of the source in a window, a multiple of the batch size.

    Args:
        filled: rows of batches that one row of the source fills.
    """
    fitting = WINDOW_BYTES * len(rows) // rows.size if rows.size else WINDOW_ROWS
    least = math.ceil(WINDOW_BATCHES * batch_size / filled)
    return -(-max(least, min(WINDOW_ROWS, fitting)) // batch_size) * batch_size
