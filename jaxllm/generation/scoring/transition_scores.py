"""Scores of the chosen tokens, from the scores of all tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.common.arguments import checked_list, checks_flags
from jaxllm.common.errors import InputError, quoted
from jaxllm.models.input_checks import is_traced


@checks_flags
def compute_transition_scores(
    sequences: Int[Array, "R L"],
    scores: Sequence[Float[Array, "Rows V"]],
    beam_indices: Int[Array, "R N"] | None = None,
    normalize_logits: bool = False,
) -> Float[Array, "R M"]:
    """Score of each generated token, selected from `scores`.

    Equivalent to the method of that name in transformers (5.23.0). With beams, the sum over a row
    divided by its length to the power `length_penalty` is its `sequences_scores`.

    Args:
        sequences: as `generate` returns them.
        scores: one [rows, V] for each step (`output_scores`); with beams a row is a beam.
        beam_indices: with beams, the row of `scores` that each token of each result was chosen
            from; -1 after the result's end. None: row b was chosen from row b.
        normalize_logits: take the log-softmax of the scores first.

    Returns:
        float32 [R, M]: with `beam_indices` M is the length of the longest result (under jax.jit:
        the columns of `beam_indices`), and scores after a result's end are 0. Without, N is the
        number of steps, and entries after a row's end are scores of pads, as in transformers.

    Raises:
        InputError: shapes that do not fit together.

    >>> sequences = jnp.array([[7, 1, 0]])  # one token of prompt
    >>> scores = (jnp.array([[-0.5, -0.1]]), jnp.array([[-0.2, -0.7]]))
    >>> [round(float(s), 1) for s in compute_transition_scores(sequences, scores)[0]]
    [-0.1, -0.2]
    """
    scores = checked_list(scores, "scores")
    if len(scores) == 0:
        raise InputError("scores: empty; ask for them with output_scores=True")
    stacked = _array("scores", scores, jnp.floating, 3).astype(jnp.float32)
    steps, rows, _ = stacked.shape
    sequences = _array("sequences", sequences, jnp.integer, 2)
    if normalize_logits:
        stacked = jax.nn.log_softmax(stacked, axis=-1)
    if beam_indices is None:
        beam_indices = jnp.broadcast_to(jnp.arange(rows)[:, None], (rows, steps))
    beam_indices = _array("beam_indices", beam_indices, jnp.integer, 2)
    if beam_indices.shape[:1] != sequences.shape[:1]:
        raise InputError(
            f"beam_indices: {beam_indices.shape[0]} rows for {sequences.shape[0]} sequences; "
            "results of beam search need the beam_indices that came with them"
        )
    has_token = beam_indices >= 0
    # Steps without a token are -1 in all rows; the others give the number of new tokens.
    length = beam_indices.shape[1] if is_traced(has_token) else int(has_token.sum(axis=1).max())
    if length > min(steps, sequences.shape[1]):
        raise InputError(
            f"beam_indices: {length} tokens, but there are {steps} steps of scores and "
            f"{sequences.shape[1]} columns of sequences"
        )
    beams = jnp.where(has_token, beam_indices, 0)[:, :length]
    tokens = sequences[:, sequences.shape[1] - length :]
    token_scores = stacked[jnp.arange(length), beams, tokens]
    return jnp.where(has_token[:, :length], token_scores, 0.0)


def _array(name: str, values: Any, dtype: Any, ndim: int) -> Array:
    """`values` as an array with `ndim` axes; an array for each step if there are three."""
    try:
        array = jnp.stack([jnp.asarray(x) for x in values]) if ndim == 3 else jnp.asarray(values)
    except (TypeError, ValueError, OverflowError):
        array = jnp.zeros(0)
    if array.ndim != ndim or not jnp.issubdtype(array.dtype, dtype):
        raise InputError(
            f"{name}: expected an array of {ndim} axes of {dtype.__name__} numbers, found "
            f"{quoted(values)}"
        )
    return array
