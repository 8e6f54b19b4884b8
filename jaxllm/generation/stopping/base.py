"""Stopping criteria: base class, list, and criteria for some rows of a batch.

Like logits processors, they are pytrees and pure functions of the tokens so far, inside the
compiled loop. After each new token, a criterion returns a mask of the rows that end.
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
    CurLen,
    History,
    Scores,
    accepted_arguments,
    describe_array,
    logits_processor,
    name_of,
    per_sequence,
    tuple_of_callables,
)

Done: TypeAlias = Bool[Array, " B"]

stopping_criterion = logits_processor
"""Makes a class a frozen dataclass and a pytree; see :func:`logits_processor`."""


class StoppingCriteria:
    """Base class of criteria: returns a mask of the rows that end with their newest token.

    Called as ``criterion(input_ids, scores, cur_len)``, under ``jit``, ``vmap`` and
    ``lax.while_loop``. Subclasses define :meth:`reached`, or ``__call__`` itself.
    """

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores | None,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        length: CurLen = None,
        **_: Any,
    ) -> Done:
        """Mask of the rows that end.

        Args:
            input_ids: int32 ``[B, L]``, a buffer whose first ``cur_len`` columns hold tokens; the
                last of these is the newest token.
            scores: ``[B, V]``, the scores that the newest token was chosen by. (transformers passes
                the scores of all steps.)
            cur_len: the number of columns in use, prompt included: an int, a traced scalar, or one
                per row, ``[B]``. None: all.
            mask: bool ``[B, L]``, True at real tokens; None: all of the first ``cur_len`` columns.
            length: the length that rules about lengths use; None: ``cur_len``.

        Returns:
            bool ``[B]``.
        """
        return self.reached(History.of(input_ids, cur_len, mask, length), scores)

    def reached(self, history: History, scores: Scores | None) -> Done:
        """Applies the rule; bool ``[B]``."""
        raise NotImplementedError(f"{type(self).__name__} defines neither reached nor __call__")


@tuple_of_callables
class StoppingCriteriaList(tuple[Callable[..., Done], ...]):
    """List of criteria: a row ends when any of them is True. A pytree, called like one criterion.

    Unlike transformers' list it is immutable: add tuples instead. A member may be any traceable
    callable ``f(input_ids, scores, cur_len)`` with a result of shape ``[B]`` or ``[]``; it receives
    only the keyword arguments that it accepts. A callable that is not a pytree is static: part of
    the program, compared by identity.

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
        scores: Scores | None,
        cur_len: CurLen = None,
        **kwargs: Any,
    ) -> Done:
        """bool ``[B]``; the arguments are those of :class:`StoppingCriteria`."""
        cur_len = input_ids.shape[1] if cur_len is None else cur_len
        done = jnp.zeros(input_ids.shape[0], bool)
        for criterion in self:
            out = criterion(input_ids, scores, cur_len, **accepted_arguments(criterion, kwargs))
            done |= checked_done(criterion, out, done.shape)
        return done


def checked_done(criterion: Any, out: Any, shape: tuple[int, ...]) -> Done:
    """Checks that a criterion's result is one boolean per row, or one for all, which it repeats."""
    dtype = np.dtype(bool) if isinstance(out, bool) else getattr(out, "dtype", None)
    if dtype != np.dtype(bool) or np.shape(out) not in (shape, ()):
        raise InputError(
            f"stopping_criteria: {name_of(criterion)} must return booleans {list(shape)}, but "
            f"returned {describe_array(out)}"
        )
    return jnp.broadcast_to(jnp.asarray(out), shape)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowCriterion:
    """Stopping criterion for some rows of a batch."""

    criterion: Any
    rows: Bool[Array, " R"]

    def __call__(
        self,
        input_ids: Int[Array, "BM L"],
        scores: Scores | None,
        cur_len: Int[Array, " R"],
        **_: Any,
    ) -> Done:
        """Mask [B * M] of the ending sequences: M per row, equally long, starting at column 0."""
        rows, cur_len = per_sequence(input_ids, cur_len, self.rows)
        return self.criterion(input_ids, scores, cur_len) & rows


def for_rows(criteria: StoppingCriteriaList, rows: Bool[Array, "R C"]) -> StoppingCriteriaList:
    """Restricts each of C criteria to the rows that are True in its column of ``rows``."""
    return StoppingCriteriaList(
        RowCriterion(criterion, rows[:, number]) for number, criterion in enumerate(criteria)
    )
