"""Prefix constraints by a Python function (De Cao et al. 2020, arXiv:2010.00904)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_integer
from jaxllm.generation.processors.base import (
    CurLen,
    LogitsProcessor,
    Scores,
    column_count,
    logits_processor,
    store,
)
from jaxllm.generation.processors.host.allowed_tokens import (
    HostRow,
    allowed_tokens,
    pack_bits,
    register_rule,
)

AllowedTokens: TypeAlias = Callable[[int, np.ndarray], Iterable[int]]


@logits_processor(static=("num_beams",))
class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Forbids all tokens except those that ``prefix_allowed_tokens_fn(batch_id, ids)`` returns.

    The function runs on the host for each row and step, while the device waits. It receives the
    index of the prompt and the row's tokens so far, int64 ``[n]``, with the prompt's padding moved
    to the left, as in transformers. It must not call JAX and must depend on its arguments alone. A
    new function does not compile again.

    If other processors forbid every token that the function allows, in all beams of a prompt, the
    function's tokens are allowed again, with score 0, as in transformers 5.

    Args:
        prefix_allowed_tokens_fn: returns a non-empty list of token ids.
        num_beams: rows per prompt; row r belongs to prompt ``r // num_beams``.

    Raises:
        InputError: an argument has the wrong type. While the program runs: the function returned
            no token, or one outside the vocabulary
            (see `jaxllm.generation.processors.host.callbacks`).

    >>> def even_after_odd(batch_id, ids):
    ...     return [0, 2] if ids[-1] % 2 else [1, 3]
    >>> processor = PrefixConstrainedLogitsProcessor(even_after_odd, num_beams=1)
    >>> processor(jnp.array([[3, 1, 0]]), jnp.zeros((1, 4)), 2).tolist()
    [[0.0, -inf, 0.0, -inf]]
    """

    rule: Int[Array, ""]
    num_beams: int

    def __init__(self, prefix_allowed_tokens_fn: AllowedTokens, num_beams: int) -> None:
        owner = type(self).__name__
        if not callable(prefix_allowed_tokens_fn):
            raise InputError(
                f"{owner}: `prefix_allowed_tokens_fn` must be a function of the prompt's number and"
                f" its tokens, but is {prefix_allowed_tokens_fn!r}"
            )
        if not is_integer(num_beams) or num_beams < 1:
            raise InputError(f"{owner}: `num_beams` must be a positive integer, not {num_beams!r}")
        rule = partial(_allowed_rows, prefix_allowed_tokens_fn, int(num_beams))
        store(self, rule=register_rule(rule, owner=self), num_beams=int(num_beams))

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        mask: Bool[Array, "B L"] | None = None,
        prompt_len: Int[Array, ""] | int | None = None,
        columns: int = 1,
        **_: object,
    ) -> Scores:
        """float32 ``[B, V]``; with ``prompt_len``, the function is not called for ended rows.

        ``columns`` is the number of consecutive rows of scores that belong to one sequence (used to
        check drafts); ``cur_len`` and ``mask`` then have one row per row of scores.
        """
        scores = jnp.asarray(scores, jnp.float32)
        rows, vocab_size = scores.shape
        if rows % self.num_beams:
            raise InputError(f"{rows} rows of scores do not divide into {self.num_beams} beams")

        def allowed_in(ids: Array, length: CurLen, real: Array | None) -> Array:
            return allowed_tokens(self.rule, ids, length, real, prompt_len, vocab_size)

        if columns == 1:
            allowed = allowed_in(input_ids, cur_len, mask)
        else:  # one draft column of all sequences at a time, so that row indices give prompts
            parts: Any = (input_ids, column_count(input_ids, cur_len), mask)
            table = [jnp.swapaxes(x.reshape(-1, columns, *x.shape[1:]), 0, 1) for x in parts]
            allowed = jax.lax.map(lambda column: allowed_in(*column), table)
            allowed = jnp.swapaxes(allowed, 0, 1).reshape(rows, vocab_size)
        constrained = jnp.where(allowed, scores, -jnp.inf)
        no_candidate_left = (constrained.max(-1) == -jnp.inf).reshape(-1, self.num_beams).all(-1)
        no_candidate_left = jnp.repeat(no_candidate_left, self.num_beams)[:, None]
        return jnp.where(no_candidate_left & allowed, 0.0, constrained)


def _allowed_rows(
    function: AllowedTokens, num_beams: int, rows: list[HostRow], vocab_size: int
) -> np.ndarray:
    allowed = np.zeros((len(rows), vocab_size), bool)
    for number, row in enumerate(rows):
        if row.prompt_len is not None and not row.real[row.prompt_len :].all():
            allowed[number] = True  # the row has ended
            continue
        batch_id = number // num_beams
        ids = np.concatenate([row.ids[~row.real], row.ids[row.real]])
        out = function(batch_id, ids)
        if not isinstance(out, Iterable):
            raise InputError(
                f"prefix_allowed_tokens_fn: expected a list of token ids for prompt {batch_id}, "
                f"found {out!r}"
            )
        tokens = np.array(list(out))
        if tokens.size == 0:
            raise InputError(
                f"prefix_allowed_tokens_fn: returned no token for prompt {batch_id} after "
                f"{ids.tolist()}; it must allow at least one, for example the end token"
            )
        if tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() >= vocab_size:
            raise InputError(
                f"prefix_allowed_tokens_fn: expected token ids from 0 to {vocab_size - 1} for "
                f"prompt {batch_id}, found {tokens[:8].tolist()}"
            )
        allowed[number, tokens] = True
    return pack_bits(allowed)
