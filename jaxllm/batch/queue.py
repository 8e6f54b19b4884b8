"""Queue of tasks, in buckets of power-of-two prompt lengths, longest results first."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from jaxllm.batch.rows import Row
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Work for one slot: one sample of a row, or all beams of a row."""

    row: Row
    sample: int
    returns: int = 1
    """Number of sequences it returns; more than 1 only with beams."""

    @property
    def texts(self) -> list[Task]:
        """One task for each returned sequence."""
        if self.returns == 1:
            return [self]
        return [Task(self.row, sample) for sample in range(self.returns)]

    @property
    def width(self) -> int:
        """Length of the bucket in which its prompt is prefilled."""
        return bucket(len(self.row.ids), SMALLEST_BUCKET)

    def columns(self, encoder_decoder: bool) -> int:
        """Maximum sequence length, rounded up to a power of two.

        For an encoder-decoder the prompt does not count: it is in the encoder part of the slot.
        """
        least = self.row.most if encoder_decoder else max(self.row.most, self.width)
        return bucket(least, SMALLEST_BUCKET)


class Queue:
    """Tasks that wait for a slot.

    Tasks with the most new tokens come first: a long sequence that starts last would be decoded
    alone while all other slots are free.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._buckets: dict[int, deque[Task]] = {}
        for task in sorted(tasks, key=lambda task: (-task.row.new, task.row.index, task.sample)):
            self._buckets.setdefault(task.width, deque()).append(task)

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    @property
    def widths(self) -> list[int]:
        """Lengths of the non-empty buckets."""
        return sorted(width for width, waiting in self._buckets.items() if waiting)

    def take(self, count: int) -> list[Task]:
        """Removes up to `count` tasks of one bucket, that of the task with the most new tokens."""
        waiting = [tasks for tasks in self._buckets.values() if tasks]
        if not waiting:
            return []
        tasks = max(waiting, key=lambda tasks: (tasks[0].row.new, tasks[0].width))
        return [tasks.popleft() for _ in range(min(count, len(tasks)))]

    def take_all(self) -> list[Task]:
        """Removes all tasks."""
        taken = [task for tasks in self._buckets.values() for task in tasks]
        self._buckets.clear()
        return taken
