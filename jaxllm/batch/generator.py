"""`BatchGenerator`: generates from many prompts, in slots that are refilled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from jaxllm.batch.memory import (
    Pool,
    Prediction,
    SlotLimits,
    memory_budget,
    out_of_memory_error,
    pools,
    predict,
    recorded_pool,
    too_large_error,
)
from jaxllm.batch.row_groups import (
    Group,
    TaskChunk,
    check_processors,
    fits_slots,
    groups,
    recorded_group,
    sizes_of,
)
from jaxllm.batch.row_window import RowWindow
from jaxllm.batch.rows import (
    MAX_SHARED_SETTINGS,
    BatchOutput,
    BatchRow,
    Chunk,
    RawRow,
    RowReader,
    error_output,
)
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.read import RESULTS, read_table, table_of_frame
from jaxllm.batch.tables.source import OutputTable, Source, arrow_table, has_types, output_writer
from jaxllm.batch.task_run import TaskRun, run_static_batch, static_batches
from jaxllm.common.arguments import (
    checked,
    checked_function,
    checked_iterable,
    checks_flags,
    is_integer,
)
from jaxllm.common.errors import (
    InputError,
    JaxLLMError,
    MissingFileError,
    RunError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.common.files import replacing
from jaxllm.common.hardware import default_device
from jaxllm.common.progress import progress_phase
from jaxllm.generation.inputs.arguments import is_exhausted
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.loading import load
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.models.decoder_only import with_rope_per_row
from jaxllm.parallel.placement import mesh_of
from jaxllm.parallel.sharding import row_shards
from jaxllm.tokenizers.batch import Truncation
from jaxllm.tokenizers.messages import plain_rows
from jaxllm.tokenizers.tokenizer import Tokenizer

# PERF(cpu): with 64 slots a step takes two thirds to four fifths of the time for each of them that
# it takes with 16. Elsewhere all slots share one reading of the weights, which is a small part of a
# step with 256.
SLOTS = {"cpu": SlotLimits(16, 64)}
ACCELERATOR_SLOTS = SlotLimits(128, 256)
MAX_SLOTS = 2**20


@dataclasses.dataclass(frozen=True)
class RowPlan:
    """Rows that can run, errors of the others, and the memory of each pool of slots."""

    rows: list[BatchRow]
    errors: list[BatchOutput]
    memory: list[Prediction]


class BatchGenerator:
    """Generates from many prompts with continuous batching.

    In float32, a row gets the same result as from `jaxllm.generate` without other rows, up to
    rounding. docs/batch.md says more.

    A row is a prompt, a list of token ids, or a mapping with one of `prompt`, `messages` and
    `input_ids`, optionally `id` and `seed`, and any generation fields. Rows are read in windows,
    and wait in buckets of power-of-two prompt lengths; the longest results of a window run first.
    Prompts are prefilled in chunks of two widths. The prompts of encoder-decoders, of rows with
    beams, and with RoPE that depends on the length are padded to their bucket. One compiled program
    decodes a fixed number of slots. When a row ends, the next row takes its slot while the others
    continue. All beams of a row are one slot.

    Args:
        model: a causal or encoder-decoder language model. Where it lies on a mesh, so do the slots:
            over `data` and `fsdp`, and the heads of their caches over `tensor`.
        tokenizer: the model's own. None: rows have `input_ids`, and outputs no `texts`.
        slots: maximum number of rows that are decoded at once; on a mesh rounded up to a multiple
            of data * fsdp. None: 16 on a CPU and 128 elsewhere, for each of data * fsdp, and up to
            64 and 256 if there are four times as many rows. Fewer are used where memory does not
            allow so many.
        memory: bytes to use on each device, or a string such as "12GB". None: nine tenths of the
            device's memory, or half of the machine's where the backend does not report it.
        seed: seed of rows that have none. Row number i then samples as
            `jaxllm.generate(..., key=seed, row_ids=[i])` does, and a row with a seed of its own as
            `jaxllm.generate(..., key=its_seed)`.
        default_new_tokens: `max_new_tokens` of rows for which no length is set, as far as the
            model's context reaches. None: as `generate`, 20.
        chat: a row's `prompt` is a user message, for the model's chat template, after `system`.
        schema, regex, grammar: what the new text of all rows must match: a JSON schema, a regular
            expression, or a Lark grammar (at most one of them; a row's own replaces it). A schema
            or a grammar may also be the name of a file. Needs
            ``pip install 'jaxllm[grammar]'``, and not several devices.
        src_lang, tgt_lang: languages of rows that name none, for translation models.
        truncation: cut texts to the tokenizer's and the model's longest.
        max_source_length: cut texts to so many tokens.
        announce: called with the memory that each pool of slots will take, before it runs.
        fields: generation fields of all rows; a row's own override them.

    Raises:
        InputError, UnsupportedError: a field of all rows is wrong. Errors of a single row are
            reported in the `error` of its output.
    """

    @checks_flags
    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer | None = None,
        *,
        slots: int | None = None,
        memory: int | str | None = None,
        seed: int = 0,
        default_new_tokens: int | None = None,
        chat: bool = False,
        system: str | None = None,
        schema: Mapping[str, Any] | str | PathLike[str] | bool | None = None,
        regex: str | None = None,
        grammar: str | PathLike[str] | None = None,
        src_lang: str | None = None,
        tgt_lang: str | None = None,
        truncation: Truncation = False,
        max_source_length: int | None = None,
        announce: Callable[[Prediction], object] | None = None,
        **fields: Any,
    ) -> None:
        self.mesh = check_model(model)
        check_tokenizer(tokenizer)
        if announce is not None:
            checked_function(announce, "announce")
        self._given = {"slots": slots, "memory": memory}
        self._slots = slot_limits(slots, self.mesh)
        if src_lang is not None or tgt_lang is not None:
            if tokenizer is None:
                raise InputError("src_lang, tgt_lang: need a tokenizer; give the model's")
            tokenizer = tokenizer.with_languages(src_lang)
            fields = tokenizer.with_target(fields, tgt_lang)
        GenerationConfig(**fields)
        self.model, self.tokenizer = model, tokenizer
        self._model = with_rope_per_row(model)
        self._reader = RowReader(
            model,
            tokenizer,
            fields,
            seed,
            default_new_tokens,
            chat=chat,
            system=system,
            constraint={"schema": schema, "regex": regex, "grammar": grammar},
            truncation=truncation,
            max_source_length=max_source_length,
        )
        self._budget = memory_budget(memory, 1 if self.mesh is None else self.mesh.size)
        self._announce = announce
        self._kept_pools: Sequence[Mapping[str, Any]] = ()
        self._sizes_changed = False
        self._row: Callable[[int], RawRow] | None = None
        self._save_pools: Callable[[list[dict[str, Any]]], object] | None = None
        self.returns_several = (fields.get("num_return_sequences") or 1) > 1
        """Rows without a `num_return_sequences` of their own have a list of results."""
        self.counts = BatchCounts()
        """Counters of the current run, or of the last one."""
        self.memory: list[Prediction] = []
        """Predicted memory of each pool of that run."""

    def generate(self, rows: Iterable[Any]) -> list[BatchOutput]:
        """The outputs of all rows, in the order of the rows.

        Raises:
            InputError: `rows` is a single row, or no list.
        """
        rows = list(plain_rows(checked_iterable(rows, "rows", "a list of rows")))
        raw_rows = (RawRow(index, index, raw) for index, raw in enumerate(rows))
        return self._generate(raw_rows, len(rows))

    def _generate(self, rows: Iterable[RawRow], count: int) -> list[BatchOutput]:
        """The outputs of rows in their order, with progress."""

        def amounts(done: int, total: int) -> str:
            return f"{done} done, {self.counts.new_tokens:,} new tokens"

        outputs: list[BatchOutput] = []
        with progress_phase(f"generating, rows: {count}", amounts) as update:
            for output in self.answer(rows):
                outputs.append(output)
                if update is not None:
                    update("", len(outputs), count)
        return sorted(outputs, key=lambda output: output.index)

    def generate_table(
        self,
        table: Any,
        *,
        template: str | PathLike[str] | None = None,
        system_template: str | PathLike[str] | None = None,
        prompt_column: str | None = None,
        keep: Sequence[str] | Literal["all"] = "all",
        keep_prefix: str = "",
        output: str | PathLike[str] | None = None,
        delimiter: str | None = None,
    ) -> Any:
        """Generates a text for each row of a table.

        Args:
            table: a pandas or Polars data frame, a `pyarrow.Table`, or the path of a file of rows
                (CSV, TSV, JSONL or Parquet).
            template: writes each prompt from the columns of its row, such as "Question: {{
                question }}" (Jinja), or a file that does. Without it, the column `prompt` or
                `prompt_column` has the prompts. Columns that are called as generation fields are
                settings of their row.
            system_template: writes each system message; the prompt is then a user message.
            prompt_column: the column of the prompts.
            keep: columns that the result has too: a list of names, or a text with commas.
            keep_prefix: put before their names.
            output: the file of the results, for a path. Its name says the format.
            delimiter: the character between the cells of a CSV file, such as ";".

        Returns:
            A table of the same kind, for a path the path of `output`. Its columns are `id`, `row`
            (the position, from 0 on), the kept columns, `text`, `output_ids`, `finish_reason`,
            `error` and `error_kind`; rows that failed have the last two only.

        Raises:
            InputError, DataError: the table lacks a column, or an argument is wrong.
        """
        choice = ColumnChoice.of(
            prompt_column=prompt_column,
            template=template,
            system_template=system_template,
            keep=keep,
            keep_prefix=keep_prefix,
        )
        is_path = isinstance(table, str | PathLike)
        path = None if output is None else Path(output)
        if is_path != (path is not None):
            raise InputError("output: give the file of the results for a path, and only then")
        if delimiter is not None and not is_path:
            raise InputError("delimiter: only for the path of a .csv file; remove it")
        rows, to_frame = (
            (read_table(table, delimiter=delimiter), None) if is_path else table_of_frame(table)
        )
        source = Source(rows, choice, RESULTS, keeps_types=path is None or has_types(path))
        source.check_rows()
        write = None if path is None else output_writer(path)
        if path is not None and path.exists():
            raise RunError(f"output: {path} exists already; give another name, or remove it")
        if path is not None and not path.parent.is_dir():
            raise MissingFileError(f"output: {path.parent}: no such folder; create it")
        outputs = self._generate(map(source.row, range(len(source))), len(source))
        lines = [source.output_line(each.index, source.result(each)) for each in outputs]
        result = OutputTable(
            source.columns, lambda: iter(lines), source.arrow(), self.returns_several
        )
        if to_frame is not None:
            return to_frame(arrow_table(result), source.copies)
        assert path is not None
        assert write is not None
        with (
            naming_file(path, RunError, "written"),
            replacing(path) as partial,
            partial.open("wb") as file,
        ):
            write(file, result)
        return path

    def stream(self, rows: Iterable[Any]) -> Iterator[BatchOutput]:
        """Outputs in the order in which rows end; raises as `generate`."""
        rows = plain_rows(checked_iterable(rows, "rows", "a list of rows"))
        return self.answer(RawRow(index, index, raw) for index, raw in enumerate(rows))

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Streams outputs of some rows of a larger job, which keep their numbers there."""
        self.counts, self.memory = BatchCounts(), []
        options = (self._model.is_encoder_decoder, row_shards(self.mesh), self.counts)
        window = RowWindow(self._checked(rows), *options, self._recorded_pools())
        unfinished: dict[int, list[Chunk]] = {}
        for item in self._sequences(window):
            if isinstance(item, BatchOutput):
                output = item
            else:
                task, chunk = item
                row = task.row
                chunks = unfinished.setdefault(row.index, [])
                chunks.append(chunk)
                if len(chunks) < row.samples:
                    continue
                self.counts.work_done += row.max_new_tokens * row.samples
                output = self._output(row, unfinished.pop(row.index))
            self.counts.add_output(output)
            yield output

    def keep_pools(
        self,
        kept: Mapping[str, Any],
        save: Callable[[dict[str, Any]], object],
        row: Callable[[int], RawRow],
    ) -> None:
        """Lets `answer` run its rows in the pools that an earlier run chose, so that their results
        are the same to the bit. With other `slots` or `memory` than then, pools are chosen anew.

        Args:
            kept: what `save` got last; empty at first.
            save: called before rows run in new pools.
            row: gives a row by its number, for the settings of a pool.
        """
        is_same = kept.get("given", self._given) == self._given
        self._sizes_changed = kept.get("sizes_changed", False) or not is_same
        self._kept_pools = kept.get("pools", ()) if is_same else ()
        self._row = row

        def save_pools(pools: list[dict[str, Any]]) -> None:
            changed = self._sizes_changed
            save({"given": self._given, "sizes_changed": changed, "pools": pools})

        self._save_pools = save_pools

    def _recorded_pools(self) -> list[Pool]:
        """The pools that an earlier run chose; none if they do not suit this run."""
        found: dict[int, Group] = {}
        result = []
        options = (self.model.config.vocab_size, self.tokenizer, self.mesh)
        try:
            for record in self._kept_pools:
                group = record["group"]
                if group["number"] not in found:
                    assert self._row is not None
                    row = self._reader.read(self._row(group["row"]))
                    found[group["number"]] = recorded_group(group, row, *options)
                result.append(recorded_pool(record, found[group["number"]]))
        except (JaxLLMError, IndexError, KeyError, TypeError, ValueError):
            # Rows are tried again with other limits, or the version is another one.
            self._sizes_changed = True
            return []
        return result

    def _record(self, window: RowWindow) -> None:
        """Saves the pools of a window for a resumed job, without the pools whose slots do not fit
        into memory."""
        if self._save_pools is not None:
            self._save_pools([pool.record() for pool in window.pools if not pool.is_refused])

    def plan(self, rows: Iterable[RawRow]) -> RowPlan:
        """What `answer` would run if it read all rows before the first runs. It reads no weights,
        so that the model may have none."""
        plan = RowPlan([], [], [])
        for row in self._checked(rows):
            if isinstance(row, BatchRow):
                plan.rows.append(row)
            elif row.error is not None:
                plan.errors.append(row)
        options = (self._model.is_encoder_decoder, row_shards(self.mesh))
        for group in self._groups(filter(fits_slots, plan.rows)):
            for pool in self._pools(group):
                assert pool.memory is not None
                if pool.memory.fits:
                    plan.memory.append(pool.memory)
                    continue
                for row in group.rows:
                    if pool.holds(row, sizes_of(row, *options)):
                        error = too_large_error(row, pool)
                        plan.errors.append(error_output(row, error))
        failed = {output.index for output in plan.errors}
        plan.rows[:] = [row for row in plan.rows if row.index not in failed]
        return plan

    def _checked(self, rows: Iterable[RawRow]) -> Iterator[BatchRow | BatchOutput]:
        """The rows that can run, and the outputs of the others."""
        checked_configs: set[GenerationConfig] = set()
        for raw_row in rows:
            try:
                row = self._reader.read(raw_row)
                if row.is_blank:
                    ends = (Chunk(i, (), finish_reason="eos") for i in range(row.samples))
                    yield BatchOutput.of(row, ends, self.tokenizer)
                    continue
                if row.constraint is not None and self.mesh is not None and self.mesh.size > 1:
                    raise UnsupportedError(
                        "schema, regex, grammar: run on one device; hide the others from JAX "
                        "(CUDA_VISIBLE_DEVICES), or start a process for each"
                    )
                if row.config not in checked_configs:
                    if len(checked_configs) == MAX_SHARED_SETTINGS:
                        checked_configs.clear()
                    check_processors(row, self.model.config.vocab_size)
                    checked_configs.add(row.config)
                yield row
            except JaxLLMError as error:
                yield error_output(raw_row, error)

    def _sequences(self, window: RowWindow) -> Iterator[TaskChunk | BatchOutput]:
        """The sequences of all rows, and the outputs of rows that do not run."""
        while True:
            yield from window.read()
            if (pool := window.next_pool()) is not None:
                yield from self._run_pool(pool, window)
            elif window.unplaced:
                self._add_pools(window)
            elif window.static:
                options = (self._slots.least, row_shards(self.mesh), self.counts)
                for batch in static_batches(window.take_static()):
                    yield from run_static_batch(self._model, self.tokenizer, batch, *options)
            else:
                assert window.is_read  # else rows would be lost
                return

    def _add_pools(self, window: RowWindow) -> None:
        """Chooses pools for rows of one group that no pool holds."""
        rows, known = window.unplaced, window.groups
        options = {"more": not window.is_read}
        group = next((each for each in known if each.accepts(rows[0])), None)
        if group is not None:  # its rows are too long for its pools
            rows = tuple(filter(group.accepts, rows))
            options["is_later"] = True
            new = self._pools(dataclasses.replace(group, rows=rows), **options)
        else:
            chosen = next(self._groups(rows, known))
            group = dataclasses.replace(chosen, rows=chosen.rows[:1])
            new = self._pools(chosen, **options)
        self.counts.doing = "trying how many rows fit into memory"
        pools = [dataclasses.replace(pool, group=group) for pool in new]
        for pool in pools:
            self._announce_pool(pool)
        window.add_pools(pools[::-1])
        self._record(window)

    def _announce_pool(self, pool: Pool) -> None:
        """Reports the memory of a pool."""
        if pool.memory is None:  # as recorded
            options = (pool.group, self._budget, self.mesh, [pool.widest()], pool.sizes)
            pool.memory = predict(self._model, *options, pool.sizes.slots)
        self.memory.append(pool.memory)
        if self._announce is not None:
            self._announce(pool.memory)

    def _groups(self, rows: Iterable[BatchRow], earlier: Sequence[Group] = ()) -> Iterator[Group]:
        """The groups of rows that run in slots."""
        vocab_size = self.model.config.vocab_size
        return groups(rows, vocab_size, self.tokenizer, self.mesh, earlier)

    def _pools(self, group: Group, **options: bool) -> Iterator[Pool]:
        return pools(self._model, group, self._slots, self._budget, self.mesh, **options)

    def _run_pool(self, pool: Pool, window: RowWindow) -> Iterator[TaskChunk | BatchOutput]:
        """Sequences as they end, until no more tasks of the pool are in reach. Where memory runs
        out, half the slots go on."""
        if pool.memory is None:
            self._announce_pool(pool)
        while pool.waiting:
            if pool.is_refused:
                yield from _failed(window, pool, lambda row: too_large_error(row, pool))
                return
            run = None
            try:
                run = TaskRun(self._model, pool, window, self.counts, self.mesh)
                yield from run.run()
                return
            except jax.errors.JaxRuntimeError as error:
                if not is_exhausted(error):
                    raise
                if run is not None:
                    yield from run.put_back()
            del run
            if pool.is_smallest:
                yield from _failed(window, pool, lambda row: out_of_memory_error(row, pool.sizes))
                return
            pool.sizes = pool.sizes.with_slots(pool.sizes.slots // 2)
            self._record(window)
            self.counts.add_halving()

    def _output(self, row: BatchRow, chunks: Sequence[Chunk]) -> BatchOutput:
        errors = [] if row.constraint is None else [*row.constraint.failures]
        by_sample = sorted(chunks, key=lambda chunk: chunk.sample)
        errors += [chunk.error for chunk in by_sample if chunk.error is not None]
        if errors:
            return error_output(row, errors[0])
        return BatchOutput.of(row, chunks, self.tokenizer)


def _failed(
    window: RowWindow, pool: Pool, error: Callable[[BatchRow], JaxLLMError]
) -> Iterator[TaskChunk]:
    """The ends of all tasks that wait for a pool, after errors."""
    while tasks := window.take(pool, pool.waiting):
        for task in tasks:
            yield from task.failed(error(task.row))


def check_tokenizer(tokenizer: object) -> None:
    """Raises InputError unless there is a tokenizer or None."""
    checked(tokenizer, (Tokenizer, type(None)), "tokenizer", "a tokenizer or None")


def check_model(model: GenerativeModel) -> Mesh | None:
    """Checks that rows can be generated with a model; returns its mesh.

    Raises:
        UnsupportedError: it has no language-model head, or lies on devices of several processes.
    """
    mesh = mesh_of(checked_generative(model, "model"))
    if mesh is not None and mesh.is_multi_process:
        raise UnsupportedError(
            "model: lies on devices of several processes, but each process answers rows of its "
            "own; load it with make_mesh(..., devices=jax.local_devices())"
        )
    return mesh


def slot_limits(slots: int | None, mesh: Mesh | None) -> SlotLimits:
    """The number of slots that is asked for; None: the default for the devices."""
    if slots is None:
        limits = SLOTS.get(default_device().platform, ACCELERATOR_SLOTS)
        return SlotLimits(*(limit * row_shards(mesh) for limit in limits))
    if not is_integer(slots) or not 1 <= slots <= MAX_SLOTS:
        raise InputError(f"slots: expected an integer from 1 to {MAX_SLOTS}, found {quoted(slots)}")
    return SlotLimits(slots, slots)


def generate_texts(
    model: GenerativeModel | str | PathLike[str],
    prompts: Sequence[str | Sequence[Mapping[str, Any]] | Mapping[str, Any]],
    tokenizer: Tokenizer | None = None,
    **options: Any,
) -> list[Any]:
    """Generates from many prompts, in slots that are refilled.

    ::

        texts = jaxllm.generate_texts("path/to/model", ["Once upon a time", "The sea"],
                                      max_new_tokens=40)

    Args:
        model: a model, or what `jaxllm.load` takes.
        prompts: texts, lists of messages, or rows of `BatchGenerator`.
        tokenizer: the model's; needed with a model that is loaded already.
        options: arguments of `BatchGenerator` (`seed`, `chat`, `system`, `schema`, `slots`, ...)
            and generation fields of all prompts.

    Returns:
        A text for each prompt, without the prompt; a list of texts for prompts whose
        `num_return_sequences` is above 1.

    Raises:
        InputError: there is no tokenizer, or a prompt cannot be answered; the message has its
            number, from 0 on.
    """
    prompts = list(plain_rows(checked_iterable(prompts, "prompts", "a list of prompts")))
    if isinstance(model, str | PathLike):
        loaded, own = load(model)
        tokenizer = own if tokenizer is None else tokenizer
    else:
        loaded = model
    if tokenizer is None:
        raise InputError("tokenizer: give the model's, since there is none")
    for number, each in enumerate(prompts):
        if isinstance(each, Mapping) and "role" in each:
            raise InputError(f"prompts[{number}]: is a message; a chat is a list of messages")
    rows = [each if isinstance(each, str | Mapping) else {"messages": each} for each in prompts]
    texts = []
    for output in BatchGenerator(loaded, tokenizer, **options).generate(rows):
        if output.error is not None:
            raise InputError(f"prompts[{output.index}]: {output.error}")
        assert output.texts is not None
        texts.append(output.texts[0] if len(output.texts) == 1 else list(output.texts))
    return texts
