"""Admission of requests to slots: how their prompts are prefilled, and which prefixes are kept.

Short prompts are prefilled as a whole, long ones in chunks, and prompts that begin with a kept
prefix, such as a system prompt that requests share, from its end on.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jaxllm.batch.row_groups import Task
from jaxllm.batch.slot_pool import SlotPool
from jaxllm.batch.slots import empty_arrays, prompt_cache_shapes
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.hardware import default_device, nbytes
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.models.decoder import GenerativeModel

DEFAULT_CHUNK_SIZE = {"cpu": 256}
DEFAULT_ACCELERATOR_CHUNK_SIZE = 512
DEFAULT_KEPT_PREFIXES = 4
MIN_PREFIX = 64
"""Tokens of the shortest prefix that is kept, and by which it is longer than another one."""
RECENT_PROMPTS = 64
"""Prompts among which a prefix that recurs is looked for."""
LOOKAHEAD = 64
"""Tasks of the queue among which those of one batch are looked for."""

Tokens = Int[np.ndarray, " _"]


@dataclasses.dataclass(frozen=True)
class PrefillOptions:
    """How prompts are prefilled."""

    chunk_size: int
    """Columns that are prefilled between two decode calls: of a chunk of a long prompt, or of short
    prompts (those of one batch count once). A power of two."""
    kept_prefixes: int = 0
    """Most prefixes that are kept."""
    cache_shapes: Cache | None = None
    """Shapes of a prompt cache; None: every prompt is prefilled as a whole."""

    @property
    def longest_whole(self) -> float:
        """Columns of the longest prompt that is prefilled as a whole."""
        return math.inf if self.cache_shapes is None else self.chunk_size

    @property
    def nbytes(self) -> int:
        """Bytes per device of all prompt caches: those that are kept, that of a prompt that comes
        again, an empty one, the last one of a prompt and its next one."""
        if self.cache_shapes is None:
            return 0
        return (self.kept_prefixes + bool(self.kept_prefixes) + 3) * nbytes(self.cache_shapes)


def prefill_options(
    model: GenerativeModel,
    columns: int,
    chunk_size: int | None,
    kept_prefixes: int | None,
    mesh: Mesh | None,
) -> PrefillOptions:
    """The options for slots of some columns; None: the default.

    Raises:
        UnsupportedError: one is set, but the model's prompts are prefilled as a whole.
    """
    options = {"prefill_chunk_size": chunk_size, "kept_prefixes": kept_prefixes}
    if chunk_size is None:
        chunk_size = DEFAULT_CHUNK_SIZE.get(
            default_device().platform, DEFAULT_ACCELERATOR_CHUNK_SIZE
        )
    size = bucket(chunk_size, SMALLEST_BUCKET)
    reason = _why_whole(model)
    if reason is not None:
        for name, value in options.items():
            if value:
                raise UnsupportedError(f"{name} cannot be combined with {reason}; leave it out")
        return PrefillOptions(size)
    kept = DEFAULT_KEPT_PREFIXES if kept_prefixes is None else kept_prefixes
    if not kept and columns <= size:
        return PrefillOptions(size)
    return PrefillOptions(size, kept, prompt_cache_shapes(model, columns, mesh))


def buckets(longest: float) -> list[int]:
    """The buckets of prompts of up to `longest` tokens.

    >>> buckets(100)
    [16, 32, 64, 128]
    """
    widths = [SMALLEST_BUCKET]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return widths


def _why_whole(model: GenerativeModel) -> str | None:
    """Why the model's prompts are prefilled as a whole; None: they need not be."""
    if model.is_encoder_decoder:
        return "an encoder-decoder, whose prompt is the encoder's"
    rope = getattr(model.config, "rotary", None)
    if rope is not None and rope.uses_length:
        return "RoPE that depends on the length of the prompt"
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of a prompt, and a prompt cache that begins with them."""

    tokens: Tokens
    cache: Cache


class PrefixStore:
    """The prefixes that recent prompts had in common.

    Args:
        limit: most prefixes that are kept; the one that was not used for the longest time is
            dropped for a new one.
        empty: a prompt cache without tokens.
    """

    def __init__(self, limit: int, empty: Cache) -> None:
        self._limit = limit
        self.empty = Prefix(np.zeros(0, np.int32), empty)
        self._kept: list[Prefix] = []
        """The one that was used last comes last."""
        self._repeated: Prefix | None = None
        """The last prompt that comes again. It has a place of its own, so that prompts of which
        several samples are drawn do not drive out those that requests share."""
        self._recent_prompts: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, prompt: Tokens) -> tuple[Prefix, int]:
        """The prefix that shares most tokens with a prompt, and their number; the prompt's last
        token does not count, since the first new one is chosen from its logits."""
        prefixes = [*self._kept, self._repeated or self.empty]
        lengths = [shared_length(prefix.tokens, prompt[:-1]) for prefix in prefixes]
        if not any(lengths):
            return self.empty, 0
        longest = int(np.argmax(lengths))
        return prefixes[longest], lengths[longest]

    def length_to_keep(self, prompt: Tokens) -> int:
        """Length of a prompt's prefix that is worth keeping: one that it shares with a recent
        prompt, and that is longer than what is kept; else 0."""
        lengths = [shared_length(recent, prompt) for recent in self._recent_prompts]
        kept = [shared_length(prefix.tokens, prompt) for prefix in self._kept]
        length = max(lengths, default=0)
        return length if length - max(kept, default=0) >= MIN_PREFIX else 0

    def is_worth_repeating(self, length: int) -> bool:
        """True if a prompt that comes again is kept for that.

        Args:
            length: tokens of it that the store does not have.
        """
        return bool(self._limit) and length >= MIN_PREFIX

    def note(self, prompt: Tokens) -> None:
        """Adds a recent prompt."""
        if self._limit:
            self._recent_prompts.append(prompt)

    def clear(self) -> None:
        """Forgets all prefixes and recent prompts."""
        self._kept.clear()
        self._repeated = None
        self._recent_prompts.clear()

    def use(self, prefix: Prefix) -> None:
        """Notes that a prefix is used."""
        if prefix in self._kept:
            self._kept.remove(prefix)
            self._kept.append(prefix)

    def keep(self, prefix: Prefix) -> None:
        """Keeps a prefix."""
        self._kept = [*self._kept, prefix][-self._limit :]

    def keep_repeated(self, prompt: Prefix) -> None:
        """Keeps a prompt that comes again."""
        self._repeated = prompt


def shared_length(a: Tokens, b: Tokens) -> int:
    """Number of tokens with which two sequences begin alike.

    >>> shared_length(np.array([5, 6, 7]), np.array([5, 6, 8, 9]))
    2
    """
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    return int(np.argmax(differs)) if differs.any() else size


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

    task: Task
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

    def __init__(self, pool: SlotPool, options: PrefillOptions) -> None:
        self._pool = pool
        self._chunk_size = options.chunk_size
        self._partial: PartialPrompt | None = None
        """The first task that waits, once a part of its prompt is prefilled."""
        self._prefixes: PrefixStore | None = None
        if options.cache_shapes is not None:
            empty = empty_arrays(options.cache_shapes)
            self._prefixes = PrefixStore(options.kept_prefixes, empty)
        self.waiting: deque[Task] = deque()
        self.counts = PrefixCounts()

    def add(self, tasks: Iterable[Task]) -> None:
        """Adds tasks to the queue."""
        self.waiting.extend(tasks)

    def remove(self, ends: Callable[[Task], bool]) -> None:
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

    def run_programs(self, tasks: Sequence[Task]) -> Iterator[None]:
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
        if self._pool.sizes.columns > self._chunk_size:
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

    def _begin(self, task: Task) -> PartialPrompt | None:
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

    def _plan(self, task: Task, prefixes: PrefixStore) -> tuple[Prefix, PartialPrompt | None]:
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
        start = min(partial.length, self._pool.sizes.columns - width)
        cache = self._pool.prefill_rest(task, partial.cache, start, width)
        self.waiting.popleft()
        self._partial = None
        if partial.kept_length and self._prefixes is not None:
            self._prefixes.keep(Prefix(prompt[: partial.kept_length], cache))
        if partial.repeats and self._prefixes is not None:
            self._prefixes.keep_repeated(Prefix(prompt, cache))
        return width

    def _prefill_batch(self) -> int:
        """Prefills the first task's prompt and others of its bucket into slots."""
        tasks = self._next_tasks(min(self._pool.sizes.prefill_rows, len(self._pool.free)))
        self._pool.prefill(tasks, self._pool.prepare(tasks))
        self._note(tasks)
        return tasks[0].width

    def _note(self, tasks: Iterable[Task]) -> None:
        """Adds the prompts of requests to the recent ones."""
        if self._prefixes is not None:
            for task in tasks:
                if task.sample == 0:
                    self._prefixes.note(task.row.input_ids)

    def _next_tasks(self, count: int) -> list[Task]:
        """Removes the first task that waits, and the next ones that are prefilled with it."""
        first, *others = itertools.islice(self.waiting, LOOKAHEAD if count > 1 else 1)
        fitting = (task for task in others if task.width == first.width and self._is_whole(task))
        tasks = [first, *itertools.islice(fitting, count - 1)]
        for task in tasks:
            self.waiting.remove(task)
        return tasks

    def _is_whole(self, task: Task) -> bool:
        """True if the task's prompt is prefilled as a whole."""
        return self._prefixes is None or self._plan(task, self._prefixes)[1] is None
