"""Host processors: plain Python functions called from the compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.common.errors import InputError
from jaxllm.generation.processors.base import (
    CurLen,
    LogitsProcessor,
    Scores,
    column_count,
    describe_array,
    logits_processor,
    name_of,
    store,
)
from jaxllm.generation.processors.host.callbacks import call_on_host

HostFunction = Callable[[np.ndarray, np.ndarray], Any]


@logits_processor(static=("fn",))
class HostLogitsProcessor(LogitsProcessor):
    """Runs a NumPy function ``fn(input_ids, scores) -> scores`` that JAX cannot trace.

    ``fn`` receives int32 ``[B, cur_len]``, the caller's padding included as in transformers, and
    float32 ``[B, V]``, and returns ``[B, V]``. It runs once for each new token, while the device
    waits; it must not call JAX, and its result must depend on its arguments alone. ``fn`` is
    static: the same object does not compile again, another one does. With drafts, rows differ in
    length, so ``fn`` is called separately for each row and drafted token, with B = 1.

    >>> import jax.numpy as jnp
    >>> processor = HostLogitsProcessor(lambda input_ids, scores: scores * input_ids.shape[1])
    >>> processor(jnp.zeros((1, 4), jnp.int32), jnp.array([[1.0, 2.0]]), 3).tolist()
    [[3.0, 6.0]]
    """

    fn: HostFunction

    def __init__(self, fn: HostFunction) -> None:
        store(self, fn=host_function(type(self).__name__, fn))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: Int[Array, ""] | int | None = None,
        **_: object,
    ) -> Scores:
        scores = jnp.asarray(scores, jnp.float32)
        cur_len = column_count(input_ids, cur_len)
        unfinished = None
        if mask is not None and prompt_len is not None:
            columns = jnp.arange(mask.shape[1])
            new = (columns >= prompt_len) & (columns < jnp.reshape(cur_len, (-1, 1)))
            unfinished = (mask | ~new).all(axis=1)
        return call_by_row(self.fn, input_ids, scores, cur_len, scores, unfinished)


def host_function(owner: str, fn: object) -> HostFunction:
    """Returns ``fn`` after checking that it is callable.

    Raises:
        InputError: it is not callable.
    """
    if not callable(fn):
        raise InputError(f"{owner}: `fn` must be a function, but is {fn!r}")
    return fn


def call_by_row(
    fn: HostFunction,
    input_ids: Int[Array, "B L"],
    scores: Float[Array, "B V"] | None,
    cur_len: Int[Array, " ..."],
    default: Shaped[Array, "B ..."],
    unfinished: Bool[Array, " B"] | None,
) -> Shaped[Array, "B ..."]:
    """Calls ``fn(input_ids[:, :cur_len], scores)``, also from a compiled program.

    If ``cur_len`` has one length per row, ``fn`` is called for each row separately, with
    ``[1, cur_len]``, and not for rows where ``unfinished`` is False (None: True for all), whose
    result is ``default``.

    Raises:
        InputError: the result does not have the shape and kind of dtype of ``default`` (reraised
            from a program by `jaxllm.generation.processors.host.callbacks`).
    """
    dtype = np.dtype(default.dtype)

    def call(ids: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        out = np.asarray(fn(ids, values))
        if out.shape != shape or not np.can_cast(out.dtype, dtype, "same_kind"):
            raise InputError(
                f"{name_of(fn)}: expected {dtype}{list(shape)} as the result, found "
                f"{describe_array(out)}"
            )
        return out.astype(dtype)

    def run(*arrays: ArrayLike) -> np.ndarray:
        ids, values, length, result, active = map(np.asarray, arrays)
        if length.ndim == 0:
            return call(ids[:, :length], values, result.shape)
        result = result.copy()
        for i in np.flatnonzero(active):
            row = slice(i, i + 1)
            result[row] = call(ids[row, : length[i]], values[row], result[row].shape)
        return result

    active = jnp.ones(input_ids.shape[:1], bool) if unfinished is None else unfinished
    result = jax.ShapeDtypeStruct(default.shape, dtype)
    return call_on_host(run, result, input_ids, scores, cur_len, default, active)
