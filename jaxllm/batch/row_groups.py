"""Groups of rows that share programs, their tasks, and the arrays of their prompts and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.batch.row_processors import processors_of, used_fields
from jaxllm.batch.rows import BatchRow
from jaxllm.batch.slot_strategies import BeamSlotStrategy, SampleSlotStrategy, SlotStrategy
from jaxllm.batch.slots import PrefillBatch, RowSettings, Sizes, place
from jaxllm.common.errors import JaxLLMError
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET, padded_rows
from jaxllm.generation.inputs.values import NO_TOKEN, bucket
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.base import RowProcessors, signature
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping import StoppingCriteriaList, StopStringCriteria
from jaxllm.tokenizers.tokenizer import Tokenizer

MAX_STOP_LISTS = 8
"""Lists of stop strings in one program: each is looked for in every row."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """A row, or one of its samples, that takes a slot."""

    row: BatchRow
    sample: int
    num_sequences: int = 1
    """Sequences that it ends with; beam search may return several."""

    @property
    def samples(self) -> list[Task]:
        """A task for each sequence that it ends with."""
        if self.num_sequences == 1:
            return [self]
        return [Task(self.row, sample) for sample in range(self.num_sequences)]

    @property
    def width(self) -> int:
        """Columns of its prompt's bucket."""
        return bucket(len(self.row.input_ids), SMALLEST_BUCKET)


@dataclasses.dataclass(frozen=True)
class FinishedSequence:
    """A sequence that has ended."""

    task: Task
    tokens: list[int]
    """New tokens."""
    reason: str
    error: JaxLLMError | None = None
    """Why there are no tokens."""

    @staticmethod
    def failed(task: Task, error: JaxLLMError) -> list[FinishedSequence]:
        """All sequences of a task that failed."""
        return [FinishedSequence(sample, [], "", error) for sample in task.samples]


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
    return sizes.with_slots(min(slots, bucket(len(tasks), 1)))


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that share one set of compiled programs."""

    number: int
    rows: tuple[BatchRow, ...]
    strategy: SlotStrategy
    shared_fields: tuple[str, ...]
    """Per-row fields that the program applies."""
    stop_lists: tuple[tuple[str, ...], ...]
    eos_width: int

    def tasks(self) -> list[Task]:
        """One task for each sample of a row, or one for all beams of a row."""
        if self.strategy.beams > 1:
            return [Task(row, 0, num_sequences=row.samples) for row in self.rows]
        return [Task(row, sample) for row in self.rows for sample in range(row.samples)]

    def criteria(self, tokenizer: Tokenizer | None, mesh: Mesh | None) -> StoppingCriteriaList:
        """One stopping criterion for each list of stop strings, replicated over the mesh."""
        if tokenizer is None:  # `RowReader` refuses stop strings
            return StoppingCriteriaList()
        criteria = StoppingCriteriaList(StopStringCriteria(tokenizer, s) for s in self.stop_lists)
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: place(x, replicated), criteria)

    def processors(self, row: BatchRow, vocab_size: int) -> LogitsProcessorList:
        """The logits processors of a row of the group."""
        return processors_of(row, self.shared_fields, vocab_size)

    def settings(self, rows: Sequence[BatchRow], vocab_size: int) -> RowSettings:
        """Settings of the given rows of the group, as host arrays."""
        processors = [self.processors(row, vocab_size) for row in rows]
        eos = np.full((len(rows), self.eos_width), NO_TOKEN, np.int32)
        uses_stop_list = np.zeros((len(rows), len(self.stop_lists)), bool)
        for i, row in enumerate(rows):
            eos[i, : len(row.eos)] = row.eos
            if row.config.stop_strings is not None:
                uses_stop_list[i, self.stop_lists.index(row.config.stop_strings)] = True
        arrays = {
            "eos": eos,
            "max_length": np.array([row.max_length for row in rows], np.int32),
            "sampled_rows": np.array([bool(row.config.do_sample) for row in rows]),
            "uses_stop_list": uses_stop_list,
            "length_penalty": np.array([row.config.length_penalty for row in rows], np.float32),
        }
        return RowSettings(RowProcessors.of(processors), **arrays)


def groups(rows: Iterable[BatchRow], vocab_size: int) -> list[Group]:
    """Groups rows by the programs that they need; most batches are one group."""
    strategies: dict[SlotStrategy, list[BatchRow]] = {}
    for row in rows:
        strategies.setdefault(_strategy(row), []).append(row)
    result: list[Group] = []
    for strategy, strategy_rows in strategies.items():
        shared_fields = used_fields(strategy_rows)
        sampling = any(row.config.do_sample for row in strategy_rows)
        strategy = dataclasses.replace(strategy, sampling=sampling)
        for processor_rows in _by_processors(strategy_rows, shared_fields, vocab_size):
            for group_rows in _by_stop_lists(processor_rows):
                lists = (row.config.stop_strings for row in group_rows)
                group = Group(
                    number=len(result),
                    rows=tuple(group_rows),
                    strategy=strategy,
                    shared_fields=shared_fields,
                    stop_lists=tuple(sorted({strings for strings in lists if strings is not None})),
                    eos_width=bucket(max(len(row.eos) for row in group_rows), 8),
                )
                result.append(group)
    return result


def _strategy(row: BatchRow) -> SlotStrategy:
    """Strategy of a row, the same for all rows of a group. Greedy and sampled rows share one; beam
    search and beam sampling do not."""
    config, allow_nonfinite = row.config, bool(row.config.remove_invalid_values)
    if config.num_beams == 1:
        return SampleSlotStrategy(sampling=False, allow_nonfinite=allow_nonfinite)
    return BeamSlotStrategy(
        beams=config.num_beams,
        early_stopping=config.early_stopping,
        sampling=bool(config.do_sample),
        allow_nonfinite=allow_nonfinite,
    )


def _by_processors(
    rows: Sequence[BatchRow], shared_fields: tuple[str, ...], vocab_size: int
) -> Iterable[list[BatchRow]]:
    """Splits rows into parts whose processors differ only in per-row numbers."""
    signatures: dict[GenerationConfig, Any] = {}
    parts: dict[Any, list[BatchRow]] = {}
    for row in rows:
        if row.config not in signatures:
            signatures[row.config] = signature(processors_of(row, shared_fields, vocab_size))
        parts.setdefault(signatures[row.config], []).append(row)
    return parts.values()


def _by_stop_lists(rows: Sequence[BatchRow]) -> list[list[BatchRow]]:
    """Splits rows into parts of no more than `MAX_STOP_LISTS` different lists of stop strings."""
    stop_lists = sorted({row.config.stop_strings or () for row in rows})
    part_of = {stop_list: i // MAX_STOP_LISTS for i, stop_list in enumerate(stop_lists)}
    parts: dict[int, list[BatchRow]] = {}
    for row in rows:
        parts.setdefault(part_of[row.config.stop_strings or ()], []).append(row)
    return list(parts.values())


def prefill_batch(
    tasks: Sequence[Task], group: Group, sizes: Sizes, vocab_size: int
) -> PrefillBatch:
    """The arrays of some tasks of one bucket; copies of the first task fill up the batch."""
    tasks = [*tasks, *[tasks[0]] * (sizes.prefill_rows - len(tasks))]
    return padded_prompts(tasks, group, sizes, vocab_size, tasks[0].width)


def padded_prompts(
    tasks: Sequence[Task], group: Group, sizes: Sizes, vocab_size: int, width: int
) -> PrefillBatch:
    """The arrays of some tasks, whose prompts are padded to `width` columns."""
    rows, encoder = [task.row for task in tasks], {}
    if sizes.encoder_columns is not None:
        encoder_ids, mask = padded_rows([row.input_ids for row in rows], width)
        encoder, width = {"input_ids": encoder_ids, "attention_mask": mask}, 1
    arrays: dict[str, Any] = {
        "tokens": padded_rows([row.decoder_prompt for row in rows], width)[0],
        "prompt_length": np.array([len(row.decoder_prompt) for row in rows], np.int32),
        "key_data": np.array([(t.row.seed, t.row.row_number, t.sample) for t in tasks], np.uint32),
    }
    return PrefillBatch(**arrays, settings=group.settings(rows, vocab_size), encoder=encoder)
