"""Sizes of the arrays of a pool of slots."""

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
    """Columns of a sequence, its prompt included."""
    encoder_columns: int | None = None
    """Columns of the encoder's input, of an encoder-decoder."""
    shards: int = 1
    """Number of shards of the slot axis on a mesh; divides `slots`."""
    beams: int = 1
    """Sequences that a slot decodes."""
    new_token_bucket: int = 0
    """Most new tokens, rounded up, where there are several beams; else 0."""

    @property
    def capacity(self) -> int:
        """KV-cache positions of a slot: the prompt once, new tokens once for each beam.

        >>> Sizes(16, 64).capacity, Sizes(16, 64, beams=4, new_token_bucket=32).capacity
        (64, 160)
        """
        return self.columns + (self.beams - 1) * self.new_token_bucket

    @property
    def prefill_rows(self) -> int:
        """Prompts of one prefill: a sixteenth of the slots. Decoding stops when as many slots are
        free, so that less than a sixteenth of them wait on average. A multiple of `shards` where
        there are enough."""
        count = max(1, self.slots // 16)
        return count - count % self.shards or count

    def with_slots(self, slots: int) -> Sizes:
        """The same with another number of slots, rounded up to a multiple of `shards`."""
        return dataclasses.replace(self, slots=-(-slots // self.shards) * self.shards)

    def max_new_tokens(self, prompt_length: int) -> int:
        """Most new tokens after a prompt."""
        columns = self.columns - prompt_length
        return columns if self.beams == 1 else min(columns, self.new_token_bucket)

    def with_half_the_new_tokens(self, prompt_length: int) -> Sizes | None:
        """The next smaller slots, of about half as many new tokens after a prompt; None if there
        are none.

        >>> sizes = Sizes(1, 64, beams=4, new_token_bucket=64).with_half_the_new_tokens(3)
        >>> sizes.columns, sizes.new_token_bucket, sizes.with_half_the_new_tokens(3).columns
        (64, 32, 32)
        """
        half_columns, half_new_tokens = (
            size // 2 if size > SMALLEST_BUCKET else 0
            for size in (self.columns, self.new_token_bucket)
        )
        max_new_tokens = max(half_columns - prompt_length, half_new_tokens)
        if max_new_tokens < 1:
            return None
        columns = bucket(prompt_length + max_new_tokens, SMALLEST_BUCKET)
        new_token_bucket = 0 if self.beams == 1 else bucket(max_new_tokens, SMALLEST_BUCKET)
        return dataclasses.replace(self, columns=columns, new_token_bucket=new_token_bucket)


def sizes_for(
    tasks: Sequence[Task], slots: int, encoder_decoder: bool, shards: int, beams: int
) -> Sizes:
    """Sizes that hold all of the tasks."""
    longest = max(task.row.max_new_tokens for task in tasks)
    sizes = Sizes(
        slots=0,
        columns=max(task.columns(encoder_decoder) for task in tasks),
        encoder_columns=max(task.width for task in tasks) if encoder_decoder else None,
        shards=shards,
        beams=beams,
        new_token_bucket=0 if beams == 1 else bucket(longest, SMALLEST_BUCKET),
    )
    return sizes.with_slots(min(slots, bucket(len(tasks), 1)))
