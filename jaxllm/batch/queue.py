"""What waits: prompts in buckets of power-of-two lengths, the longest results first."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from jaxllm.batch.rows import Row
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """What takes a slot: a row, or one of its samples."""

    row: Row
    sample: int
    returns: int = 1
    """Sequences that it ends with: those that beams return."""

    @property
    def texts(self) -> list[Task]:
        """A task for each of them."""
        if self.returns == 1:
            return [self]
        return [Task(self.row, sample) for sample in range(self.returns)]

    @property
    def width(self) -> int:
        """Columns of the bucket that its prompt is read in."""
        return bucket(len(self.row.ids), SMALLEST_BUCKET)

    def columns(self, encoder_decoder: bool) -> int:
        """Columns that hold its longest text, a power of two.

        An encoder-decoder's prompt takes none of them: it is in its encoder's part of the slot.
        """
        least = self.row.most if encoder_decoder else max(self.row.most, self.width)
        return bucket(least, SMALLEST_BUCKET)


class Queue:
    """Tasks that wait for a slot.

    Those with the most new tokens come first: a long text that starts last would be decoded alone,
    when all other slots have nothing left to do.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._buckets: dict[int, deque[Task]] = {}
        for task in sorted(tasks, key=lambda task: (-task.row.new, task.row.index, task.sample)):
            self._buckets.setdefault(task.width, deque()).append(task)

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    @property
    def widths(self) -> list[int]:
        """The buckets in which something waits."""
        return sorted(width for width, waiting in self._buckets.items() if waiting)

    def take(self, count: int) -> list[Task]:
        """Up to `count` tasks of one bucket, that of the longest task that waits."""
        waiting = [tasks for tasks in self._buckets.values() if tasks]
        if not waiting:
            return []
        tasks = max(waiting, key=lambda tasks: (tasks[0].row.new, tasks[0].width))
        return [tasks.popleft() for _ in range(min(count, len(tasks)))]

    def take_all(self) -> list[Task]:
        """Everything that waits."""
        taken = [task for tasks in self._buckets.values() for task in tasks]
        self._buckets.clear()
        return taken
