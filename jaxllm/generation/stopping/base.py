"""Stopping criteria: the base class, the list, and criteria for some rows of a batch.

Like logits processors they are pytrees of numbers and pure functions of the tokens so far, inside
the compiled loop. After each new token, a criterion says which rows end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.processors.base import (
    History,
    Scores,
    accepted,
    logits_processor,
    tuple_of_callables,
)
from jaxllm.generation.processors.per_row import per_sequence

Done: TypeAlias = Bool[Array, " B"]

stopping_criterion = logits_processor
"""Makes a class a frozen dataclass and a pytree; a criterion is one just as a processor is."""


class StoppingCriteria:
    """Base class of criteria: decides which rows end with their newest token.

    Called as ``criterion(input_ids, scores, cur_len)``, under ``jit``, ``vmap`` and
    ``lax.while_loop``. Subclasses define :meth:`reached`, or ``__call__`` itself.
    """

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: Int[Array, " ..."] | int,
        *,
        mask: Bool[Array, "B L"] | None = None,
        length: Int[Array, " ..."] | int | None = None,
        **_: Any,
    ) -> Done:
        """Which rows end.

        Args:
            input_ids: int32 ``[B, L]``, a buffer whose first ``cur_len`` columns hold tokens, the
                newest token the last of them.
            scores: ``[B, V]``, those that the newest token was chosen by. (transformers passes the
                scores of all steps.)
            cur_len: The number of columns in use, prompt included: an int, a traced scalar, or one
                per row, ``[B]``.
            mask: Which columns hold real tokens; None: all of the first ``cur_len``.
            length: The length that rules about lengths count, where it is not ``cur_len``.

        Returns:
            bool ``[B]``.
        """
        return self.reached(History.of(input_ids, cur_len, mask, length), scores)

    def reached(self, history: History, scores: Scores) -> Done:
        """The rule itself."""
        raise NotImplementedError(f"{type(self).__name__} defines neither reached nor __call__")


@tuple_of_callables
class StoppingCriteriaList(tuple[Callable[..., Done], ...]):
    """A row ends when any of the criteria says so; itself a pytree, called like one criterion.

    Unlike the list of transformers it cannot be appended to: add tuples instead. Members may be any
    traceable callable ``f(input_ids, scores, cur_len)`` with a result of shape ``[B]`` or ``[]``;
    each is passed those of the keyword arguments that it accepts. A callable that is not a pytree
    is part of the program, compared by identity.

    >>> import jax.numpy as jnp
    >>> from jaxllm.generation.stopping import EosTokenCriteria, MaxLengthCriteria
    >>> criteria = StoppingCriteriaList([MaxLengthCriteria(5), EosTokenCriteria(7)])
    >>> criteria(jnp.array([[3, 7], [7, 3]]), jnp.zeros((2, 9)), 2).tolist()
    [True, False]
    """

    __slots__ = ()

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: Int[Array, " ..."] | int,
        **kwargs: Any,
    ) -> Done:
        """bool ``[B]``; the arguments are those of :class:`StoppingCriteria`."""
        done = jnp.zeros(input_ids.shape[0], bool)
        for criterion in self:
            found = criterion(input_ids, scores, cur_len, **accepted(criterion, kwargs))
            done |= checked_done(criterion, found, done.shape)
        return done


def checked_done(criterion: Any, found: Any, shape: tuple[int, ...]) -> Done:
    """The result of a criterion, checked to be one boolean per row, or one for all."""
    kind = np.dtype(bool) if isinstance(found, bool) else getattr(found, "dtype", None)
    if kind != np.dtype(bool) or np.shape(found) not in (shape, ()):
        what = type(found).__name__ if kind is None else f"{kind}{list(np.shape(found))}"
        name = getattr(criterion, "__name__", type(criterion).__name__)
        raise InputError(
            f"stopping_criteria: {name} must return booleans {list(shape)}, but returned {what}"
        )
    return jnp.asarray(found)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCriterion:
    """A stopping criterion for some rows of a batch."""

    criterion: Any
    rows: Bool[Array, " R"]

    def __call__(
        self, input_ids: Int[Array, "BM L"], scores: Scores, cur_len: Int[Array, " R"], **_: Any
    ) -> Done:
        """Which sequences end: M per row, which begin at column 0 and are equally long."""
        rows, cur_len = per_sequence(input_ids, cur_len, self.rows)
        return self.criterion(input_ids, scores, cur_len) & rows


def for_rows(criteria: StoppingCriteriaList, rows: Bool[Array, "R C"]) -> StoppingCriteriaList:
    """C criteria, each for the rows that are true in its column of ``rows``."""
    return StoppingCriteriaList(
        RowCriterion(criterion, rows[:, number]) for number, criterion in enumerate(criteria)
    )
