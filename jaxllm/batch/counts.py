"""Counters of a batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jaxllm.batch.queue import Task
from jaxllm.batch.rows import BatchOutput

if TYPE_CHECKING:
    from jaxllm.batch.row_groups import Group
    from jaxllm.batch.sizes import Sizes


@dataclasses.dataclass
class Counts:
    """Counters of one run, all of them exact."""

    asked: int = 0
    """Sum of the new-token limits of all rows that can run."""
    answered: int = 0
    """The same sum over finished rows."""
    rows: int = 0
    """Finished rows, those with errors included."""
    texts: int = 0
    """Finished sequences."""
    prompt_tokens: int = 0
    """Prompt tokens of finished rows."""
    new_tokens: int = 0
    read_tokens: int = 0
    """Prefilled tokens; a sample's prompt counts once for each sample."""
    read_columns: int = 0
    """Prefilled columns, the padding of buckets included."""
    decode_steps: int = 0
    slot_steps: int = 0
    """Decode steps times slots. All beams of a row are one slot."""
    busy_steps: int = 0
    """Slot-steps occupied by an unfinished row."""
    halvings: int = 0
    """Number of times that memory ran out and the slots were halved."""
    buckets: Counter[str] = dataclasses.field(default_factory=Counter)
    """Calls of each compiled program, by a name that includes its bucket."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    @staticmethod
    def total(parts: Iterable[Mapping[str, Any]]) -> Counts:
        """Sums the counters of several processes, each given as its `vars`."""
        whole = Counts()
        for part in parts:
            for field in dataclasses.fields(Counts):
                before, more = getattr(whole, field.name), part[field.name]
                more = Counter(more) if isinstance(before, Counter) else more
                setattr(whole, field.name, before + more)
        return whole

    @property
    def utilisation(self) -> float:
        """The share of slot-steps occupied by an unfinished row."""
        return self.busy_steps / self.slot_steps if self.slot_steps else 0.0

    def admitted(self, tasks: Sequence[Task], sizes: Sizes, group: Group) -> None:
        """Counts a prefill."""
        self.read_tokens += sum(len(task.row.ids) for task in tasks)
        self.read_columns += sizes.arrivals * tasks[0].width
        self._used(f"read {sizes.arrivals} x {tasks[0].width} into", sizes, group)

    def decoding(self, sizes: Sizes, group: Group) -> None:
        self._used("decode", sizes, group)

    def decoded(self, steps: int, busy: int, slots: int) -> None:
        """Counts the steps of a decode call."""
        self.decode_steps += steps
        self.busy_steps += busy
        self.slot_steps += steps * slots

    def finished(self, output: BatchOutput) -> None:
        """Counts a finished row."""
        self.rows += 1
        if output.error_kind is not None:
            self.errors[output.error_kind] += 1
            return
        self.texts += len(output.output_ids)
        self.prompt_tokens += output.prompt_tokens
        self.new_tokens += sum(map(len, output.output_ids))
        self.reasons.update(output.finish_reasons)

    def _used(self, what: str, sizes: Sizes, group: Group) -> None:
        name = f"{what} {sizes.slots} x {sizes.capacity}"
        if sizes.source is not None:
            name += f" (encoder {sizes.source})"
        if sizes.beams > 1:
            name += f" of {sizes.beams} beams"
        name += f", group {group.number}" if group.number else ""
        self.called(name)

    def halved(self) -> None:
        """Counts a halving of the slots."""
        self.halvings += 1

    def called(self, bucket: str) -> None:
        """Counts a call of a compiled program."""
        self.buckets[bucket] += 1

    def to_dict(self) -> dict[str, Any]:
        """The counters as a JSON object."""
        return {**vars(self), "utilisation": self.utilisation}
