"""Logits processors with per-row parameters.

Rows of one program may have different temperatures, penalties and so on. The list of processors of
each row is built as for a call of one row; then the lists are stacked: each leaf gets a row axis.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.generation.processors.base import LogitsProcessor, LogitsProcessorList, Scores
from jaxllm.generation.processors.warpers import Filter, TemperatureLogitsWarper

T = TypeVar("T")
BATCHED = (Filter, TemperatureLogitsWarper)
"""Processor types that accept arrays with one value per row and so need no `vmap`. Under `vmap`, a
filter would run both branches of each `lax.cond`."""


def signature(processors: LogitsProcessorList) -> Hashable:
    """Types and leaf shapes of a list, hashable; lists with equal signatures can be stacked."""
    leaves, structure = jax.tree.flatten(processors)
    return structure, tuple((np.shape(leaf), np.result_type(leaf).name) for leaf in leaves)


def stack_lists(lists: Sequence[LogitsProcessorList]) -> LogitsProcessorList:
    """Stacks the leaves of lists with equal `signature` along a first row axis, on the host.

    >>> a, b = (LogitsProcessorList([TemperatureLogitsWarper(t)]) for t in (0.5, 2.0))
    >>> stack_lists([a, b])[0].temperature.tolist()
    [0.5, 2.0]
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lists)


def row_by_row(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Wraps the result of `stack_lists` so that each row uses its own parameters when called."""
    return LogitsProcessorList(map(RowProcessor, processors))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowProcessor:
    """Processor with one set of parameters per row; not computed while all rows are neutral."""

    stacked: Any

    def __call__(
        self,
        input_ids: Int[Array, "BM L"],
        scores: Scores,
        cur_len: Int[Array, " R"],
        **_: object,
    ) -> Scores:
        """Scores [B * M, V]: M sequences per row, equally long and starting at column 0."""
        processor, lengths = per_sequence(input_ids, cur_len, self.stacked)
        if isinstance(processor, BATCHED):
            return processor(input_ids, scores, lengths)

        def apply() -> Scores:
            return jax.vmap(_one_row)(processor, input_ids, scores, lengths)

        # The size is given because some processors have no parameters.
        neutral = jax.vmap(_is_neutral, axis_size=len(cur_len))(self.stacked)
        return apply() if neutral is None else jax.lax.cond(neutral.all(), lambda: scores, apply)


def per_sequence(
    input_ids: Int[Array, "BM L"], cur_len: Int[Array, " R"], parameters: T
) -> tuple[T, Int[Array, " BM"]]:
    """Repeats the parameters and length of each row for each of its M sequences."""
    count = input_ids.shape[0] // cur_len.shape[0]
    return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), (parameters, cur_len))


def _is_neutral(processor: object) -> Bool[Array, ""] | None:
    return processor.is_neutral() if isinstance(processor, LogitsProcessor) else None


def _one_row(processor: Any, input_ids: Array, scores: Array, cur_len: Array) -> Array:
    return processor(input_ids[None], scores[None], cur_len)[0]
