"""Host processors: plain Python functions called from the compiled loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.common.errors import InputError
from jaxllm.generation.processors.base import LogitsProcessor, Scores, logits_processor, store
from jaxllm.generation.processors.host.errors import check_one_device, record_failures

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
        cur_len: Int[Array, " ..."] | int,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: Int[Array, ""] | int | None = None,
        **_: Any,
    ) -> Scores:
        scores = jnp.asarray(scores, jnp.float32)
        unfinished = None
        if mask is not None and prompt_len is not None:
            columns = jnp.arange(mask.shape[1])
            new = (columns >= prompt_len) & (columns < jnp.reshape(cur_len, (-1, 1)))
            unfinished = (mask | ~new).all(axis=1)
        return call_on_host(self.fn, input_ids, scores, cur_len, scores, unfinished)


def host_function(owner: str, fn: Any) -> HostFunction:
    """Returns ``fn`` after checking that it is callable.

    Raises:
        InputError: It is not callable.
    """
    if not callable(fn):
        raise InputError(f"{owner}: `fn` must be a function, but is {fn!r}")
    return fn


def call_on_host(
    fn: HostFunction,
    input_ids: Int[Array, "B L"],
    scores: Float[Array, "B V"],
    cur_len: Int[Array, " ..."] | int,
    default: Shaped[Array, "B ..."],
    unfinished: Bool[Array, " B"] | None,
) -> Shaped[Array, "B ..."]:
    """Calls ``fn(input_ids[:, :cur_len], scores)`` from a compiled program.

    If ``cur_len`` has one length per row, ``fn`` is called for each row separately, with
    ``[1, cur_len]``, and not for rows where ``unfinished`` is False (None: True for all), whose
    result is ``default``.

    Raises:
        InputError: The result does not have the shape and kind of dtype of ``default`` (reraised
            from the program by :mod:`jaxllm.generation.processors.host.errors`).
    """

    check_one_device()
    dtype = np.dtype(default.dtype)

    def checked(ids: np.ndarray, values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        found = np.asarray(fn(ids, values))
        if found.shape != shape or not np.can_cast(found.dtype, dtype, "same_kind"):
            raise InputError(
                f"{getattr(fn, '__name__', fn)}: expected {dtype}{list(shape)} as the result, "
                f"found {found.dtype}{list(found.shape)}"
            )
        return found.astype(dtype)

    @record_failures
    def run(*arrays: Any) -> np.ndarray:
        ids, values, length, found, asked = map(np.asarray, arrays)
        if length.ndim == 0:
            return checked(ids[:, :length], values, found.shape)
        found = found.copy()
        for i in np.flatnonzero(asked):
            row = slice(i, i + 1)
            found[row] = checked(ids[row, : length[i]], values[row], found[row].shape)
        return found

    rows = input_ids.shape[0]
    return jax.pure_callback(
        run,
        jax.ShapeDtypeStruct(default.shape, dtype),
        input_ids,
        scores,
        cur_len,
        default,
        jnp.ones((rows,), bool) if unfinished is None else unfinished,
        vmap_method="sequential",
    )
