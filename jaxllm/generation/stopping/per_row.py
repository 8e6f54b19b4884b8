"""Stopping criteria that hold for some rows of a batch."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Bool, Int

from jaxllm.generation.processors.base import Scores
from jaxllm.generation.processors.per_row import for_texts
from jaxllm.generation.stopping.base import Done, StoppingCriteriaList


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCriterion:
    """A criterion that ends the texts of those rows which it is for."""

    criterion: Any
    rows: Bool[Array, " B"]

    def __call__(
        self, input_ids: Int[Array, "BM L"], scores: Scores, cur_len: Int[Array, " B"], **_: Any
    ) -> Done:
        """Which of M texts a row end; they begin at column 0 and are equally long."""
        rows, cur_len = for_texts(input_ids, cur_len, self.rows)
        return self.criterion(input_ids, scores, cur_len) & rows


def watched(criteria: StoppingCriteriaList, rows: Bool[Array, "B C"]) -> StoppingCriteriaList:
    """C criteria, each for the rows of its column."""
    return StoppingCriteriaList(
        RowCriterion(criterion, rows[:, number]) for number, criterion in enumerate(criteria)
    )
