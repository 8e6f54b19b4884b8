"""Which rows can run in slots, and the logits processors with which a row runs there.

Rows of one program may differ in the fields of `per_row_fields`. If one row uses such a field, the
program applies it to all rows, with the neutral value (`Field.neutral`) for the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from jaxllm.batch.rows import BatchRow
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.processors import LogitsProcessor, LogitsProcessorList
from jaxllm.generation.processors.build import (
    REGISTERED,
    WHEN_SAMPLING,
    ProcessorInputs,
    build_processors,
)
from jaxllm.generation.settings.config import FIELDS, GenerationConfig
from jaxllm.generation.settings.resolve import MAX_COLUMNS

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
    """True if the row's beams fit the slots; `generate` raises for those that do not."""
    new_token_bucket = bucket(row.max_new_tokens, SMALLEST_BUCKET)
    columns = bucket(row.max_length, SMALLEST_BUCKET)
    columns += (row.config.num_beams - 1) * new_token_bucket
    return columns <= MAX_COLUMNS and not row.config.low_memory


def check_processors(row: BatchRow, vocab_size: int) -> None:
    """Raises the errors of `generate` for invalid processor settings, such as token ids outside the
    vocabulary."""
    if fits_slots(row):
        processors_of(row, tuple(per_row_fields()), vocab_size)


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


def processors_of(
    row: BatchRow,
    shared_fields: tuple[str, ...],
    vocab_size: int,
    extra: Iterable[LogitsProcessor] = (),
) -> LogitsProcessorList:
    """The row's logits processors, including those of all `shared_fields`.

    Args:
        extra: further processors, which stand where `generate` has those of its caller.
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
