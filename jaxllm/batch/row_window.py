"""The rows of a job that are read and wait.

A job reads its rows in their order, a window ahead of the oldest row that waits, so that the first
ones run at once and a long table is never in memory as a whole. Each row waits for the first pool
that holds it. This depends on the row and on the pools alone, and pools are only added: a job that
is resumed with the same pools runs each row in the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from jaxllm.batch.memory import Pool
from jaxllm.batch.row_groups import Group, Task, fits_slots, sizes_of, tasks_of
from jaxllm.batch.rows import BatchOutput, BatchRow
from jaxllm.batch.slot_pool import BatchCounts

WINDOW = 4096
"""Rows from the oldest one that waits to the last one that is read, at most, by their numbers: also
in a resumed job, which does not read the finished rows between them."""


class RowWindow:
    """Rows that wait for a slot, and the pools of a job.

    Args:
        rows: checked rows, and the outputs of rows that do not run.
        shards: number of shards of the slot axis on a mesh.

    Attributes:
        pools: all pools; a row runs in the first one that holds it.
        is_read: True after the last row.
        unplaced: rows that no pool holds yet.
        static: rows that run without slots.
    """

    def __init__(
        self,
        rows: Iterator[BatchRow | BatchOutput],
        encoder_decoder: bool,
        shards: int,
        counts: BatchCounts,
        pools: Sequence[Pool] = (),
    ) -> None:
        self._rows, self._encoder_decoder, self._shards = rows, encoder_decoder, shards
        self._counts, self.pools = counts, list(pools)
        self.is_read = False
        self.unplaced: list[BatchRow] = []
        self.static: list[BatchRow] = []
        self._newest = -1
        self._next: BatchRow | BatchOutput | None = None
        """A row that came, but has its place in a later window."""
        self._waiting: dict[int, int] = {}
        """How many tasks wait of each row that waits, by its number, the oldest first."""

    @property
    def groups(self) -> list[Group]:
        """The groups of the pools, by number."""
        return list({pool.group.number: pool.group for pool in self.pools}.values())

    @property
    def is_full(self) -> bool:
        """True if the oldest row that waits is a window behind."""
        return self._is_beyond(self._newest + 1)

    def _is_beyond(self, index: int) -> bool:
        """True if the row of a number comes too long after the oldest row that waits."""
        return index - next(iter(self._waiting), index) >= WINDOW

    def read(self, enough: Callable[[], bool] = lambda: False) -> Iterator[BatchOutput]:
        """Reads rows until `enough` is true, the window is full, or none are left; yields the
        outputs of those that do not run."""
        while not (self.is_read or self.is_full or enough()):
            row, self._next = self._next or next(self._rows, None), None
            if row is None:
                self.is_read = True
                return
            if self._is_beyond(row.index):
                self._next, self._newest = row, max(self._newest, row.index - 1)
                return
            self._counts.rows_read += 1
            self._newest = max(self._newest, row.index)
            if isinstance(row, BatchOutput):
                yield row
                continue
            self._counts.cut_texts += row.was_cut
            self._counts.work += row.max_new_tokens * row.samples
            self._waiting[row.index] = row.samples
            if not fits_slots(row):
                self.static.append(row)
            else:
                self._place(row)

    def _place(self, row: BatchRow) -> None:
        """Lets a row wait for its pool, or until there is one."""
        own = sizes_of(row, self._encoder_decoder, self._shards)
        pool = next((pool for pool in self.pools if pool.holds(row, own)), None)
        if pool is None:
            self.unplaced.append(row)
            return
        known, tasks = pool.programs, tasks_of(row, pool.least_width)
        self._waiting[row.index] = len(tasks)
        for task in tasks:
            pool.add(task)
        self._counts.programs += pool.programs - known

    def add_pools(self, pools: Sequence[Pool]) -> None:
        """Adds pools, the smallest slots first, and gives them the rows that waited for them."""
        self.pools.extend(pools)
        rows, self.unplaced = self.unplaced, []
        for row in rows:
            self._place(row)

    def next_pool(self) -> Pool | None:
        """The pool that runs next: of the first group that has tasks the largest slots."""
        pools = [pool for pool in self.pools if pool.waiting]
        return min(pools, key=lambda pool: (pool.group.number, -pool.sizes.capacity), default=None)

    def take(self, pool: Pool, count: int) -> list[Task]:
        """Removes the next tasks of a pool. A row waits until all of its tasks are taken."""
        tasks = pool.take(count)
        for task in tasks:
            self._waiting[task.row.index] -= 1
            if not self._waiting[task.row.index]:
                del self._waiting[task.row.index]
        return tasks

    def put_back(self, pool: Pool, tasks: Sequence[Task]) -> None:
        """Lets tasks that were taken wait again, as if they had just been read."""
        for task in tasks:
            pool.add(task)
            self._waiting[task.row.index] = 1 + self._waiting.get(task.row.index, 0)

    def take_static(self) -> list[BatchRow]:
        """Removes the rows that run without slots."""
        rows, self.static = self.static, []
        for row in rows:
            del self._waiting[row.index]
        return rows
