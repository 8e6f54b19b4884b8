"""`BatchGenerator`: generates from many prompts, in slots that are refilled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxllm.batch.counts import Counts
from jaxllm.batch.memory import Prediction, budget
from jaxllm.batch.plan import Plan, plans, ran_out, too_large
from jaxllm.batch.queue import Finished
from jaxllm.batch.row_groups import Group, check_processors, fits_slots, groups
from jaxllm.batch.rows import BatchOutput, RawRow, Row, RowReader, failed, row_id
from jaxllm.batch.slot_pool import Pool
from jaxllm.batch.static_batches import batches, run_batch
from jaxllm.common.errors import InputError, JaxLLMError, UnsupportedError
from jaxllm.generation.inputs.batching import is_exhausted
from jaxllm.generation.inputs.values import is_integer
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import without_metadata
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import row_shards

DEFAULT_SLOTS = {"cpu": 16}
DEFAULT_ACCELERATOR_SLOTS = 128
"""Slots on other devices."""


class BatchGenerator:
    """Generates from many prompts; every row's result is that of `jaxllm.generate` on it alone.

    A row is a prompt, a list of token ids, or a mapping with one of `prompt`, `messages` and
    `input_ids`, optionally `id` and `seed`, and any generation fields. Rows wait in buckets of
    power-of-two prompt lengths; the longest results run first. One compiled program decodes a
    fixed number of slots. When a row ends, the next row takes its slot while the others continue.
    All beams of a row are one slot.

    Args:
        model: a causal or encoder-decoder language model. Where it lies on a mesh, so do the slots:
            over `data` and `fsdp`, and the heads of their caches over `tensor`.
        tokenizer: the model's own. None: rows have `input_ids`, and outputs no `texts`.
        slots: rows that are decoded side by side, at most; on a mesh rounded up to a multiple of
            data * fsdp. None: 16 on a CPU and 128 elsewhere, for each of data * fsdp. Fewer are
            used where memory does not allow so many.
        memory: bytes to use on each device, or a string such as "12GB". None: nine tenths of the
            device's memory, or half of the machine's where the backend does not report it.
        seed: of the rows that name none. Row number i then samples what
            `jaxllm.generate(..., key=seed, row_ids=[i])` does; one with a seed of its own, what
            `jaxllm.generate(..., key=its_seed)` does.
        default_new_tokens: most new tokens of rows for which nobody states a length, as far as the
            model reaches. None: as `generate`, 20.
        chat: a row's `prompt` is what a user says, in the model's chat template, after `system`.
        announce: called with the memory that each pool of slots will take, before it runs.
        fields: generation fields of all rows; a row's own win over them.

    Raises:
        InputError, UnsupportedError: a field of all rows is wrong. Errors of a single row are
            reported in the `error` of its output.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Any = None,
        *,
        slots: int | None = None,
        memory: int | str | None = None,
        seed: int = 0,
        default_new_tokens: int | None = None,
        chat: bool = False,
        system: str | None = None,
        announce: Callable[[Prediction], object] | None = None,
        **fields: Any,
    ) -> None:
        if not hasattr(model, "decode"):
            raise UnsupportedError(f"{type(model).__name__} has no language-model head")
        self.mesh = mesh_of(model)
        if self.mesh is not None and self.mesh.is_multi_process:
            raise UnsupportedError(
                "model: lies on devices of several processes, but each process answers rows of its "
                "own; load it with make_mesh(..., devices=jax.local_devices())"
            )
        if slots is not None and (not is_integer(slots) or slots < 1):
            raise InputError(f"slots: expected an integer of 1 or more, found {slots!r}")
        GenerationConfig(**fields)
        self.model, self.tokenizer = model, tokenizer
        self._bare = without_metadata(model)
        self._reader = RowReader(
            model, tokenizer, fields, seed, default_new_tokens, chat=chat, system=system
        )
        per_shard = DEFAULT_SLOTS.get(jax.default_backend(), DEFAULT_ACCELERATOR_SLOTS)
        self._slots = slots or per_shard * row_shards(self.mesh)
        self._budget = budget(memory, 1 if self.mesh is None else self.mesh.size)
        self._announce = announce
        self.counts = Counts()
        """Counters of the current run, or of the last one."""
        self.memory: list[Prediction] = []
        """Predicted memory of each pool of that run."""

    def generate(self, rows: Iterable[Any]) -> list[BatchOutput]:
        """The outputs of all rows, in the order of the rows."""
        return sorted(self.stream(rows), key=lambda output: output.index)

    def stream(self, rows: Iterable[Any]) -> Iterator[BatchOutput]:
        """Outputs in the order in which rows end."""
        return self.answer(RawRow(index, index, raw) for index, raw in enumerate(rows))

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Streams outputs of some rows of a larger job, which keep their numbers there."""
        self.counts, self.memory = Counts(), []
        for output in self._answer(rows):
            self.counts.finished(output)
            yield output

    def _answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        read: list[Row] = []
        checked: set[GenerationConfig] = set()
        for given in rows:
            name = given.id
            try:
                name = row_id(given.raw, given.id)
                row = self._reader.read(given, name)
                if row.config not in checked:
                    check_processors(row, self.model.config.vocab_size)
                    checked.add(row.config)
                read.append(row)
            except JaxLLMError as error:
                yield failed(given.index, name, error)
        self.counts.asked = sum(row.max_new_tokens * row.samples for row in read)
        parts: dict[int, list[Finished]] = {}
        for done in self._sequences(read):
            row = done.task.row
            found = parts.setdefault(row.index, [])
            found.append(done)
            if len(found) == row.samples:
                self.counts.answered += row.max_new_tokens * row.samples
                yield self._output(row, parts.pop(row.index))

    def _sequences(self, rows: Sequence[Row]) -> Iterator[Finished]:
        """The sequences of all rows: those that run in slots first."""
        for group in groups(filter(fits_slots, rows), self.model.config.vocab_size):
            common = (self._bare, self.tokenizer, group)
            for plan in plans(*common, group.tasks(), self._slots, self._budget, self.mesh):
                self.memory.append(plan.memory)
                if self._announce is not None:
                    self._announce(plan.memory)
                yield from self._run_plan(group, plan)
        others = (row for row in rows if not fits_slots(row))
        for batch in batches(self._bare, others, self._slots, row_shards(self.mesh)):
            yield from run_batch(self._bare, self.tokenizer, batch, self.counts)

    def _run_plan(self, group: Group, plan: Plan) -> Iterator[Finished]:
        """Sequences as they end. Where memory runs out, half the slots go on."""
        tasks, sizes = plan.tasks, plan.sizes
        while tasks:
            if not plan.memory.fits and sizes.slots == sizes.shards:
                for task in tasks:
                    yield from Finished.failed(task, too_large(task, plan))
                return
            pool = None
            try:
                common = (self._bare, self.tokenizer, group)
                pool = Pool(*common, tasks, sizes, self.counts, self.mesh)
                yield from pool.run()
                return
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                if pool is not None:
                    ended, tasks = pool.leftover()
                    yield from ended
            del pool
            if sizes.slots == sizes.shards:
                for task in tasks:
                    yield from Finished.failed(task, ran_out(task, sizes))
                return
            sizes = sizes.with_slots(sizes.slots // 2)
            self.counts.halved()

    def _output(self, row: Row, found: Sequence[Finished]) -> BatchOutput:
        found = sorted(found, key=lambda done: done.task.sample)
        errors = [done.error for done in found if done.error is not None]
        if errors:
            return failed(row.index, row.id, errors[0])
        texts = None
        if self.tokenizer is not None:
            texts = tuple(self.tokenizer.decode(d.tokens, skip_special_tokens=True) for d in found)
        return BatchOutput(
            index=row.index,
            id=row.id,
            output_ids=tuple(done.tokens for done in found),
            texts=texts,
            finish_reasons=tuple(done.reason for done in found),
            prompt_tokens=len(row.ids),
        )
