"""Rows that no slot can hold: diverse beams and other strategies, in batches of `jaxllm.generate`.

A batch is generated as a whole, so a row that ends early waits for the others. Rows of one batch
have all their settings in common, and prompts of one bucket.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.batch.counts import Counts
from jaxllm.batch.memory import is_exhausted
from jaxllm.batch.queue import Task
from jaxllm.batch.results import Done
from jaxllm.batch.rows import Row
from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.padded_batch import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.settings.special_tokens import checked_pad

_TOGETHER = ("beam_search", "group_beam_search", "beam_sample")
"""Strategies under which rows of a batch do not touch each other."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows that one call of `generate` can serve."""

    rows: list[Row]
    together: int
    """Most of them at once."""


def batches(model: Any, rows: Iterable[Row], slots: int, shards: int) -> list[Batch]:
    """Rows by all that they must have in common, the longest first.

    Args:
        slots: beams, of all rows of a batch, at most.
        shards: parts of a mesh that rows are split over.
    """
    alone = {"dynamic", "longrope"} & {
        getattr(getattr(model.config, "rotary", None), "rope_type", "")
    }
    found: dict[Any, list[Row]] = {}
    for row in rows:
        config, width = row.config, bucket(len(row.ids), SMALLEST_BUCKET)
        apart = bool(alone) or row.mode not in _TOGETHER or config.forced_bos_token_id is not None
        apart = apart or config.stop_strings is not None or config.max_time is not None
        key = (config, row.eos, row.new, _least(row), width, row.seed, row.index if apart else None)
        if config.do_sample and row.draw != row.index:  # a seed of its own
            key = (*key, row.index)
        found.setdefault(key, []).append(row)
    ordered = sorted(found.values(), key=lambda rows: (-rows[0].new, rows[0].index))
    fitting = [max(1, slots // rows[0].config.num_beams) for rows in ordered]
    most = [count - count % shards or count for count in fitting]
    return [Batch(rows, count) for rows, count in zip(ordered, most, strict=True)]


def run_batch(model: Any, tokenizer: Any, batch: Batch, counts: Counts) -> Iterator[Done]:
    """The texts of a batch. Where memory runs out, half as many rows at once go on."""
    waiting, together = list(batch.rows), min(batch.together, bucket(len(batch.rows), 1))
    while waiting:
        rows = waiting[:together]
        try:
            sequences = _generate(model, tokenizer, rows, together)
        except JaxLLMError as error:
            if together > 1:  # whose it is shows when each runs alone
                together = 1
                continue
            yield from _failures(rows, error)
        except jax.errors.JaxRuntimeError as error:
            if not is_exhausted(error):
                raise
            if together > 1:
                together //= 2
                counts.halvings += 1
                continue
            reason = f"num_beams, max_new_tokens: the device ran out of memory ({rows[0].new} new "
            yield from _failures(rows, InputError(reason + "tokens); lower one of the two"))
        else:
            counts.called(f"{rows[0].mode} of {together} x {_width(rows)}")
            for number, row in enumerate(rows):
                for sample in range(row.samples):
                    tokens = sequences[number * row.samples + sample]
                    yield _done(model, Task(row, sample), tokens)
        waiting = waiting[len(rows) :]


def _generate(model: Any, tokenizer: Any, rows: Sequence[Row], count: int) -> np.ndarray:
    """New columns [count * samples, N]; rows that are missing repeat the last."""
    filled = [*rows, *[rows[-1]] * (count - len(rows))]
    width = max(len(row.ids) for row in filled)
    ids: Any = np.zeros((count, width), np.int32)
    mask: Any = np.zeros((count, width), bool)
    for i, row in enumerate(filled):
        columns = slice(len(row.ids)) if model.is_encoder_decoder else slice(-len(row.ids), None)
        ids[i, columns], mask[i, columns] = row.ids, True
    out = generate(
        model,
        ids,
        mask,
        _config(rows[0]),
        key=rows[0].seed,
        row_ids=np.array([row.draw for row in filled], np.uint32),
        tokenizer=tokenizer,
    )
    start = len(rows[0].start) if model.is_encoder_decoder else width
    return np.asarray(out.sequences)[:, start:]


def _config(row: Row) -> GenerationConfig:
    """The row's settings, with its lengths as numbers of new tokens."""
    values = row.config.to_dict()
    for name in ("max_length", "min_length", "max_new_tokens", "min_new_tokens"):
        values.pop(name, None)
    config = GenerationConfig.from_dict(values).replace(
        max_new_tokens=row.new, eos_token_id=list(row.eos) or None
    )
    least = _least(row)
    return config.replace(min_new_tokens=least) if least else config


def _least(row: Row) -> int:
    least = row.config.min_new_tokens
    return max(row.config.min_length - len(row.start), 0) if least is None else least


def _width(rows: Sequence[Row]) -> int:
    return bucket(max(len(row.ids) for row in rows), SMALLEST_BUCKET)


def _failures(rows: Sequence[Row], error: JaxLLMError) -> Iterator[Done]:
    for row in rows:
        for sample in range(row.samples):
            yield from Done.failed(Task(row, sample), error)


def _done(model: Any, task: Task, columns: np.ndarray) -> Done:
    """A text, without the pads after its end."""
    row, tokens = task.row, columns.tolist()
    for count, token in enumerate(tokens, start=1):
        if token in row.eos:
            return Done(task, tokens[:count], "eos")
    pad = checked_pad(model, row.config, row.eos) or 0
    if row.config.stop_strings is not None or row.config.max_time is not None:
        while len(tokens) > 1 and tokens[-1] == pad:
            tokens.pop()
    return Done(task, tokens, "length" if len(tokens) == row.new else "stop")
