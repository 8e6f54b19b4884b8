"""Groups of rows that share programs: which rows can run in slots, the logits processors of each,
and the arrays of their prompts and settings.

Rows of one program may differ in the fields of `per_row_fields`. If one row uses such a field, the
program applies it to all rows, with the neutral value (`Field.neutral`) for the others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.batch.rows import MAX_SHARED_SETTINGS, BatchRow, Chunk
from jaxllm.batch.slots import PromptRows, Sizes, place
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET, padded_rows
from jaxllm.generation.inputs.values import NO_TOKEN, bucket
from jaxllm.generation.processors import LogitsProcessor, LogitsProcessorList
from jaxllm.generation.processors.base import RowProcessors, signature
from jaxllm.generation.processors.build import (
    REGISTERED,
    WHEN_SAMPLING,
    ProcessorInputs,
    build_processors,
)
from jaxllm.generation.processors.grammar import GrammarLogitsProcessor
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.resolve import MAX_COLUMNS
from jaxllm.generation.stopping import StoppingCriteriaList, StopStringCriteria, StopStringMatcher
from jaxllm.generation.strategies.beam_search import BeamSearch
from jaxllm.generation.strategies.sample import Sample, StreamedSample
from jaxllm.generation.strategies.strategy import AnyStrategy, DecodeSettings, PrefillInputs
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_STOP_LISTS = 8
"""Lists of stop strings in one program: each is looked for in every row."""
SLOT_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
"""Generation modes that slots have; rows of other modes run in static batches."""
SLOT_CACHES = (None, "static", "dynamic")
"""Values of `cache_implementation` that slots have."""
# fmt: off
PER_ROW_FIELDS = frozenset({
    "temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size",
    "logit_bias", "min_new_tokens",
})
# fmt: on
"""Built-in fields whose processors have the same shape for all values."""


def per_row_fields() -> frozenset[str]:
    """Names of the fields in which rows of a program may differ, registered ones included."""
    registered = {name for builders in REGISTERED.values() for name in builders}
    return PER_ROW_FIELDS | {name for name in registered if FIELDS[name].neutral is not None}


def fits_slots(row: BatchRow) -> bool:
    """True if a row can run in a slot: greedy search or sampling, with or without beams, and no
    field that needs a static batch (`Field.slots`)."""
    config = row.config
    if row.mode not in SLOT_MODES or config.cache_implementation not in SLOT_CACHES:
        return False
    if config.num_beams > 1 and not _beams_fit(row):
        return False
    fields = ((FIELDS[name], value) for name, value in config.to_dict().items())
    return all(field.slots or not field.has_effect(value) for field, value in fields)


def _beams_fit(row: BatchRow) -> bool:
    """True if the row's beams fit the slots; `generate` raises an error for too many beams."""
    new_token_bucket = bucket(row.max_new_tokens, SMALLEST_BUCKET)
    columns = bucket(row.max_length, SMALLEST_BUCKET)
    columns += (row.config.num_beams - 1) * new_token_bucket
    return columns <= MAX_COLUMNS and not row.config.low_memory


def check_processors(row: BatchRow, vocab_size: int) -> None:
    """Raises the errors of `generate` for invalid processor settings, such as token ids outside the
    vocabulary."""
    if fits_slots(row):
        row_processors(row, tuple(per_row_fields()), vocab_size)


def used_fields(rows: Sequence[BatchRow]) -> tuple[str, ...]:
    """The per-row fields that any row uses."""
    names = per_row_fields()
    fields = set(WHEN_SAMPLING if any(row.config.do_sample for row in rows) else ())
    for config in {row.config for row in rows}:
        values = _per_row_values(config, names, 0)
        fields |= {name for name, value in values.items() if value != FIELDS[name].neutral}
    return tuple(sorted(fields))


def _per_row_values(
    config: GenerationConfig, names: Iterable[str], prompt_length: int
) -> dict[str, Any]:
    """A row's values of per-row fields.

    Args:
        prompt_length: length of its decoder prompt; `min_length` minus this counts as
            `min_new_tokens`.
    """
    values = {}
    for name in names:
        field, value = FIELDS[name], getattr(config, name)
        if name == "min_new_tokens" and value is None:
            value = max(config.min_length - prompt_length, 0)
        unused = value is None or (field.only_sampling and not config.do_sample)
        values[name] = field.neutral if unused else value
    return values


def row_processors(
    row: BatchRow,
    shared_fields: tuple[str, ...],
    vocab_size: int,
    extra: Iterable[LogitsProcessor] = (),
) -> LogitsProcessorList:
    """The logits processors of a row, the ones of all `shared_fields` included.

    Args:
        extra: further processors, applied where `generate` applies the processors of its caller.
    """
    if row.constraint is not None:
        extra = [*extra, row.constraint.processor]
    no_slots = {name for name, field in FIELDS.items() if not field.slots}
    unused = (per_row_fields() | no_slots | {"min_length"}) - set(shared_fields)
    neutral = {name: FIELDS[name].neutral for name in unused}
    # As values of a file, which do not add a processor by being set.
    config = row.config.without(unused).merge(GenerationConfig.from_dict(neutral))
    config = config.replace(
        **_per_row_values(row.config, shared_fields, len(row.decoder_prompt)),
        do_sample=any(FIELDS[name].only_sampling for name in shared_fields),
    )
    inputs = ProcessorInputs(config, len(row.decoder_prompt), row.max_length, row.eos, vocab_size)
    return build_processors(inputs, extra=extra)


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A row, or one of its samples, that takes a slot.

    Only requests of a server set the fields after `num_sequences`. While a request runs, the host
    reads its new tokens, looks for its stop strings, and writes a mask of the tokens that its
    grammar or its forced token allows. The settings of its row have no stop strings, no grammar and
    no forced token.
    """

    row: BatchRow
    sample: int
    num_sequences: int = 1
    """Sequences that it ends with; beam search may return several."""
    request: Any = None
    """Caller's handle of the request."""
    processors: tuple[LogitsProcessor, ...] = ()
    """Logits processors that the row's settings do not ask for."""
    logprobs: bool = False
    """The request asks for log-probabilities."""
    stops: StopStringMatcher | None = None
    grammar: GrammarLogitsProcessor | None = None
    forced_token: int | None = None
    """First new token, such as a language. A grammar describes the tokens after the first one."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """New tokens so far."""

    @property
    def samples(self) -> range:
        """Numbers of the samples that it ends with."""
        return range(self.sample, self.sample + self.num_sequences)

    least_width: int = 0
    """Columns to which its prompt is padded at least."""

    @property
    def width(self) -> int:
        """Columns of its prompt's bucket."""
        return max(bucket(len(self.row.input_ids), SMALLEST_BUCKET), self.least_width)

    def failed(self, error: JaxLLMError) -> list[TaskChunk]:
        """The end of all its samples after an error."""
        return [(self, Chunk(sample, (), error=error)) for sample in self.samples]


TaskChunk: TypeAlias = tuple[Task, Chunk]
"""New tokens of a task, or its error."""


def tasks_of(row: BatchRow, least_width: int = 0) -> list[Task]:
    """One task for each sample of a row, or one for all of its beams."""
    if row.config.num_beams > 1:
        return [Task(row, 0, num_sequences=row.samples, least_width=least_width)]
    return [Task(row, sample, least_width=least_width) for sample in range(row.samples)]


def sizes_for(
    tasks: Sequence[Task], slots: int, encoder_decoder: bool, shards: int, beams: int
) -> Sizes:
    """Sizes that hold all of the tasks, rounded up to powers of two."""
    longest = max(task.row.max_new_tokens for task in tasks)
    width = max(task.width for task in tasks)
    columns = bucket(max(task.row.max_length for task in tasks), SMALLEST_BUCKET)
    sizes = Sizes(
        slots=0,
        # The prompts of an encoder-decoder are in the encoder part of their slots.
        columns=columns if encoder_decoder else max(columns, width),
        encoder_columns=width if encoder_decoder else None,
        shards=shards,
        beams=beams,
        new_token_bucket=0 if beams == 1 else bucket(longest, SMALLEST_BUCKET),
    )
    return sizes.with_slots(slots)


def sizes_of(row: BatchRow, encoder_decoder: bool, shards: int) -> Sizes:
    """The sizes that a row needs."""
    return sizes_for(tasks_of(row)[:1], 1, encoder_decoder, shards, row.config.num_beams)


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Rows that share one set of compiled programs."""

    number: int
    rows: tuple[BatchRow, ...]
    """Rows for which the programs were chosen. The first one tells which other rows they fit."""
    vocab_size: int
    sampling: bool
    """True if some rows of the program sample."""
    shared_fields: tuple[str, ...]
    """Per-row fields that the programs apply."""
    eos_width: int
    window: int = 0
    """Steps after which the host reads new tokens; 0: it reads whole sequences."""
    top_logprobs: int = 0
    """With `window`, the most probable tokens of each step that it reads."""
    stops: Mapping[tuple[str, ...], StopStringCriteria] = dataclasses.field(default_factory=dict)
    """A stopping criterion for each list of stop strings, on the devices."""
    _accepted: dict[Hashable, bool] = dataclasses.field(default_factory=dict)

    @property
    def beams(self) -> int:
        """Sequences that a slot decodes."""
        return self.rows[0].config.num_beams if self.rows else 1

    def tasks(self) -> list[Task]:
        """The tasks of its rows."""
        return [task for row in self.rows for task in tasks_of(row)]

    def accepts(self, row: BatchRow) -> bool:
        """True if the programs of the group fit the settings of a row."""
        if len(row.eos) > self.eos_width:
            return False
        key = row.config, row.constraint is not None
        if key not in self._accepted:
            if len(self._accepted) == MAX_SHARED_SETTINGS:
                self._accepted.clear()
            self._accepted[key] = self._has_programs_for(row)
        return self._accepted[key]

    def _has_programs_for(self, row: BatchRow) -> bool:
        first = self.rows[0]
        if _strategy_key(row) != _strategy_key(first) or not self._applies_fields_of(row):
            return False
        if row.config.stop_strings and row.config.stop_strings not in self.stops:
            return False
        lists = [row_processors(each, self.shared_fields, self.vocab_size) for each in (row, first)]
        return signature(lists[0]) == signature(lists[1])

    def _applies_fields_of(self, row: BatchRow) -> bool:
        """True if the programs sample where the row does, and apply the per-row fields it uses."""
        samples = self.sampling or not row.config.do_sample
        return samples and set(used_fields([row])) <= set(self.shared_fields)

    def processors(self, task: Task) -> LogitsProcessorList:
        """The logits processors of a task."""
        return row_processors(task.row, self.shared_fields, self.vocab_size, task.processors)

    def strategy(self, tasks: Sequence[Task]) -> AnyStrategy:
        """The strategy of the group with the numbers of some tasks, as host arrays."""
        config = tasks[0].row.config
        if config.num_beams > 1:
            penalties: Any = np.array([t.row.config.length_penalty for t in tasks], np.float32)
            return BeamSearch(
                length_penalty=penalties,
                num_beams=config.num_beams,
                num_return_sequences=config.num_beams,
                early_stopping=config.early_stopping,
                sampling=self.sampling,
            )
        sampled: Any = np.array([bool(task.row.config.do_sample) for task in tasks])
        if not self.window:
            return Sample(sampling=self.sampling, sampled_rows=sampled)
        reports: Any = np.array([task.logprobs for task in tasks])
        return StreamedSample(
            sampling=self.sampling,
            sampled_rows=sampled,
            window=self.window,
            top_logprobs=self.top_logprobs,
            reports_logprobs=reports,
        )

    def settings(self, tasks: Sequence[Task]) -> DecodeSettings:
        """Settings of some tasks of the group, as host arrays."""
        rows = [task.row for task in tasks]
        eos: Any = np.full((len(rows), self.eos_width), NO_TOKEN, np.int32)
        for i, row in enumerate(rows):
            eos[i, : len(row.eos)] = row.eos
        max_length: Any = np.array([row.max_length for row in rows], np.int32)
        pad: Any = np.int32(0)
        return DecodeSettings(
            processors=RowProcessors.of([self.processors(task) for task in tasks]),
            eos=eos,
            pad=pad,
            max_length=max_length,
            stops=StoppingCriteriaList(
                stop.for_rows([row.config.stop_strings == strings for row in rows])
                for strings, stop in self.stops.items()
            ),
            allow_nonfinite=bool(rows[0].config.remove_invalid_values),
            aligned=False,
        )


def groups(
    rows: Iterable[BatchRow],
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
    earlier: Sequence[Group] = (),
) -> Iterator[Group]:
    """Groups rows by the programs that they need; most batches are one group.

    The tables of a group's stop strings are put on the devices when its turn comes.

    Args:
        tokenizer: None if no row has stop strings.
        mesh: of the model.
        earlier: groups of earlier rows. The new programs of a strategy have the per-row fields of
            its earlier ones as well, so that rows of both kinds need no further programs.
    """
    by_strategy: dict[Hashable, list[BatchRow]] = {}
    for row in rows:
        by_strategy.setdefault(_strategy_key(row), []).append(row)
    numbers = itertools.count(1 + max((group.number for group in earlier), default=-1))
    for strategy, strategy_rows in by_strategy.items():
        before = [group for group in earlier if _strategy_key(group.rows[0]) == strategy]
        fields = {
            *used_fields(strategy_rows),
            *(x for group in before for x in group.shared_fields),
        }
        shared_fields = tuple(sorted(fields))
        sampling = any(row.config.do_sample for row in strategy_rows)
        sampling |= any(group.sampling for group in before)
        for processor_rows in _by_processors(strategy_rows, shared_fields, vocab_size):
            for group_rows in _by_stop_lists(processor_rows):
                lists = sorted({row.config.stop_strings or () for row in group_rows} - {()})
                yield Group(
                    number=next(numbers),
                    rows=tuple(group_rows),
                    vocab_size=vocab_size,
                    sampling=sampling,
                    shared_fields=shared_fields,
                    eos_width=bucket(max(len(row.eos) for row in group_rows), 8),
                    stops=_stop_tables(lists, tokenizer, mesh),
                )


def _stop_tables(
    lists: Iterable[tuple[str, ...]], tokenizer: Tokenizer | None, mesh: Mesh | None
) -> dict[tuple[str, ...], StopStringCriteria]:
    """A criterion for each list of stop strings, on the devices."""
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    place_all = partial(place, sharding=everywhere)
    return {
        strings: jax.tree.map(place_all, StopStringCriteria(tokenizer, strings))
        for strings in lists
        if tokenizer is not None  # `RowReader` refuses stop strings without one
    }


def group_record(group: Group) -> dict[str, Any]:
    """A group as a JSON object, with its first row by number."""
    return {
        "number": group.number,
        "row": group.rows[0].index,
        "sampling": group.sampling,
        "shared_fields": list(group.shared_fields),
        "eos_width": group.eos_width,
        "stops": [list(strings) for strings in group.stops],
    }


def recorded_group(
    record: Mapping[str, Any],
    row: BatchRow,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    mesh: Mesh | None,
) -> Group:
    """The group of a record.

    Args:
        row: its first row.
    """
    return Group(
        number=record["number"],
        rows=(row,),
        vocab_size=vocab_size,
        sampling=record["sampling"],
        shared_fields=tuple(record["shared_fields"]),
        eos_width=record["eos_width"],
        stops=_stop_tables(map(tuple, record["stops"]), tokenizer, mesh),
    )


def _strategy_key(row: BatchRow) -> Hashable:
    """What is equal in rows of one strategy. Greedy and sampled rows share one; beam search and
    beam sampling do not."""
    config, allow_nonfinite = row.config, bool(row.config.remove_invalid_values)
    if config.num_beams == 1:
        return allow_nonfinite
    return allow_nonfinite, config.num_beams, config.early_stopping, bool(config.do_sample)


def _by_processors(
    rows: Sequence[BatchRow], shared_fields: tuple[str, ...], vocab_size: int
) -> Iterable[list[BatchRow]]:
    """Splits rows into parts whose processors differ only in per-row numbers."""
    signatures: dict[Hashable, Any] = {}
    parts: dict[Any, list[BatchRow]] = {}
    for row in rows:
        key = row.config, row.constraint is not None
        if key not in signatures:
            signatures[key] = signature(row_processors(row, shared_fields, vocab_size))
        parts.setdefault(signatures[key], []).append(row)
    return parts.values()


def _by_stop_lists(rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """Splits rows into parts of no more than `MAX_STOP_LISTS` different lists of stop strings."""
    stop_lists = sorted({row.config.stop_strings or () for row in rows})
    part_of = {stop_list: i // MAX_STOP_LISTS for i, stop_list in enumerate(stop_lists)}
    parts: dict[int, list[BatchRow]] = {}
    for row in rows:
        parts.setdefault(part_of[row.config.stop_strings or ()], []).append(row)
    return list(parts.values())


def prefill_batch(tasks: Sequence[Task], group: Group, sizes: Sizes) -> PromptRows:
    """The rows of some tasks, which have one bucket if their prompts are prefilled as a whole.

    Copies of the first task fill up the batch.
    """
    tasks = [*tasks, *[tasks[0]] * (sizes.prefill_rows - len(tasks))]
    return prompt_rows(tasks, group, sizes, sizes.columns if sizes.wide else tasks[0].width)


def prompt_rows(tasks: Sequence[Task], group: Group, sizes: Sizes, width: int) -> PromptRows:
    """The rows of some tasks, whose prompts are padded to `width` columns."""
    rows, encoder = [task.row for task in tasks], {}
    if sizes.encoder_columns is not None:
        encoder_ids, mask = padded_rows([row.input_ids for row in rows], width)
        encoder, width = {"input_ids": encoder_ids, "attention_mask": mask}, 1
    ids: Any
    mask: Any
    ids, mask = padded_rows([row.decoder_prompt for row in rows], sizes.columns)
    length: Any = np.array([len(row.decoder_prompt) for row in rows], np.int32)
    keys: Any = np.array([(t.row.seed, t.row.row_number, t.sample) for t in tasks], np.uint32)
    inputs = PrefillInputs(
        decoder_inputs={"tokens": ids[:, :width], "mask": mask[:, :width]},
        encoder_inputs=encoder,
        sequences=ids,
        mask=mask,
        start_len=length,
        cache_len=length,
        last_column=length - 1,
        keys=keys,
    )
    return PromptRows(group.strategy(tasks), group.settings(tasks), inputs)
