"""Requests of a server in slots: how they are read, and how their tokens are decoded and reported.

The programs of a batch depend on which fields its rows use. A server does not know the next
request, so all its requests share one group, which applies every field that may differ between
rows, at the neutral value where a row does not use it; a processor runs only while a row needs it.
So traffic compiles nothing.

`RequestReader` checks a request in the thread that submits it. `LiveRun` belongs to the thread that
owns the device: in turns it dispatches a prefill of prompts, or a window of a few decode steps. On
an accelerator it reports the new tokens of a window while the device runs the next one.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, UInt32

from jaxllm.batch.row_groups import Group, Task, TaskChunk, fits_slots, per_row_fields
from jaxllm.batch.rows import BatchRow, Chunk, RawRow, RowReader, TokenLogprob
from jaxllm.batch.slot_pool import WRITE_FIRST, BatchCounts, ProgramTable, SlotPool, Window
from jaxllm.batch.slots import Sizes, steps_per_check_for
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError, counted
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    signature,
    store,
)
from jaxllm.generation.processors.grammar import GrammarLogitsProcessor
from jaxllm.generation.processors.host import WORD_BITS, pack_bits, unpack_bits
from jaxllm.generation.stopping import StopStringMatcher
from jaxllm.generation.strategies.strategy import (
    FINISH_REASONS,
    NONFINITE,
    RUNNING,
    Logprobs,
    Result,
    nonfinite_error,
)
from jaxllm.models.decoder import Decoder
from jaxllm.nn.platform.decoding import dispatches_ahead
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.serve.admission import Admission, PrefillOptions, PrefixCounts
from jaxllm.serve.programs import Programs
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_TOP_LOGPROBS = 20
MAX_EOS_TOKENS = 8
ALL_TOKENS = np.uint32(0xFFFFFFFF)


@logits_processor(rows=True)
class TokenMaskLogitsProcessor(LogitsProcessor):
    """Forbids all tokens but those of a mask, which the host writes before each step."""

    bits: UInt32[Array, "R W"]
    """The allowed tokens, as `pack_bits` packs them."""

    def __init__(self, bits: UInt32[np.ndarray, "R W"]) -> None:
        store(self, bits=bits)

    def is_neutral(self) -> Bool[Array, " R"]:
        return jnp.all(self.bits == ALL_TOKENS, axis=1)

    def process(self, history: History, scores: Scores) -> Scores:
        return jnp.where(unpack_bits(self.bits, scores.shape[1]), scores, -jnp.inf)


def token_mask(task: Task, vocab_size: int) -> UInt32[np.ndarray, " W"]:
    """The tokens that are allowed next, as `pack_bits` packs them."""
    tokens = task.tokens
    if task.forced_token is not None:
        if not tokens:
            return pack_bits(np.arange(vocab_size)[None] == task.forced_token)[0]
        tokens = tokens[1:]
    if task.grammar is None:
        return np.full(-(-vocab_size // WORD_BITS), ALL_TOKENS)
    return task.grammar.allowed_bits(tokens, vocab_size)


def live_group(steps_per_call: int, vocab_size: int) -> Group:
    """The group of requests whose slots are read after every `steps_per_call` steps."""
    return Group(
        number=0,
        rows=(),
        vocab_size=vocab_size,
        sampling=True,
        shared_fields=tuple(sorted(per_row_fields())),
        eos_width=MAX_EOS_TOKENS,
        window=steps_per_call,
        top_logprobs=min(MAX_TOP_LOGPROBS, vocab_size),
    )


class RequestReader:
    """Reads requests: rows of `BatchGenerator` that can run in the group of live requests.

    Args:
        reader: reads the rows.
        tokenizer: the model's, for stop strings.
        sizes: of the slots; their number does not matter.
    """

    def __init__(
        self, reader: RowReader, tokenizer: Tokenizer | None, group: Group, sizes: Sizes
    ) -> None:
        self._reader, self._tokenizer, self._group, self._sizes = reader, tokenizer, group, sizes
        plain = self._reader.read(RawRow(0, 0, {"input_ids": [0], "max_new_tokens": 1}))
        self._check_fields(plain, None)
        self.eos = plain.eos
        """End tokens of requests that do not set their own."""
        self._signature = signature(group.processors(*self._tasks(plain)))

    def read(
        self,
        index: int,
        raw: Any,
        *,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> list[Task]:
        """Reads and checks a request: a task for each of its samples.

        Raises:
            JaxLLMError: it is wrong, or needs what slots do not have.
        """
        row = self._reader.read(RawRow(index, index, raw))
        if row.is_blank:
            raise InputError("prompt: has no text; there is nothing to translate")
        self._check_fields(row, raw)
        self._check_lengths(row)
        if grammar is None and row.constraint is not None:
            grammar = row.constraint.grammar
        tasks = self._tasks(row, logprobs, grammar)
        if signature(self._group.processors(tasks[0])) != self._signature:
            raise self._unsupported(row, raw)
        return tasks

    def _tasks(
        self, row: BatchRow, logprobs: bool = False, grammar: GrammarLogitsProcessor | None = None
    ) -> list[Task]:
        """The tasks of a row, whose samples share the mask of their first token."""
        config, prompt = row.config, row.decoder_prompt.tolist()
        forced = config.forced_bos_token_id if config.begin_suppress_tokens is None else None
        names = ["stop_strings"] if forced is None else ["stop_strings", "forced_bos_token_id"]
        row = dataclasses.replace(row, config=config.without(names), constraint=None)
        plain = Task(
            row,
            0,
            logprobs=logprobs,
            grammar=grammar,
            forced_token=forced if len(prompt) == 1 else None,
        )
        mask = TokenMaskLogitsProcessor(token_mask(plain, self._group.vocab_size)[None])

        def task(sample: int) -> Task:
            stops = None
            if self._tokenizer is not None and config.stop_strings:
                stops = StopStringMatcher(self._tokenizer, config.stop_strings, prompt)
            return dataclasses.replace(
                plain, sample=sample, processors=(mask,), stops=stops, tokens=[]
            )

        return [task(sample) for sample in range(row.samples)]

    def _check_fields(self, row: BatchRow, raw: Any) -> None:
        if row.config.num_beams > 1 or not fits_slots(row):
            raise self._unsupported(row, raw)
        if row.config.remove_invalid_values:
            raise UnsupportedError("remove_invalid_values: not in a server; use jaxllm.generate")
        if len(row.eos) > MAX_EOS_TOKENS:
            raise UnsupportedError(
                f"eos_token_id: {len(row.eos)} tokens, but a server takes {MAX_EOS_TOKENS}"
            )

    def _unsupported(self, row: BatchRow, raw: Any) -> UnsupportedError:
        fields = raw if isinstance(raw, Mapping) else row.config.to_dict()
        names = (fields.keys() & row.config.fields.keys()) - set(self._group.shared_fields)
        return UnsupportedError(
            f"a server runs greedy search and sampling only, but these settings need another "
            f"program ({', '.join(sorted(names)) or row.mode}); use jaxllm.BatchGenerator"
        )

    def _check_lengths(self, row: BatchRow) -> None:
        prompt, limit = len(row.input_ids), self._sizes.columns
        words = f"the prompt has {counted(prompt)}"
        encoder_columns = self._sizes.encoder_columns
        if encoder_columns is not None:
            if prompt > encoder_columns:
                raise InputError(
                    f"prompt: has {prompt} tokens, but the server takes {encoder_columns}"
                )
            prompt, words = 1, "the answer has its start token"
        if row.max_length > limit:
            raise InputError(
                f"max_new_tokens: {words} and {row.max_new_tokens} new tokens are asked for, but "
                f"a slot holds {limit}; ask for at most {max(limit - prompt, 0)}"
                f"{'' if encoder_columns else ', or shorten the prompt'}"
            )


class LiveRun:
    """Tasks of live requests in one pool of slots.

    Args:
        model: the model, with RoPE lengths per row.
        plain: any task; free slots have its settings.
        prefill: how prompts come into slots.
        few: slots that are decoded alone while the others are free; None: all always are.
        programs: those that are compiled, or will be.
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
        programs: Programs,
    ) -> None:
        self._vocab, self._steps_per_call = group.vocab_size, group.window
        self._pool = SlotPool(model, group, sizes, plain, counts, mesh, few)
        self._few, self._programs = few, programs
        self._keeps_prefixes = prefill.kept_prefixes > 0
        self._admission = Admission(self._pool, prefill, programs)
        self._prefill_is_next = True
        platform, half = platform_of_arrays(model), -(-self._steps_per_call // 2)
        self._dispatches_ahead = dispatches_ahead(platform)
        # Half the steps come between two chunks of prompts, if the same program runs them.
        checks = {steps_per_check_for(steps, platform) for steps in (half, self._steps_per_call)}
        self._steps_while_waiting = half if len(checks) == 1 else self._steps_per_call
        self._windows: deque[Window] = deque()
        """The windows that are dispatched and not read, the oldest first."""

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
        """True if a task waits or runs, or a window is not read."""
        return self._has_work or bool(self._windows)

    @property
    def _has_work(self) -> bool:
        return bool(self._admission.waiting) or self._pool.busy

    def add(self, tasks: Iterable[Task]) -> None:
        """Adds tasks, which run in this order."""
        self._admission.add(tasks)

    def programs(self, tasks: Sequence[Task]) -> list[ProgramTable]:
        """As `SlotPool.programs`."""
        steps = 0, self._steps_per_call, 1
        return self._pool.programs(tasks, steps, copies=self._keeps_prefixes)

    def take_all(self) -> list[Task]:
        """Ends all tasks and returns them, after a failure."""
        tasks = [*self.running, *self._admission.waiting]
        self._admission.waiting.clear()
        self._windows.clear()
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
        self._pool.cancel([slot for slot, task in enumerate(self._pool.tasks) if ends(task)])

    def step(self) -> list[TaskChunk]:
        """Dispatches a prefill of prompts that wait, or a window of decode steps, in turn. Then
        reads the window before, while the device runs: the new tokens of all tasks.

        A window is read as soon as it is dispatched on a CPU, and if the masks of the next one
        follow from its tokens. A step reads one window at most, so that a failure loses no tokens
        that are read.
        """
        is_ahead = False
        if self._has_work and not (self._windows and self._needs_masks()):
            failed = self._dispatch()
            if failed:
                return failed
            is_ahead = len(self._windows) == 1 and not self._needs_masks()
        if is_ahead and self._dispatches_ahead:
            return []
        return self._collect(self._windows.popleft())

    def _dispatch(self) -> list[TaskChunk]:
        """Prefills or decodes without waiting for the device; returns tasks whose grammar fails,
        and does neither if there are some."""
        if self._prefill_is_next or not self._pool.busy:
            self._prefill_is_next = False
            # First tokens are reported at once; a grammar's next mask follows from them.
            if self._admission.admit():
                self._decode(0)
                return []
        failed = self._write_masks() if self._needs_masks() else []
        if not failed:
            self._prefill_is_next = True
            has_grammars = any(task.grammar for task in self.running)
            self._decode(1 if has_grammars else self._steps_per_call)
        return failed

    def _decode(self, steps: int) -> None:
        """Decodes; stops early if a slot is free for a task that waits."""
        pool, waiting, few = self._pool, self._admission.waiting, self._few
        pool.few = few if self._programs.has(WRITE_FIRST) else None
        if waiting and pool.free:
            steps = min(steps, self._steps_while_waiting)
        until_free = len(pool.free) + 1 if waiting else pool.sizes.slots
        self._windows.append(pool.decode(until_free, steps))

    def _needs_masks(self) -> bool:
        """True if the host writes the masks of the next step, which follow from the tokens."""
        return any(
            task.grammar is not None or (task.forced_token is not None and len(task.tokens) <= 1)
            for task in self.running
        )

    def _write_masks(self) -> list[TaskChunk]:
        """Writes the masks of all rows into the slots, and ends those whose grammar fails, such as
        one that is too complex."""
        every_token = np.full(-(-self._vocab // WORD_BITS), ALL_TOKENS)
        masks = [every_token] * self._pool.slots.count
        failed: list[TaskChunk] = []
        failed_slots: list[int] = []
        for slot, task in enumerate(self._pool.tasks):
            if task is None:
                continue
            try:
                masks[slot] = token_mask(task, self._vocab)
            except JaxLLMError as error:
                failed += task.failed(error)
                failed_slots.append(slot)
        self._pool.cancel(failed_slots)
        self._pool.write_processor(TokenMaskLogitsProcessor(np.stack(masks)))
        return failed

    def _collect(self, window: Window) -> list[TaskChunk]:
        """The new tokens of a window. Ends tasks whose stop string is complete."""
        result, rows = self._pool.read(window)
        results, stopped = [], []
        for slot, task, has_ended in rows:
            chunk = _chunk(task, result, slot)
            task.tokens.extend(chunk.tokens)
            if chunk.is_last and not has_ended:
                stopped.append(slot)
            if chunk.tokens or chunk.is_last:
                results.append((task, chunk))
        self._pool.cancel(stopped)
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
