"""Sizes of a pool of slots, from which the shapes of its programs follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.batch.queue import Task
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes that determine the shapes of a pool's programs."""

    slots: int
    columns: int
    """Maximum sequence length, prompt included."""
    source: int | None = None
    """Maximum encoder input length; None for a decoder-only model."""
    shards: int = 1
    """Number of shards of the slot axis on a mesh; divides `slots`."""
    beams: int = 1
    """Number of beams of a slot."""
    room: int = 0
    """Maximum number of new tokens with several beams; otherwise 0."""

    @property
    def capacity(self) -> int:
        """KV-cache positions of a slot: the prompt once, new tokens once for each beam.

        >>> Sizes(16, 64).capacity, Sizes(16, 64, beams=4, room=32).capacity
        (64, 160)
        """
        return self.columns + (self.beams - 1) * self.room

    @property
    def arrivals(self) -> int:
        """Prompts per prefill call: a sixteenth of the slots. Decoding stops when this many slots
        are free, so on average less than a sixteenth is idle. Rounded down to a multiple of
        `shards` if it is not less."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def with_slots(self, slots: int) -> Sizes:
        """A copy with this many slots, rounded up to a multiple of `shards`."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)

    def most_new(self, start: int) -> int:
        """Maximum number of new tokens after a prompt of `start` tokens."""
        return self.columns - start if self.beams == 1 else min(self.columns - start, self.room)

    def shortened(self, start: int) -> Sizes | None:
        """The next smaller sizes, for the most new tokens after a prompt of `start` tokens; None if
        they allow no new token.

        >>> sizes = Sizes(1, 64, beams=4, room=64).shortened(3)
        >>> sizes.columns, sizes.room, sizes.shortened(3).columns
        (64, 32, 32)
        """
        halves = [x // 2 if x > SMALLEST_BUCKET else 0 for x in (self.columns, self.room)]
        new = max(halves[0] - start, halves[1])
        if new < 1:
            return None
        columns = bucket(start + new, SMALLEST_BUCKET)
        room = 0 if self.beams == 1 else bucket(new, SMALLEST_BUCKET)
        return dataclasses.replace(self, columns=columns, room=room)


def size_of(
    tasks: Sequence[Task], slots: int, encoder_decoder: bool, shards: int, beams: int
) -> Sizes:
    """The smallest sizes that hold all of the tasks."""
    sizes = Sizes(
        slots=0,
        columns=max(task.columns(encoder_decoder) for task in tasks),
        source=max(task.width for task in tasks) if encoder_decoder else None,
        shards=shards,
        beams=beams,
        room=0 if beams == 1 else bucket(max(task.row.new for task in tasks), SMALLEST_BUCKET),
    )
    return sizes.with_slots(min(slots, bucket(len(tasks), 1)))
