"""Admission of requests to slots: short prompts as a whole, long ones in chunks, and those that
begin with a kept prefix from its end on."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxllm.batch.programs import empty_arrays
from jaxllm.batch.row_groups import padded_prompts, prefill_batch
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.slots import Sizes
from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.serve.live_rows import LiveGroup, LiveTask
from jaxllm.serve.prefill_options import PrefillOptions
from jaxllm.serve.prefixes import Prefix, PrefixStore

LOOKAHEAD = 64
"""Tasks of the queue among which those of one batch are looked for."""


@dataclasses.dataclass
class PrefixCounts:
    """Counters of kept prefixes."""

    hits: int = 0
    """Prompts that began with one."""
    tokens: int = 0
    """Tokens of these prompts that were not computed again."""


@dataclasses.dataclass(frozen=True, eq=False)
class PartialPrompt:
    """A task with the first `length` tokens of its prompt in a prompt cache."""

    task: LiveTask
    cache: Cache
    length: int
    kept_length: int = 0
    """Length of the prefix that will be kept of it; 0: none."""
    repeats: bool = False
    """The whole prompt will be kept, since it comes again."""


class Admission:
    """Tasks that wait for a slot, and the prefill of their prompts into a pool.

    Attributes:
        waiting: the tasks that wait, in their order.
        counts: of kept prefixes.
    """

    def __init__(
        self, pool: SlotPool, group: LiveGroup, sizes: Sizes, vocab: int, options: PrefillOptions
    ) -> None:
        self._pool, self._group, self._sizes, self._vocab = pool, group, sizes, vocab
        self._chunk_size = options.chunk_size
        self._partial: PartialPrompt | None = None
        """The first task that waits, once a part of its prompt is prefilled."""
        self._prefixes: PrefixStore | None = None
        if options.cache_shapes is not None:
            empty = empty_arrays(options.cache_shapes)
            self._prefixes = PrefixStore(options.kept_prefixes, empty)
        self.waiting: deque[LiveTask] = deque()
        self.counts = PrefixCounts()

    def add(self, tasks: Iterable[LiveTask]) -> None:
        """Adds tasks to the queue."""
        self.waiting.extend(tasks)

    def remove(self, ends: Callable[[LiveTask], bool]) -> None:
        """Removes tasks that wait, those for which `ends` is true."""
        self.waiting = deque(itertools.filterfalse(ends, self.waiting))
        if self._partial is not None and ends(self._partial.task):
            self._partial = None

    def admit(self) -> bool:
        """Prefills prompts that wait, up to `chunk_size` columns, while there are free slots.

        Returns:
            True if a task came into a slot.
        """
        columns, free = 0, len(self._pool.free)
        while self.waiting and self._pool.free and columns < self._chunk_size:
            columns += self._prefill_next()
        return len(self._pool.free) < free

    def run_programs(self, tasks: Sequence[LiveTask]) -> Iterator[None]:
        """Runs each program of prefill once. The caller frees the slots after each.

        Args:
            tasks: one for each bucket of prompts that are prefilled as a whole.
        """
        for task in tasks:
            self.waiting.append(task)
            self._prefill_batch()
            yield
        if self._prefixes is None:
            return
        self._prefixes.clear()
        empty = self._prefixes.empty.cache
        for task in tasks:
            self.waiting.append(task)
            self._prefill_rest(PartialPrompt(task, empty, 0))
            yield
        if self._sizes.columns > self._chunk_size:
            prompt = tasks[-1].row.input_ids
            self._pool.extend_prompt(empty, prompt[:1].repeat(self._chunk_size), 0)

    def _prefill_next(self) -> int:
        """Prefills the next prompts, or a chunk of one; returns the columns of that."""
        partial = self._partial or self._begin(self.waiting[0])
        if partial is None:
            return self._prefill_batch()
        prompt, start = partial.task.row.input_ids, partial.length
        end = start + self._chunk_size
        if end >= len(prompt):
            return self._prefill_rest(partial)
        cache = self._pool.extend_prompt(partial.cache, prompt[start:end], start)
        self._partial = dataclasses.replace(partial, cache=cache, length=end)
        return self._chunk_size

    def _begin(self, task: LiveTask) -> PartialPrompt | None:
        """The prefix of the first task's prompt that is in the store; None: the prompt is prefilled
        as a whole."""
        if self._prefixes is None:
            return None
        prefix, partial = self._plan(task, self._prefixes)
        if partial is not None:
            self._note([task])
        if partial is not None and partial.length:
            self._prefixes.use(prefix)
            self.counts.hits += 1
            self.counts.tokens += partial.length
        return partial

    def _plan(self, task: LiveTask, prefixes: PrefixStore) -> tuple[Prefix, PartialPrompt | None]:
        prompt = task.row.input_ids
        prefix, length = prefixes.longest(prompt)
        # A request's later samples are no sign that others share its prompt.
        kept_length = 0 if task.sample else prefixes.length_to_keep(prompt)
        comes_again = task.sample < task.row.samples - 1
        repeats = comes_again and prefixes.is_worth_repeating(len(prompt) - length)
        if self._columns(len(prompt) - length) == self._columns(len(prompt)):
            prefix, length = prefixes.empty, 0
        if not (length or kept_length or repeats) and len(prompt) <= self._chunk_size:
            return prefix, None
        return prefix, PartialPrompt(task, prefix.cache, length, kept_length, repeats)

    def _columns(self, length: int) -> int:
        """Columns of the calls that prefill so many tokens."""
        in_chunks = (length - 1) // self._chunk_size * self._chunk_size
        return in_chunks + bucket(length - in_chunks, SMALLEST_BUCKET)

    def _prefill_rest(self, partial: PartialPrompt) -> int:
        """Prefills the rest of the first task's prompt into a slot."""
        task, prompt = partial.task, partial.task.row.input_ids
        width = bucket(len(prompt) - partial.length, SMALLEST_BUCKET)
        # The padded rest must end before the last column, if need be with tokens that are cached.
        start = min(partial.length, self._sizes.columns - width)
        arrays = padded_prompts([task], self._group, self._sizes, self._vocab, self._sizes.columns)
        cache = self._pool.prefill_rest(task, arrays, partial.cache, start, width)
        self.waiting.popleft()
        self._partial = None
        if partial.kept_length and self._prefixes is not None:
            self._prefixes.keep(Prefix(prompt[: partial.kept_length], cache))
        if partial.repeats and self._prefixes is not None:
            self._prefixes.repeat(Prefix(prompt, cache))
        return width

    def _prefill_batch(self) -> int:
        """Prefills the first task's prompt and others of its bucket into slots."""
        tasks = self._next_tasks(min(self._sizes.prefill_rows, len(self._pool.free)))
        arrays = prefill_batch(tasks, self._group, self._sizes, self._vocab)
        self._pool.prefill(tasks, arrays)
        self._note(tasks)
        return tasks[0].width

    def _note(self, tasks: Iterable[LiveTask]) -> None:
        """Adds the prompts of requests to the recent ones."""
        if self._prefixes is not None:
            for task in tasks:
                if task.sample == 0:
                    self._prefixes.note(task.row.input_ids)

    def _next_tasks(self, count: int) -> list[LiveTask]:
        """Removes the first task that waits, and the next ones that are prefilled with it."""
        first, *others = itertools.islice(self.waiting, LOOKAHEAD if count > 1 else 1)
        fitting = (task for task in others if task.width == first.width and self._is_whole(task))
        tasks = [first, *itertools.islice(fitting, count - 1)]
        for task in tasks:
            self.waiting.remove(task)
        return tasks

    def _is_whole(self, task: LiveTask) -> bool:
        """True if the task's prompt is prefilled as a whole."""
        return self._prefixes is None or self._plan(task, self._prefixes)[1] is None
