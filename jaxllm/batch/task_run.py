"""Runs the rows of a job: through a pool of slots, or in static batches of `jaxllm.generate`.

While the device decodes slots, the host prepares the next prompts, yields finished sequences and
reads more rows. `BatchGenerator` chooses the pools, and halves them when memory runs out. Rows that
cannot run in slots, such as those of diverse beams, run when no row waits for a slot. A static
batch finishes as a whole, so a row that ends early waits for the others; its rows share all
settings and the prompt bucket.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.memory import Pool
from jaxllm.batch.row_groups import Task, TaskChunk
from jaxllm.batch.row_window import RowWindow
from jaxllm.batch.rows import BatchOutput, BatchRow, Chunk
from jaxllm.batch.slot_pool import BatchCounts, SlotPool
from jaxllm.batch.slots import PromptRows
from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET, is_exhausted, run_in_batches
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.strategies.strategy import (
    FINISH_REASONS,
    NONFINITE,
    Result,
    nonfinite_error,
)
from jaxllm.models.decoder import Decoder, GenerativeModel
from jaxllm.tokenizers.tokenizer import Tokenizer

INDEPENDENT_MODES = ("beam_search", "beam_sample", "group_beam_search")
"""Modes whose rows do not depend on the other rows of a static batch."""
LONE_FIELDS = ("max_time", "stop_strings", "forced_bos_token_id")
"""Fields whose effect depends on the other rows of a static batch."""
MAX_STEPS = 256
"""Decode steps of one call at most, so that progress is shown."""


class TaskRun:
    """Runs the tasks of a pool, and those that join it while the window goes on.

    Args:
        model: the model, with RoPE lengths per row.
        tasks: the pool; some tasks wait in it.
        window: gives the pool more tasks.
        mesh: of the model.
    """

    def __init__(
        self, model: Decoder, tasks: Pool, window: RowWindow, counts: BatchCounts, mesh: Mesh | None
    ) -> None:
        self._tasks, self._window = tasks, window
        self._pool = SlotPool(model, tasks.group, tasks.sizes, tasks.first(), counts, mesh)
        self._finished: list[TaskChunk] = []
        self._next_batch: tuple[list[Task], PromptRows] | None = None
        self._next_tasks: list[Task] = []
        """Those of the next batch, also while their prompts are prefilled in chunks."""

    def put_back(self) -> list[TaskChunk]:
        """After a failure: tasks that were in a slot, or ready for one, wait again; returns the
        sequences that had ended."""
        running = [task for task in self._pool.tasks if task is not None]
        self._window.put_back(self._tasks, [*running, *self._next_tasks])
        return self._finished

    def run(self) -> Iterator[TaskChunk | BatchOutput]:
        """Sequences as they end, and the outputs of rows that need no slot. The device decodes
        while the caller reads them, and while the window reads rows."""
        while True:
            if not (self._window.is_read or self._has_work_for_all_slots()):
                yield from self._take_finished()  # the next rows may be slow to come
                yield from self._window.read(self._has_work_for_all_slots)
            self._refill()
            if not self._pool.busy:
                break
            next_batch = self._next_batch
            until_free = self._pool.sizes.slots if next_batch is None else len(next_batch[0])
            window = self._pool.decode(until_free, MAX_STEPS)
            self._next_batch = self._next_batch or self._take_next_batch()
            yield from self._take_finished()
            steps: Any = window.progress.steps
            yield from self._window.read(steps.is_ready)
            result, rows = self._pool.read(window)
            for slot, task, has_ended in rows:
                if has_ended:
                    self._finished.extend(_chunks(task, result, slot))
        yield from self._take_finished()

    def _has_work_for_all_slots(self) -> bool:
        return self._tasks.waiting >= self._pool.sizes.slots

    def _take_finished(self) -> Iterator[TaskChunk]:
        while self._finished:
            yield self._finished.pop(0)

    def _refill(self) -> None:
        """Prefills prompts into free slots while there are enough of both."""
        self._next_batch = self._next_batch or self._take_next_batch()
        while (batch := self._next_batch) and len(batch[0]) <= len(self._pool.free):
            self._next_batch, self._next_tasks = None, []  # its tasks are in slots from here on
            self._pool.prefill(*batch)
            self._next_batch = self._take_next_batch()

    def _take_next_batch(self) -> tuple[list[Task], PromptRows] | None:
        """The next tasks and their rows, ready for `prefill`."""
        self._next_tasks = self._window.take(self._tasks, self._pool.sizes.prefill_rows)
        tasks = self._next_tasks
        return (tasks, self._pool.prepare(tasks)) if tasks else None


def _chunks(task: Task, result: Result, slot: int) -> list[TaskChunk]:
    """The whole sequences of a slot; its beams, if there are several, are adjacent rows of the
    result."""
    chunks = []
    for i, sample in enumerate(task.samples, start=slot * task.row.config.num_beams):
        count, reason = int(result.lengths[i]), int(result.finish_reasons[i])
        if reason == NONFINITE:
            return task.failed(nonfinite_error(count))
        start = len(task.row.decoder_prompt)
        tokens = result.sequences[i, start : start + count].tolist()
        chunk = Chunk(sample, tuple(tokens), finish_reason=FINISH_REASONS[reason])
        chunks.append((task, chunk))
    return chunks


def static_batches(rows: Iterable[BatchRow]) -> list[list[BatchRow]]:
    """Groups rows by all that rows of one batch must have in common, the longest results first."""
    groups: dict[Hashable, list[BatchRow]] = {}
    for row in rows:
        config, width = row.config, bucket(len(row.input_ids), SMALLEST_BUCKET)
        runs_alone = row.mode not in INDEPENDENT_MODES
        runs_alone |= row.constraint is not None
        runs_alone |= any(getattr(config, name) is not None for name in LONE_FIELDS)
        runs_alone |= bool(config.do_sample) and row.row_number != row.index  # a seed of its own
        lengths = (row.max_new_tokens, _min_new_tokens(row), width)
        key = (config, row.eos, lengths, row.seed, row.index if runs_alone else None)
        groups.setdefault(key, []).append(row)
    return sorted(groups.values(), key=lambda rows: (-rows[0].max_new_tokens, rows[0].index))


def run_static_batch(
    model: GenerativeModel,
    tokenizer: Tokenizer | None,
    rows: Sequence[BatchRow],
    slots: int,
    shards: int,
    counts: BatchCounts,
) -> Iterator[TaskChunk]:
    """Yields the finished sequences of rows that `static_batches` put together. If a call fails,
    its rows run one by one, so that only rows that fail alone get an error.

    Args:
        slots: maximum number of beams of a call, over all its rows.
        shards: number of shards of the row axis on a mesh.
    """
    size = max(1, slots // rows[0].config.num_beams)
    batch_size = min(size - size % shards or size, bucket(len(rows), 1))
    samples = rows[0].samples

    def run(rows: list[BatchRow]) -> Sequence[list[Chunk] | JaxLLMError]:
        """The sequences of each row, or its error."""
        counts.doing = f"generating for {len(rows)} rows at once"
        try:
            chunks = _generate(model, tokenizer, rows)
        except JaxLLMError as error:
            # Run each row alone to find the row with the error.
            return [error] if len(rows) == 1 else [run([row])[0] for row in rows]
        except jax.errors.JaxRuntimeError as error:
            if len(rows) > 1 or not is_exhausted(error):
                raise
            return [
                InputError(
                    "num_beams, max_new_tokens: the device ran out of memory "
                    f"({rows[0].max_new_tokens} new tokens); lower one of the two"
                )
            ]
        counts.add_call(f"{rows[0].mode} of {len(rows)} x {_width(rows)}")
        return [chunks[i : i + samples] for i in range(0, len(chunks), samples)]

    results = run_in_batches(
        run,
        rows,
        batch_size,
        length=lambda row: len(row.input_ids),
        on_halving=counts.add_halving,
    )
    for number, result in results:
        task = Task(rows[number], 0, num_sequences=samples)
        if isinstance(result, JaxLLMError):
            yield from task.failed(result)
        else:
            yield from ((task, chunk) for chunk in result)


def _generate(
    model: GenerativeModel, tokenizer: Tokenizer | None, rows: Sequence[BatchRow]
) -> list[Chunk]:
    """The sequences of all samples of some rows."""
    width = max(len(row.input_ids) for row in rows)
    ids: Any = np.zeros((len(rows), width), np.int32)
    mask: Any = np.zeros((len(rows), width), bool)
    for i, row in enumerate(rows):
        length = len(row.input_ids)
        columns = slice(length) if model.is_encoder_decoder else slice(-length, None)
        ids[i, columns], mask[i, columns] = row.input_ids, True
    constraint = rows[0].constraint  # such rows run alone
    out = generate(
        model,
        ids,
        mask,
        _config(rows[0]),
        key=rows[0].seed,
        row_ids=np.array([row.row_number for row in rows], np.uint32),
        tokenizer=tokenizer,
        logits_processor=[] if constraint is None else [constraint.processor],
        rope_length="row",
    )
    prompt_columns = len(rows[0].decoder_prompt) if model.is_encoder_decoder else width
    ends = zip(out.new_tokens(prompt_columns), out.finish_reason_names(), strict=True)
    return [
        Chunk(i % rows[0].samples, tuple(tokens), finish_reason=reason)
        for i, (tokens, reason) in enumerate(ends)
    ]


def _config(row: BatchRow) -> GenerationConfig:
    """The row's settings, with lengths as numbers of new tokens."""
    values = row.config.to_dict()
    for name in ("max_length", "min_length", "max_new_tokens", "min_new_tokens"):
        values.pop(name, None)
    config = GenerationConfig.from_dict(values).replace(
        max_new_tokens=row.max_new_tokens, eos_token_id=list(row.eos) or None
    )
    minimum = _min_new_tokens(row)
    return config.replace(min_new_tokens=minimum) if minimum else config


def _min_new_tokens(row: BatchRow) -> int:
    minimum = row.config.min_new_tokens
    return max(row.config.min_length - len(row.decoder_prompt), 0) if minimum is None else minimum


def _width(rows: Sequence[BatchRow]) -> int:
    return bucket(max(len(row.input_ids) for row in rows), SMALLEST_BUCKET)
