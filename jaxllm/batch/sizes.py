"""The sizes of a pool's programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxllm.batch.queue import Task
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What the shapes of a pool's programs follow from."""

    slots: int
    columns: int
    """Columns of a text, its prompt included."""
    source: int | None = None
    """Columns of the encoder's part of a slot, of an encoder-decoder."""
    shards: int = 1
    """Parts of a mesh that the slots are split over; it divides them."""
    beams: int = 1
    """Sequences that a slot searches."""
    room: int = 0
    """Most new tokens, where there are several beams."""

    @property
    def capacity(self) -> int:
        """Columns of a slot: the prompt stands there once, new tokens once for each beam.

        >>> Sizes(16, 64).capacity, Sizes(16, 64, beams=4, room=32).capacity
        (64, 160)
        """
        return self.columns + (self.beams - 1) * self.room

    @property
    def arrivals(self) -> int:
        """Prompts that are read in one call: a sixteenth of the slots. Decoding stops when as many
        are free, so that less than a sixteenth of the slots wait on average. Where there are so
        many that each part of a mesh can read some, all parts read as many."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def with_slots(self, slots: int) -> Sizes:
        """With so many slots, or as many more as it takes to split them."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)

    def most_new(self, start: int) -> int:
        """Most new tokens after so many columns of a prompt."""
        return self.columns - start if self.beams == 1 else min(self.columns - start, self.room)

    def shortened(self, start: int) -> Sizes | None:
        """For fewer new tokens after such a prompt, the most with which a slot is smaller; None if
        there are none.

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
    """Sizes that hold all of some tasks."""
    sizes = Sizes(
        slots=0,
        columns=max(task.columns(encoder_decoder) for task in tasks),
        source=max(task.width for task in tasks) if encoder_decoder else None,
        shards=shards,
        beams=beams,
        room=0 if beams == 1 else bucket(max(task.row.new for task in tasks), SMALLEST_BUCKET),
    )
    return sizes.with_slots(min(slots, bucket(len(tasks), 1)))
