"""Static batches of `jaxllm.generate`, for rows that cannot run in slots, such as diverse beams.

`BatchGenerator` runs them after all pools of slots.

A batch finishes as a whole, so a row that ends early waits for the others. Rows of a batch share
all settings and the prompt bucket.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.row_groups import FinishedSequence, Task
from jaxllm.batch.rows import BatchRow
from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.generation.generate import generate
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET, is_exhausted, run_in_batches
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers.tokenizer import Tokenizer

INDEPENDENT_MODES = ("beam_search", "beam_sample", "group_beam_search")
"""Modes whose rows do not depend on the other rows of a static batch."""
LONE_FIELDS = ("max_time", "stop_strings", "forced_bos_token_id")
"""Fields whose effect depends on the other rows of a static batch."""


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
) -> Iterator[FinishedSequence]:
    """Yields the finished sequences of rows that `static_batches` put together. If a call fails,
    its rows run one by one, so that only rows that fail alone get an error.

    Args:
        slots: maximum number of beams of a call, over all its rows.
        shards: number of shards of the row axis on a mesh.
    """
    size = max(1, slots // rows[0].config.num_beams)
    batch_size = min(size - size % shards or size, bucket(len(rows), 1))
    samples = rows[0].samples

    def run(rows: list[BatchRow]) -> Sequence[list[tuple[list[int], str]] | JaxLLMError]:
        """The new tokens and the finish reason of each row's samples."""
        counts.doing = f"generating for {len(rows)} rows at once"
        try:
            ends = _generate(model, tokenizer, rows)
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
        return [ends[i : i + samples] for i in range(0, len(ends), samples)]

    results = run_in_batches(
        run,
        rows,
        batch_size,
        length=lambda row: len(row.input_ids),
        on_halving=counts.add_halving,
    )
    for number, result in results:
        row = rows[number]
        for sample in range(row.samples):
            task = Task(row, sample)
            if isinstance(result, JaxLLMError):
                yield from FinishedSequence.failed(task, result)
            else:
                yield FinishedSequence(task, *result[sample])


def _generate(
    model: GenerativeModel, tokenizer: Tokenizer | None, rows: Sequence[BatchRow]
) -> list[tuple[list[int], str]]:
    """New tokens and finish reasons of all samples of some rows."""
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
    return [*zip(out.new_tokens(prompt_columns), out.finish_reason_names(), strict=True)]


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
