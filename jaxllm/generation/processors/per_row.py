"""Processors whose numbers are another for each row of a batch.

Rows that run side by side may each ask for a temperature of their own. Their lists of processors
are built one by one, as for a call of one row, and then stacked: every leaf gets an axis of rows.
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
"""These take an array of one number a row as it is. A filter under `vmap` would do the work of both
branches of each of its conditions."""


def signature(processors: LogitsProcessorList) -> Any:
    """What two lists must have in common to be stacked: types, and shapes of leaves; hashable."""
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
    """Processors that may be called, from those of `stacked`: each row meets its own numbers."""
    return LogitsProcessorList(map(RowProcessor, processors))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowProcessor:
    """A processor with a set of numbers for each row."""

    stacked: Any

    def __call__(
        self,
        input_ids: Int[Array, "BM L"],
        scores: Scores,
        cur_len: Int[Array, " R"],
        **_: Any,
    ) -> Scores:
        """Scores [B * M, V] of M texts a row, which begin at column 0 and are equally long."""
        processor, cur_len = for_texts(input_ids, cur_len, self.stacked)
        if isinstance(processor, BATCHED):
            return processor(input_ids, scores, cur_len)
        return jax.vmap(_one_row)(processor, input_ids, scores, cur_len)


def for_texts(
    input_ids: Int[Array, "BM L"], cur_len: Int[Array, " R"], numbers: Any
) -> tuple[Any, Int[Array, " BM"]]:
    """What a processor's or criterion's rows have, repeated for each of the texts of a row."""
    texts = input_ids.shape[0] // cur_len.shape[0]
    return jax.tree.map(lambda x: jnp.repeat(x, texts, axis=0), (numbers, cur_len))


def _one_row(processor: Any, input_ids: Array, scores: Array, cur_len: Array) -> Array:
    return processor(input_ids[None], scores[None], cur_len)[0]
