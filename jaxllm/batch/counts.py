"""Counters of a batch."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jaxllm.batch.rows import BatchOutput


@dataclasses.dataclass
class BatchCounts:
    """Counters of one run, all of them exact."""

    work: int = 0
    """Size of all rows that can run, for the time left: the sum of their new-token limits where
    rows generate."""
    work_done: int = 0
    """Size of finished rows."""
    rows: int = 0
    """Finished rows, those with errors included."""
    sequences: int = 0
    """Finished sequences."""
    prompt_tokens: int = 0
    """Prompt tokens of finished rows."""
    new_tokens: int = 0
    prefill_tokens: int = 0
    """Prompt tokens of all prefills; a prompt counts once for each sample."""
    prefill_columns: int = 0
    """Columns of all prefills, the padding of buckets included."""
    decode_steps: int = 0
    slot_steps: int = 0
    """Decode steps times the slots that they decoded. All beams of a row are one slot."""
    busy_slot_steps: int = 0
    """Slot-steps occupied by an unfinished row."""
    cut_texts: int = 0
    """Texts that were cut to the most tokens that the model takes."""
    halvings: int = 0
    """Number of times that memory ran out and the slots were halved."""
    programs: int = 0
    """Programs that the rows need, as far as that is known; `program_calls` has those that ran."""
    doing: str = ""
    """What the engine computes or compiles at this moment, in words."""
    program_calls: Counter[str] = dataclasses.field(default_factory=Counter)
    """Calls of each compiled program, by a name that includes its bucket."""
    errors: Counter[str] = dataclasses.field(default_factory=Counter)
    """Rows with errors, by error class."""
    finish_reasons: Counter[str] = dataclasses.field(default_factory=Counter)

    @staticmethod
    def total(parts: Iterable[BatchCounts]) -> BatchCounts:
        """Sums the counters of several runs."""
        total = BatchCounts()
        for part in parts:
            for name in vars(total).keys() - {"doing"}:
                setattr(total, name, getattr(total, name) + getattr(part, name))
        return total

    @property
    def answered(self) -> int:
        """Finished rows without an error."""
        return self.rows - self.errors.total()

    @property
    def tokens(self) -> int:
        """New tokens, those of unfinished rows included."""
        return max(self.new_tokens, self.busy_slot_steps)

    @property
    def utilisation(self) -> float:
        """The share of slot-steps occupied by an unfinished row."""
        return self.busy_slot_steps / self.slot_steps if self.slot_steps else 0.0

    def add_decode_steps(self, steps: int, busy_slot_steps: int, slots: int) -> None:
        """Counts the steps of a decode call."""
        self.decode_steps += steps
        self.busy_slot_steps += busy_slot_steps
        self.slot_steps += steps * slots

    def add_output(self, output: BatchOutput) -> None:
        """Counts a finished row."""
        self.rows += 1
        if output.error_kind is not None:
            self.errors[output.error_kind] += 1
            return
        self.sequences += len(output.new_lengths)
        self.prompt_tokens += output.prompt_tokens
        self.new_tokens += sum(output.new_lengths)
        self.finish_reasons.update(output.finish_reasons)

    def add_halving(self) -> None:
        """Counts a halving of the slots."""
        self.halvings += 1

    def add_call(self, program: str) -> None:
        """Counts a call of a compiled program."""
        self.program_calls[program] += 1

    def to_dict(self) -> dict[str, Any]:
        """The counters as a JSON object."""
        return {**vars(self), "utilisation": self.utilisation}
