"""Stopping criteria: maximum length, end tokens, Python functions, time limit; their list."""

from __future__ import annotations

import math
import time

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.generation.inputs.arguments import CallArguments, needed_tokenizer
from jaxllm.generation.inputs.values import (
    TokenIds,
    any_traced,
    id_table,
    int_leaf,
    is_number,
    to_scalar,
)
from jaxllm.generation.processors.base import CurLen, History, Scores, column_count, store
from jaxllm.generation.processors.host import (
    HostFunction,
    call_by_row,
    host_function,
)
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.generation.stopping.base import (
    Done,
    StoppingCriteria,
    StoppingCriteriaList,
    stopping_criterion,
)
from jaxllm.generation.stopping.stop_strings import StopStringCriteria


@stopping_criterion()
class MaxLengthCriteria(StoppingCriteria):
    """Ends a row of ``max_length`` tokens, prompt included.

    Lacks the second argument of transformers' class, ``max_position_embeddings``, which only causes
    a warning there; ``generate`` raises if the model has too few positions.
    """

    max_length: Int[Array, " ..."]

    def __init__(self, max_length: int) -> None:
        owner = type(self).__name__
        store(self, max_length=int_leaf(owner, "max_length", max_length, least=1))

    def reached(self, history: History, scores: Scores | None) -> Done:
        reached = history.length[:, 0] >= self.max_length
        return jnp.broadcast_to(reached, history.ids.shape[:1])


@stopping_criterion()
class EosTokenCriteria(StoppingCriteria):
    """Ends a row whose newest token is one of ``eos_token_id`` (one or several)."""

    eos_token_id: Int[Array, " E"]

    def __init__(self, eos_token_id: TokenIds) -> None:
        store(self, eos_token_id=id_table(type(self).__name__, "eos_token_id", eos_token_id))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores | None,
        cur_len: CurLen = None,
        **_: object,
    ) -> Done:
        ids = jnp.asarray(input_ids, jnp.int32)
        column = column_count(ids, cur_len).reshape(-1, 1) - 1
        column = jnp.broadcast_to(column, (ids.shape[0], 1))
        newest = jnp.take_along_axis(ids, jnp.maximum(column, 0), axis=1)
        return ((column >= 0) & jnp.isin(newest, self.eos_token_id))[:, 0]


@stopping_criterion(static=("fn",))
class HostCriteria(StoppingCriteria):
    """Runs a NumPy function ``fn(input_ids, scores) -> done`` that JAX cannot trace.

    ``fn`` receives int32 ``[B, cur_len]``, the caller's padding included as in transformers, and
    float32 ``[B, V]``, and returns booleans ``[B]``. It runs once for each new token, while the
    device waits; it must not call JAX, and its result must depend on its arguments alone. ``fn`` is
    static: the same object does not compile again, another one does. With drafts, rows differ in
    length, so ``fn`` is called separately for each row and new token, with B = 1.

    >>> import jax.numpy as jnp
    >>> criterion = HostCriteria(lambda input_ids, scores: input_ids.sum(axis=1) > 6)
    >>> criterion(jnp.array([[1, 2, 9], [3, 4, 9]]), jnp.zeros((2, 5)), 2).tolist()
    [False, True]
    """

    fn: HostFunction

    def __init__(self, fn: HostFunction) -> None:
        store(self, fn=host_function(type(self).__name__, fn))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores | None,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        **_: object,
    ) -> Done:
        cur_len = column_count(input_ids, cur_len)
        unfinished = None
        if mask is not None and cur_len.ndim == 1:
            unfinished = jnp.take_along_axis(mask, cur_len[:, None] - 1, axis=1)[:, 0]
        none = jnp.zeros(input_ids.shape[:1], bool)
        return call_by_row(self.fn, input_ids, scores, cur_len, none, unfinished)


class MaxTimeCriteria:
    """Time limit, checked on the host: expires after ``max_time`` seconds.

    A compiled loop has no clock, so it cannot be called inside one: the caller that runs the loop
    in chunks checks :meth:`expired` between them.

    Args:
        max_time: seconds.
        initial_timestamp: start time in seconds, as from ``time.time()``. None: now.

    Raises:
        InputError: an argument is not a number.
    """

    def __init__(self, max_time: float, initial_timestamp: float | None = None) -> None:
        start = time.time() if initial_timestamp is None else initial_timestamp
        self.max_time = _seconds("max_time", max_time)
        self.initial_timestamp = _seconds("initial_timestamp", start)

    def expired(self) -> bool:
        """Returns whether more than ``max_time`` seconds have passed."""
        return time.time() - self.initial_timestamp > self.max_time

    def __call__(self, input_ids: Int[Array, "B L"], *_: object, **__: object) -> Done:
        """Mask [B]: all rows end if the limit has expired. UnsupportedError under ``jit``."""
        if any_traced(input_ids):
            raise UnsupportedError(
                "MaxTimeCriteria: a compiled loop has no clock, so it cannot be called inside one; "
                "pass max_time to generate, or call .expired() between two chunks"
            )
        return jnp.full(input_ids.shape[:1], self.expired())


def _seconds(name: str, value: float) -> float:
    value = to_scalar(value)
    if not is_number(value) or math.isnan(value):
        raise InputError(f"MaxTimeCriteria: `{name}` must be a number, but is {quoted(value)}")
    return float(value)


def build_criteria(
    config: GenerationConfig, arguments: CallArguments
) -> tuple[StoppingCriteriaList, tuple[MaxTimeCriteria, ...]]:
    """Builds the criteria of the compiled loop, and the time limits that the host checks."""
    criteria = arguments.stopping_criteria
    criteria = [] if criteria is None else criteria
    if not isinstance(criteria, list | tuple) or not all(map(callable, criteria)):
        raise InputError(
            f"stopping_criteria: expected a list of callables, found {quoted(criteria)}"
        )
    time_limits = [c for c in criteria if isinstance(c, MaxTimeCriteria)]
    if config.max_time is not None:
        time_limits.insert(0, MaxTimeCriteria(config.max_time))
    in_loop = [c for c in criteria if not isinstance(c, MaxTimeCriteria)]
    if config.stop_strings is not None:
        tokenizer = needed_tokenizer(arguments.tokenizer, "stop_strings")
        in_loop.insert(0, StopStringCriteria(tokenizer, list(config.stop_strings)))
    return StoppingCriteriaList(in_loop), tuple(time_limits)
