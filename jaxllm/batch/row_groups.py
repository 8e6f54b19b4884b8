"""Groups of rows that share programs, and the arrays of their prompts and settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Int

from jaxllm.batch.queue import Task
from jaxllm.batch.rows import Row
from jaxllm.batch.sizes import Sizes
from jaxllm.batch.slot_placement import place
from jaxllm.batch.slot_strategies import BeamSlots, SampleSlots, SlotStrategy
from jaxllm.batch.slots import Arrivals, RowSettings
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import NO_TOKEN, bucket
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.build import build_processors
from jaxllm.generation.processors.per_row import signature, stack_lists
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.lengths import MOST_COLUMNS
from jaxllm.generation.stopping import StoppingCriteriaList, StopStringCriteria

NEUTRAL: Mapping[str, Any] = {
    name: field.per_row for name, field in FIELDS.items() if field.per_row is not None
}
"""Per-row fields and their neutral values. If one row of a program uses such a field, the program
applies it to all rows, with the neutral value for the others."""
_WARPERS = frozenset(name for name in NEUTRAL if FIELDS[name].only_sampling)
_ALWAYS_SAMPLED = frozenset(name for name in NEUTRAL if FIELDS[name].always)
_NO_SLOTS = frozenset(name for name, field in FIELDS.items() if not field.slots)
"""Fields that need a static batch; rows in slots must have neutral or default values."""
_SINGLE, _BEAMS = ("greedy_search", "sample"), ("beam_search", "beam_sample")
_CACHES = (None, "static", "dynamic")
MAX_STOP_LISTS = 8
"""Lists of stop strings in one program: each is looked for in every row."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Rows that share one set of compiled programs."""

    number: int
    rows: tuple[Row, ...]
    strategy: SlotStrategy
    shared: tuple[str, ...]
    """Fields of `NEUTRAL` that the program applies."""
    stop_lists: tuple[tuple[str, ...], ...]
    eos_width: int

    def tasks(self) -> list[Task]:
        """One task for each sample of a row, or one for all beams of a row."""
        if self.strategy.beams > 1:
            return [Task(row, 0, returns=row.samples) for row in self.rows]
        return [Task(row, sample) for row in self.rows for sample in range(row.samples)]

    def criteria(self, tokenizer: Any, mesh: Mesh | None) -> StoppingCriteriaList:
        """One stopping criterion for each list of stop strings, replicated over the mesh."""
        lists = StoppingCriteriaList(StopStringCriteria(tokenizer, s) for s in self.stop_lists)
        replicated = None if mesh is None else NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda x: place(x, replicated), lists)

    def settings(self, rows: Sequence[Row], vocab_size: int) -> RowSettings:
        """Settings of the given rows of the group, as host arrays."""
        lists = [processors_of(row, self.shared, vocab_size) for row in rows]
        eos = np.full((len(rows), self.eos_width), NO_TOKEN, np.int32)
        watched = np.zeros((len(rows), len(self.stop_lists)), bool)
        for i, row in enumerate(rows):
            eos[i, : len(row.eos)] = row.eos
            if row.config.stop_strings is not None:
                watched[i, self.stop_lists.index(row.config.stop_strings)] = True
        arrays = {
            "eos": eos,
            "max_length": np.array([row.max_length for row in rows], np.int32),
            "sampled": np.array([bool(row.config.do_sample) for row in rows]),
            "watched": watched,
            "length_penalty": np.array([row.config.length_penalty for row in rows], np.float32),
        }
        return RowSettings(stack_lists(lists), **arrays)


def fits_slots(row: Row) -> bool:
    """True if a row can run in a slot: greedy search or sampling, with or without beams, and no
    field that needs a static batch (`Field.slots`)."""
    if row.mode not in _SINGLE and not (row.mode in _BEAMS and _beams_fit(row)):
        return False
    values = row.config.to_dict()
    if values.pop("cache_implementation", None) not in _CACHES:
        return False
    return not any(_acts(name, value) for name, value in values.items() if name in _NO_SLOTS)


def check_processors(row: Row, vocab_size: int) -> None:
    """Raises the errors of `generate` for invalid processor settings, such as token ids outside the
    vocabulary."""
    if fits_slots(row):
        processors_of(row, tuple(NEUTRAL), vocab_size)


def _beams_fit(row: Row) -> bool:
    """Whether the row's beams fit the slots; `generate` raises for those that do not."""
    new_token_bucket = bucket(row.max_new_tokens, SMALLEST_BUCKET)
    columns = bucket(row.max_length, SMALLEST_BUCKET)
    columns += (row.config.num_beams - 1) * new_token_bucket
    return columns <= MOST_COLUMNS and not row.config.low_memory


def _acts(name: str, value: Any) -> bool:
    field = FIELDS[name]
    return value is not None and value != field.neutral and value != field.default


def groups(rows: Iterable[Row], vocab_size: int) -> list[Group]:
    """Groups rows by the programs that they need; most batches are one group."""
    strategies: dict[SlotStrategy, list[Row]] = {}
    for row in rows:
        strategies.setdefault(_strategy(row), []).append(row)
    parts: list[tuple[SlotStrategy, tuple[str, ...], list[Row]]] = []
    for strategy, members in strategies.items():
        shared, sampling = _shared(members)
        strategy = dataclasses.replace(strategy, sampling=sampling)
        for alike in _by_processors(members, shared, vocab_size):
            parts.extend((strategy, shared, part) for part in _by_stop_lists(alike))
    return [_group(number, *part) for number, part in enumerate(parts)]


def _strategy(row: Row) -> SlotStrategy:
    """Strategy of a row, the same for all rows of a group. Greedy and sampled rows share one; beam
    search and beam sampling do not."""
    config, allow_nonfinite = row.config, bool(row.config.remove_invalid_values)
    if row.mode not in _BEAMS:
        return SampleSlots(sampling=False, allow_nonfinite=allow_nonfinite)
    return BeamSlots(
        beams=config.num_beams,
        early_stopping=config.early_stopping,
        sampling=bool(config.do_sample),
        allow_nonfinite=allow_nonfinite,
    )


def _by_processors(
    rows: Sequence[Row], shared: tuple[str, ...], vocab_size: int
) -> Iterable[list[Row]]:
    """Splits rows into parts whose processors differ only in per-row numbers."""
    signatures: dict[GenerationConfig, Any] = {}
    found: dict[Any, list[Row]] = {}
    for row in rows:
        if row.config not in signatures:
            signatures[row.config] = signature(processors_of(row, shared, vocab_size))
        found.setdefault(signatures[row.config], []).append(row)
    return found.values()


def _group(
    number: int, strategy: SlotStrategy, shared: tuple[str, ...], rows: Sequence[Row]
) -> Group:
    lists = {strings for row in rows if (strings := row.config.stop_strings) is not None}
    return Group(
        number=number,
        rows=tuple(rows),
        strategy=strategy,
        shared=shared,
        stop_lists=tuple(sorted(lists)),
        eos_width=bucket(max(len(row.eos) for row in rows), 8),
    )


def _by_stop_lists(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows, in parts of no more than `MAX_STOP_LISTS` different lists of stop strings."""
    lists = sorted({row.config.stop_strings or () for row in rows})
    part = {stops: i // MAX_STOP_LISTS for i, stops in enumerate(lists)}
    parts: dict[int, list[Row]] = {}
    for row in rows:
        parts.setdefault(part[row.config.stop_strings or ()], []).append(row)
    return list(parts.values())


def _shared(rows: Sequence[Row]) -> tuple[tuple[str, ...], bool]:
    """The fields of `NEUTRAL` that any row uses, and True if any row is sampled."""
    sampling = any(row.config.do_sample for row in rows)
    asked = set(_ALWAYS_SAMPLED) if sampling else set()
    for config in {row.config for row in rows}:
        values = _numbers(config, NEUTRAL, 0)
        asked |= {name for name, value in values.items() if value != NEUTRAL[name]}
    return tuple(sorted(asked)), sampling


def _numbers(config: GenerationConfig, names: Iterable[str], start: int) -> dict[str, Any]:
    """The row's values of fields of `NEUTRAL`.

    Args:
        start: length of its decoder prompt; `min_length` minus this counts as
            `min_new_tokens`.
    """
    values = {}
    for name in names:
        value = getattr(config, name)
        if name == "min_new_tokens" and value is None:
            value = max(config.min_length - start, 0)
        idle = value is None or (name in _WARPERS and not config.do_sample)
        values[name] = NEUTRAL[name] if idle else value
    return values


def processors_of(row: Row, shared: tuple[str, ...], vocab_size: int) -> LogitsProcessorList:
    """The row's logits processors, including those of all `shared` fields."""
    off = {name: FIELDS[name].neutral for name in {*NEUTRAL, *_NO_SLOTS} - set(shared)}
    # `from_dict`: values read from a file, unlike arguments, do not add a processor by being set.
    unset = {name: value for name, value in off.items() if value is not None}
    config = row.config.merge(GenerationConfig.from_dict({**unset, "min_length": 0}))
    config = config.replace(
        **{name: None for name, value in off.items() if value is None},
        **_numbers(row.config, shared, len(row.start)),
        do_sample=any(name in _WARPERS for name in shared),
    )
    return build_processors(
        config,
        prompt_len=len(row.start),
        max_length=row.max_length,
        eos_token_id=row.eos,
        vocab_size=vocab_size,
    )


def lay_out(tasks: Sequence[Task], group: Group, sizes: Sizes, vocab_size: int) -> Arrivals:
    """The arrays of some tasks of one bucket; the first task fills up missing ones."""
    count = sizes.arrivals
    filled = [*tasks, *[tasks[0]] * (count - len(tasks))]
    rows = [task.row for task in filled]
    width, encoder = tasks[0].width, {}
    if sizes.source is not None:
        mask = np.arange(width) < np.array([[len(row.ids)] for row in rows])
        encoder = {"input_ids": padded([row.ids for row in rows], width), "attention_mask": mask}
        width = 1
    arrays: dict[str, Any] = {
        "tokens": padded([row.start for row in rows], width),
        "start": np.array([len(row.start) for row in rows], np.int32),
        "draws": np.array([(t.row.seed, t.row.row_number, t.sample) for t in filled], np.uint32),
    }
    return Arrivals(**arrays, settings=group.settings(rows, vocab_size), encoder=encoder)


def padded(rows: Sequence[Int[np.ndarray, " T"]], width: int) -> Int[np.ndarray, "R W"]:
    """Rows padded on the right with 0.

    >>> padded([np.array([5, 6]), np.array([7])], 3).tolist()
    [[5, 6, 0], [7, 0, 0]]
    """
    ids = np.zeros((len(rows), width), np.int32)
    for line, row in zip(ids, rows, strict=True):
        line[: len(row)] = row
    return ids
