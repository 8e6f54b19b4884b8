"""Tasks of a batch, the queue of tasks that wait for a slot, and finished sequences."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable

from jaxllm.batch.rows import BatchRow
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A row, or one of its samples, that takes a slot."""

    row: BatchRow
    sample: int
    num_sequences: int = 1
    """Sequences that it ends with; beam search may return several."""

    @property
    def samples(self) -> list[Task]:
        """A task for each sequence that it ends with."""
        if self.num_sequences == 1:
            return [self]
        return [Task(self.row, sample) for sample in range(self.num_sequences)]

    @property
    def width(self) -> int:
        """Columns of its prompt's bucket."""
        return bucket(len(self.row.input_ids), SMALLEST_BUCKET)

    def columns(self, encoder_decoder: bool) -> int:
        """Columns of its longest sequence, rounded up to a power of two.

        For an encoder-decoder the prompt does not count: it is in the encoder part of the slot.
        """
        longest = self.row.max_length
        return bucket(longest if encoder_decoder else max(longest, self.width), SMALLEST_BUCKET)


@dataclasses.dataclass(frozen=True)
class FinishedSequence:
    """A sequence that has ended."""

    task: Task
    tokens: list[int]
    """New tokens."""
    reason: str
    error: JaxLLMError | None = None
    """Why there are no tokens."""

    @staticmethod
    def failed(task: Task, error: JaxLLMError) -> list[FinishedSequence]:
        """All sequences of a task that failed."""
        return [FinishedSequence(sample, [], "", error) for sample in task.samples]


class Queue:
    """Tasks that wait for a slot, in buckets of power-of-two prompt lengths.

    Those with the most new tokens come first: a long sequence that starts last would be decoded
    alone, while all other slots are free.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._buckets: dict[int, deque[Task]] = {}
        for task in sorted(
            tasks, key=lambda task: (-task.row.max_new_tokens, task.row.index, task.sample)
        ):
            self._buckets.setdefault(task.width, deque()).append(task)

    def __len__(self) -> int:
        return sum(map(len, self._buckets.values()))

    @property
    def widths(self) -> list[int]:
        """The buckets in which tasks wait."""
        return sorted(width for width, tasks in self._buckets.items() if tasks)

    def take(self, count: int) -> list[Task]:
        """Removes up to `count` tasks of one bucket, that of the task with the most new tokens."""
        candidates = [tasks for tasks in self._buckets.values() if tasks]
        if not candidates:
            return []
        tasks = max(candidates, key=lambda tasks: (tasks[0].row.max_new_tokens, tasks[0].width))
        return [tasks.popleft() for _ in range(min(count, len(tasks)))]

    def take_all(self) -> list[Task]:
        """All tasks that wait."""
        tasks = [task for bucket in self._buckets.values() for task in bucket]
        self._buckets.clear()
        return tasks
