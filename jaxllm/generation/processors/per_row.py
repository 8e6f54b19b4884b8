"""Logits processors with per-row parameters.

Rows of one program may have different temperatures, penalties, .... Their lists of processors are
built one by one, as for a call of one row, and then stacked: every leaf gets an axis of rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxllm.generation.processors.base import LogitsProcessorList, Scores
from jaxllm.generation.processors.warpers import Filter, TemperatureLogitsWarper

BATCHED = (Filter, TemperatureLogitsWarper)
"""Processors that take arrays with one number per row themselves. Under `vmap`, a filter would run
both branches of each of its conditions."""


def signature(processors: LogitsProcessorList) -> Any:
    """Types and leaf shapes of a list, hashable: lists with the same signature can be stacked."""
    leaves, structure = jax.tree.flatten(processors)
    return structure, tuple((np.shape(leaf), np.result_type(leaf).name) for leaf in leaves)


def stacked(lists: Sequence[LogitsProcessorList]) -> LogitsProcessorList:
    """One list whose leaves have a first axis of rows, from lists of one `signature`; on the host.

    >>> a, b = (LogitsProcessorList([TemperatureLogitsWarper(t)]) for t in (0.5, 2.0))
    >>> stacked([a, b])[0].temperature.tolist()
    [0.5, 2.0]
    """
    return jax.tree.map(lambda *leaves: np.stack(leaves), *lists)


def row_by_row(processors: LogitsProcessorList) -> LogitsProcessorList:
    """Callable processors from the result of `stacked`: each row uses its own parameters."""
    return LogitsProcessorList(map(RowProcessor, processors))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowProcessor:
    """A processor with a set of parameters for each row."""

    stacked: Any

    def __call__(
        self,
        input_ids: Int[Array, "BM L"],
        scores: Scores,
        cur_len: Int[Array, " R"],
        **_: Any,
    ) -> Scores:
        """Scores [B * M, V] of M sequences per row, all equally long and from column 0 on."""
        processor, cur_len = per_sequence(input_ids, cur_len, self.stacked)
        if isinstance(processor, BATCHED):
            return processor(input_ids, scores, cur_len)
        return jax.vmap(_one_row)(processor, input_ids, scores, cur_len)


def per_sequence(
    input_ids: Int[Array, "BM L"], cur_len: Int[Array, " R"], parameters: Any
) -> tuple[Any, Int[Array, " BM"]]:
    """The parameters of each row, and its length, repeated for each of its M sequences."""
    count = input_ids.shape[0] // cur_len.shape[0]
    return jax.tree.map(lambda x: jnp.repeat(x, count, axis=0), (parameters, cur_len))


def _one_row(processor: Any, input_ids: Array, scores: Array, cur_len: Array) -> Array:
    return processor(input_ids[None], scores[None], cur_len)[0]
