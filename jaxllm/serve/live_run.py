"""Requests in slots: admits, decodes a few steps, reports the new tokens, and so on.

All of it runs in one thread, which owns the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.row_groups import Group, Task
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.slots import DecodeProgress, Sizes, place
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.processors.base import RowProcessors
from jaxllm.generation.processors.host import WORD_BITS
from jaxllm.generation.strategies.strategy import (
    FINISH_REASONS,
    NONFINITE,
    RUNNING,
    STOP,
    Logprobs,
    Result,
    nonfinite_error,
)
from jaxllm.models.decoder import Decoder
from jaxllm.serve.admission import Admission, PrefillOptions, PrefixCounts
from jaxllm.serve.live_tasks import (
    ALL_TOKENS,
    TokenMaskLogitsProcessor,
    allowed_tokens,
)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of a token, and of the most probable tokens in its place.

    They are those of the model's own distribution: before temperature, penalties and filters.
    """

    logprob: float
    top: tuple[tuple[int, float], ...]
    """Pairs (token, log-probability), the most probable first."""


@dataclasses.dataclass(frozen=True)
class Chunk:
    """New tokens of one sample of a request."""

    sample: int
    """Number of the sample, from 0."""
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    """One for each token, if the request asks for them."""
    finish_reason: str | None = None
    """In the last chunk of a sample: "eos", "length" or "stop" (a stop string)."""
    error: JaxLLMError | None = None
    """Why the sample ends here, without its result."""

    @property
    def is_last(self) -> bool:
        """True if the sample has no more chunks."""
        return self.finish_reason is not None or self.error is not None


class LiveRun:
    """Tasks of live requests in one pool of slots.

    Args:
        model: the model, with RoPE lengths per row.
        plain: any task; free slots have its settings.
        prefill: how prompts come into slots.
        few: slots that are decoded alone while the others are free; None: all always are.
    """

    def __init__(
        self,
        model: Decoder,
        group: Group,
        sizes: Sizes,
        plain: Task,
        counts: BatchCounts,
        mesh: Mesh | None,
        prefill: PrefillOptions,
        few: int | None,
    ) -> None:
        self._mesh, self._vocab = mesh, group.vocab_size
        self._steps_per_call = group.window
        self._pool = SlotPool(model, group, sizes, plain, counts, mesh, few)
        self._admission = Admission(self._pool, prefill)
        self._prefill_is_next = True

    @property
    def slots(self) -> int:
        """Number of slots."""
        return self._pool.sizes.slots

    @property
    def waiting(self) -> int:
        """Number of tasks that wait for a slot."""
        return len(self._admission.waiting)

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counters of kept prefixes."""
        return self._admission.counts

    @property
    def running(self) -> list[Task]:
        """The tasks in slots."""
        return [task for task in self._pool.tasks if task is not None]

    @property
    def busy(self) -> bool:
        """True if a task waits or runs."""
        return bool(self._admission.waiting) or self._pool.busy

    def add(self, tasks: Iterable[Task]) -> None:
        """Adds tasks, which run in this order."""
        self._admission.add(tasks)

    def run_programs(self, tasks: Sequence[Task]) -> None:
        """Runs each program once, so that it is compiled.

        Args:
            tasks: one for each bucket of prompts that are prefilled as a whole, with one new token.
        """
        for _ in self._admission.run_programs(tasks):
            self._decode(self._steps_per_call)
        self._pool.run_decode_programs()

    def take_all(self) -> list[Task]:
        """Ends all tasks and returns them, after a failure."""
        tasks = [*self.running, *self._admission.waiting]
        self._admission.waiting.clear()
        return tasks

    def cancel(self, samples: Iterable[tuple[Any, int]]) -> None:
        """Ends samples that have not ended; their slots are free at once.

        Args:
            samples: requests, each with the number of one of its samples.
        """
        cancelled = {(id(request), sample) for request, sample in samples}
        if not cancelled:
            return

        def ends(task: Task | None) -> bool:
            return task is not None and (id(task.request), task.sample) in cancelled

        self._admission.remove(ends)
        self._release([slot for slot, task in enumerate(self._pool.tasks) if ends(task)])

    def step(self) -> list[tuple[Task, Chunk]]:
        """Prefills prompts that wait, or decodes, in turn: the new tokens of all tasks."""
        if self._prefill_is_next or not self._pool.busy:
            self._prefill_is_next = False
            # First tokens are reported at once; a grammar's next mask follows from them.
            if self._admission.admit():
                return self._decode(0)
        self._prefill_is_next = True
        failed = self._write_masks()
        has_grammars = any(task.grammar for task in self.running)
        return [*failed, *self._decode(1 if has_grammars else self._steps_per_call)]

    def _decode(self, steps: int) -> list[tuple[Task, Chunk]]:
        """Decodes; stops early if a slot is free for a task that waits."""
        pool, waiting = self._pool, self._admission.waiting
        free_slots = len(pool.free) + 1 if waiting else pool.sizes.slots
        return self._collect(jax.device_get(pool.decode(free_slots, steps)))

    def _write_masks(self) -> list[tuple[Task, Chunk]]:
        """Writes the masks of all rows into the slots if one changes, and ends those whose grammar
        fails, such as one that is too complex."""
        if not any(
            task.grammar is not None or (task.forced_token is not None and len(task.tokens) <= 1)
            for task in self.running
        ):
            return []
        every_token = np.full(-(-self._vocab // WORD_BITS), ALL_TOKENS)
        masks = [every_token] * self._pool.slots.count
        failed: dict[int, tuple[Task, Chunk]] = {}
        for slot, task in enumerate(self._pool.tasks):
            if task is None:
                continue
            try:
                masks[slot] = allowed_tokens(task, self._vocab)
            except JaxLLMError as error:
                failed[slot] = task, Chunk(task.sample, (), error=error)
        self._release([*failed])
        self._replace_masks(np.stack(masks))
        return [*failed.values()]

    def _replace_masks(self, masks: UInt32[np.ndarray, "B W"]) -> None:
        def replaced(processor: Any) -> Any:
            if not isinstance(processor, TokenMaskLogitsProcessor):
                return processor
            return jax.tree.map(lambda old: self._placed_as(masks, old), processor)

        slots = self._pool.slots
        processors = RowProcessors(map(replaced, slots.settings.processors))
        settings = dataclasses.replace(slots.settings, processors=processors)
        self._pool.slots = dataclasses.replace(slots, settings=settings)

    def _release(self, slots: list[int]) -> None:
        """Frees slots whose rows are not finished."""
        if not slots:
            return
        arrays = self._pool.slots
        reason = np.array(arrays.state.reason)
        reason[slots] = STOP
        for slot in slots:
            self._pool.tasks[slot] = None
        state = arrays.state.replace(reason=self._placed_as(reason, arrays.state.reason))
        self._pool.slots = dataclasses.replace(arrays, state=state)

    def _placed_as(self, new: np.ndarray, old: jax.Array) -> jax.Array:
        """A host array on the devices of the array that it replaces."""
        return place(new, None if self._mesh is None else old.sharding)

    def _collect(self, progress: DecodeProgress) -> list[tuple[Task, Chunk]]:
        results, stopped = [], []
        tasks = list(self._pool.tasks)
        finished = {slot for slot, _ in self._pool.take_finished(progress)}
        for slot, task in enumerate(tasks):
            if task is None:
                continue
            chunk = _chunk(task, progress.result, slot)
            task.tokens.extend(chunk.tokens)
            if chunk.is_last and slot not in finished:
                stopped.append(slot)
            if chunk.tokens or chunk.is_last:
                results.append((task, chunk))
        self._release(stopped)
        return results


def _chunk(task: Task, result: Result, slot: int) -> Chunk:
    """The new tokens of a slot since the last report."""
    total, code = int(result.lengths[slot]), int(result.finish_reasons[slot])
    if code == NONFINITE:
        return Chunk(task.sample, (), error=nonfinite_error(total))
    count = total - len(task.tokens)
    columns = range(result.sequences.shape[1] - count, result.sequences.shape[1])
    tokens = [int(result.sequences[slot, column]) for column in columns]
    reason = None if code == RUNNING else FINISH_REASONS[code]
    end = None if task.stops is None else task.stops.first_end(tokens)
    if end is not None and (end < len(tokens) or reason != "eos"):
        tokens, reason = tokens[:end], "stop"
    logprobs = None
    if task.logprobs:
        assert result.logprobs is not None
        kept = list(columns)[: len(tokens)]
        logprobs = tuple(_logprob(result.logprobs, slot, column) for column in kept)
    return Chunk(task.sample, tuple(tokens), logprobs, reason)


def _logprob(logprobs: Logprobs, slot: int, column: int) -> TokenLogprob:
    pairs = zip(
        logprobs.top_tokens[slot, column].tolist(),
        logprobs.top[slot, column].tolist(),
        strict=True,
    )
    return TokenLogprob(float(logprobs.chosen[slot, column]), tuple(pairs))
