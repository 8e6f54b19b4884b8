"""Admission of requests to slots: how their prompts are prefilled, and which prefixes are kept.

Prompts are prefilled in chunks, several prompts at once, and prompts that begin with a kept prefix,
such as a system prompt that requests share, from its last whole chunk on. Some models need whole
prompts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import Int

from jaxllm.batch.prompt_chunks import why_whole, with_chunks
from jaxllm.batch.row_groups import Task
from jaxllm.batch.slot_pool import COPY, WRITE_PREFIX, SlotPool
from jaxllm.batch.slots import Sizes
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.hardware import default_device
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.models.decoder import GenerativeModel
from jaxllm.nn.platform import decoding
from jaxllm.serve.programs import Programs

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
    """Columns of prompts that are prefilled between two decode calls (the columns of prompts that
    are prefilled side by side count once), and of a wide chunk. A power of two."""
    kept_prefixes: int = 0
    """Most prefixes that are kept."""
    whole: bool = False
    """Every prompt is prefilled as a whole."""

    def sizes(self, sizes: Sizes) -> Sizes:
        """The sizes with the widths of chunks."""
        if self.whole:
            return sizes
        return with_chunks(sizes, default_device().platform, self.chunk_size)

    @property
    def copied_prompts(self) -> int:
        """Most copies of prompts at a time: the kept prefixes, a prompt that comes again, and one
        that replaces one of these."""
        return self.kept_prefixes + 2 if self.kept_prefixes else 0


def prefill_options(
    model: GenerativeModel, chunk_size: int | None, kept_prefixes: int | None
) -> PrefillOptions:
    """The options for a model; None: the default.

    Raises:
        UnsupportedError: one is set, but the model's prompts are prefilled as a whole.
    """
    options = {"prefill_chunk_size": chunk_size, "kept_prefixes": kept_prefixes}
    if chunk_size is None:
        chunk_size = decoding.chunk_size(default_device().platform)
    size = bucket(chunk_size, SMALLEST_BUCKET)
    reason = why_whole(model)
    if reason is not None:
        for name, value in options.items():
            if value:
                raise UnsupportedError(f"{name} cannot be combined with {reason}; leave it out")
        return PrefillOptions(size, whole=True)
    kept = DEFAULT_KEPT_PREFIXES if kept_prefixes is None else kept_prefixes
    return PrefillOptions(size, kept)


def buckets(longest: float) -> list[int]:
    """The buckets of prompts of up to `longest` tokens.

    >>> buckets(100)
    [16, 32, 64, 128]
    """
    widths = [SMALLEST_BUCKET]
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    return widths


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first tokens of a prompt, and the keys and values of a prompt that begins with them."""

    tokens: Tokens
    cache: Cache


class PrefixStore:
    """The prefixes that recent prompts had in common.

    Args:
        limit: most prefixes that are kept; the one that was not used for the longest time is
            dropped for a new one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[Prefix] = []
        """The one that was used last comes last."""
        self._repeated: Prefix | None = None
        """The last prompt that comes again. It has a place of its own, so that prompts of which
        several samples are drawn do not drive out those that requests share."""
        self._recent_prompts: deque[Tokens] = deque(maxlen=RECENT_PROMPTS)

    def __len__(self) -> int:
        return len(self._kept)

    def longest(self, prompt: Tokens) -> tuple[Prefix | None, int]:
        """The prefix that shares most tokens with a prompt, and their number; the prompt's last
        token does not count, since the first new one is chosen from its logits."""
        prefixes = [*self._kept, *filter(None, [self._repeated])]
        lengths = [shared_length(prefix.tokens, prompt[:-1]) for prefix in prefixes]
        if not any(lengths):
            return None, 0
        longest = int(np.argmax(lengths))
        return prefixes[longest], lengths[longest]

    def length_to_keep(self, prompt: Tokens) -> int:
        """Length of a prompt's prefix that is worth keeping: one that it shares with a recent
        prompt, and that is longer than what is kept; else 0."""
        lengths = [shared_length(recent, prompt) for recent in self._recent_prompts]
        kept = [shared_length(prefix.tokens, prompt) for prefix in self._kept]
        length = max(lengths, default=0)
        return length if length - max(kept, default=0) >= MIN_PREFIX else 0

    def is_worth_repeating(self, prompt: Tokens) -> bool:
        """True if a prompt that comes again is kept for that: if the store lacks enough of it."""
        return bool(self._limit) and len(prompt) - self.longest(prompt)[1] >= MIN_PREFIX

    def note(self, prompt: Tokens) -> None:
        """Adds a recent prompt."""
        if self._limit:
            self._recent_prompts.append(prompt)

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


class Admission:
    """Tasks that wait for a slot, and the prefill of their prompts into a pool.

    Attributes:
        waiting: the tasks that wait, in their order. The first ones may be staged.
        counts: of kept prefixes.
    """

    def __init__(self, pool: SlotPool, options: PrefillOptions, programs: Programs) -> None:
        self._pool, self._options, self._programs = pool, options, programs
        self._prefixes = PrefixStore(options.kept_prefixes)
        self.waiting: deque[Task] = deque()
        self.counts = PrefixCounts()

    def add(self, tasks: Iterable[Task]) -> None:
        """Adds tasks to the queue."""
        self.waiting.extend(tasks)

    def remove(self, ends: Callable[[Task], bool]) -> None:
        """Removes tasks that wait, those for which `ends` is true."""
        self.waiting = deque(itertools.filterfalse(ends, self.waiting))
        self._pool.unstage(ends)

    def admit(self) -> bool:
        """Prefills prompts that wait while there are free slots: chunks of no more than
        `chunk_size` columns together, or whole prompts until they have as many.

        Returns:
            True if a task came into a slot.
        """
        left, free = self._options.chunk_size, len(self._pool.free)
        while self.waiting and self._pool.free and left > 0:
            left -= self._prefill_batch() if self._options.whole else self._prefill_chunk(left)
        return len(self._pool.free) < free

    def _prefill_chunk(self, most: int) -> int:
        """Stages the next prompts, and prefills the next chunk; returns its columns. Prefills
        nothing and returns `most` if the chunk has more than `most` columns."""
        rows = min(self._pool.sizes.prefill_rows, len(self._pool.free), len(self.waiting))
        for task in itertools.islice(self.waiting, len(self._pool.staged), rows):
            self._stage(task)
        if self._pool.next_columns > most:
            return most
        columns, complete = self._pool.prefill_chunk()
        for row, task in complete:
            self.waiting.remove(task)
            self._keep(row, task)
        return columns

    def _stage(self, task: Task) -> None:
        """Stages a task after the prefix of its prompt that is in the store."""
        prompt = task.row.input_ids
        prefix, shared = self._prefixes.longest(prompt)
        if not self._programs.has(WRITE_PREFIX):
            prefix = None
        length = self._pool.sizes.prefix_columns(shared, len(prompt))
        if prefix is not None and length:
            self._prefixes.use(prefix)
            self.counts.hits += 1
            self.counts.tokens += length
            self._pool.stage(task, prefix.cache, length)
        else:
            self._pool.stage(task)

    def _keep(self, row: int, task: Task) -> None:
        """Keeps what other tasks may begin with of a prompt that is prefilled.

        Args:
            row: the row that the prompt had.
        """
        prompt, prefixes = task.row.input_ids, self._prefixes
        # A request's later samples are no sign that others share its prompt.
        length = 0 if task.sample else prefixes.length_to_keep(prompt)
        comes_again = task.sample < task.row.samples - 1
        repeats = comes_again and prefixes.is_worth_repeating(prompt)
        if (length or repeats) and self._programs.has(COPY):
            cache = self._pool.copy_prompt(row)
            if length:
                prefixes.keep(Prefix(prompt[:length], cache))
            if repeats:
                prefixes.keep_repeated(Prefix(prompt, cache))
        if task.sample == 0:
            prefixes.note(prompt)

    def _prefill_batch(self) -> int:
        """Prefills the first task's prompt and others of its bucket into slots."""
        tasks = self._next_tasks(min(self._pool.sizes.prefill_rows, len(self._pool.free)))
        width = self._programs.first(self._pool.prefill_name, tasks[0].width)
        padded = [dataclasses.replace(task, least_width=width) for task in tasks]
        rows = self._pool.prepare(padded)
        for task in tasks:  # only now: tasks that are nowhere would get no error after a failure
            self.waiting.remove(task)
        self._pool.prefill(padded, rows)
        return padded[0].width

    def _next_tasks(self, count: int) -> list[Task]:
        """The first task that waits, and the next ones that are prefilled with it."""
        first, *others = itertools.islice(self.waiting, LOOKAHEAD if count > 1 else 1)
        fitting = (task for task in others if task.width == first.width)
        return [first, *itertools.islice(fitting, count - 1)]
