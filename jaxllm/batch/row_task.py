"""`RowTask`: rows that run in plain batches, as those that are scored or embedded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, Generic, TypeVar

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow, error_output
from jaxllm.common.errors import InputError, JaxLLMError, quoted
from jaxllm.generation.inputs.batching import run_in_batches
from jaxllm.generation.inputs.values import is_integer

T = TypeVar("T")
R = TypeVar("R")


def checked_batch_size(batch_size: int | None, default: int) -> int:
    """The number of rows that run at once.

    Raises:
        InputError: not an integer from 1 on.
    """
    if batch_size is None:
        return default
    if not is_integer(batch_size) or batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more rows, found {quoted(batch_size)}")
    return batch_size


class RowTask(ABC, Generic[T, R]):
    """Answers rows that need no slots, in batches of rows of similar length.

    Attributes:
        name: for the counter of calls.
        counts: counters of the last call of `answer`.
    """

    name: ClassVar[str]
    memory: Sequence[Prediction] = ()

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self.counts = BatchCounts()

    @abstractmethod
    def read(self, row: RawRow) -> T:
        """What runs for a row.

        Raises:
            JaxLLMError: the row is wrong.
        """

    @abstractmethod
    def size(self, item: T) -> int:
        """Number of tokens that run."""

    @abstractmethod
    def run(self, items: list[T]) -> Sequence[R]:
        """The results of a batch."""

    @abstractmethod
    def output(self, row: RawRow, item: T, result: R) -> BatchOutput:
        """The output of a row."""

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Outputs: wrong rows first, then the others, the longest first."""
        counts = self.counts = BatchCounts()
        checked: list[tuple[RawRow, T]] = []
        for row in rows:
            try:
                checked.append((row, self.read(row)))
            except JaxLLMError as error:
                counts.add_output(output := error_output(row, error))
                yield output
        items = [item for _, item in checked]
        counts.work = sum(map(self.size, items))

        def run(batch: list[T]) -> Sequence[R]:
            counts.doing = f"computing {len(batch)} rows at once"
            results = self.run(batch)
            counts.add_call(f"{self.name} {len(batch)} rows")
            return results

        results = run_in_batches(
            run, items, self._batch_size, length=self.size, on_halving=counts.add_halving
        )
        for i, result in results:
            row, item = checked[i]
            counts.work_done += self.size(item)
            counts.add_output(output := self.output(row, item, result))
            yield output
