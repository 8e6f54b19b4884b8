"""Acceptance of drafted tokens, and the token after the accepted ones.

There are two rules. `accept_matching` accepts drafted tokens while they equal the model's own
choices. `accept_speculative` accepts them at random, such that tokens have the model's distribution
with any draft (Leviathan et al. 2022, arXiv:2211.17192, algorithm 1; Chen et al. 2023,
arXiv:2302.01318).
B: batch size. G: columns of a draft. C = G + 1. V: vocabulary size.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.generation.strategies.token_choice import choose_sample

# Each position has a key for each purpose, so that its draws are independent of each other.
DRAFT, ACCEPT, RESIDUAL = range(3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTokens:
    """Tokens that a draft proposes for each row."""

    tokens: Int[Array, "B G"]
    size: Int[Array, " B"]
    """Number of proposed tokens; the others are filler."""
    scores: Float[Array, "B G V"] | None = None
    """Processed scores that each token was drawn from."""


def position_keys(
    keys: Key[Array, " B"], positions: Int[Array, " B"], purpose: int | None = None
) -> Key[Array, " B"]:
    """Random keys for the new token at each row's position, for one purpose.

    Without a purpose they are the keys that plain sampling uses for those tokens.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return (
        keys if purpose is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, purpose)
    )


def accepted_prefix(matches: Bool[Array, "B G"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """Number of leading True values among the first `count` of each row.

    >>> import jax.numpy as jnp
    >>> accepted_prefix(jnp.array([[True, True, False, True]]), jnp.array([4])).tolist()
    [2]
    """
    valid = jnp.arange(matches.shape[1]) < count[:, None]
    return jnp.sum(jnp.cumprod(matches & valid, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def mix_with_draft(
    scores: Float[Array, "B C V"], drafted: DraftTokens, weight: Float[Array, ""]
) -> Float[Array, "B C V"]:
    """The mixture ``weight * p + (1 - weight) * q`` of model and draft, for each drafted token; p
    for the token after them (`assistant_ensemble_weight`, arXiv:2604.07622)."""
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    valid = jnp.arange(p.shape[1]) < drafted.size[:, None]
    return jnp.where(valid[..., None], weight * p + (1 - weight) * q, p)


def accept_matching(
    selected: Int[Array, "B C"], drafted: DraftTokens
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """The model's own choices, and the number of drafted tokens that are accepted.

    If the choices are samples, this is the speculative rule for drafts of probability one: a
    token d is accepted with probability p(d), and its replacement is drawn from the others.
    """
    return selected, accepted_prefix(selected[:, :-1] == drafted.tokens, drafted.size)


def accept_speculative(
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    drafted: DraftTokens,
    scores: Float[Array, "B C V"],
    weight: Float[Array, ""] | None = None,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Accepts a drafted token x with probability min(1, p(x) / q(x)), up to the first rejection.

    The next token is drawn from norm(max(p - q, 0)), or from p if all were accepted. p and q are
    the softmax of the model's and the draft's processed scores.

    Args:
        keys: one per row; draws depend only on it and on the new token's position.
        positions: number of new tokens of each row so far.
        drafted: a draft with scores.
        scores: the model's scores, after the newest token and after each drafted one.
        weight: weight of p; a draft is then accepted as if ``weight * p + (1 - weight) * q`` were
            the model's distribution, and tokens are no longer distributed as the model's.

    Returns:
        The tokens, and the number of accepted ones; tokens beyond the next one are filler.
    """
    width = drafted.tokens.shape[1]
    columns = jnp.arange(width, dtype=jnp.int32)
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    p_draft = _probability_of(p[:, :width], drafted.tokens)
    q_draft = _probability_of(q, drafted.tokens)
    accept_keys = position_keys(
        jnp.repeat(keys, width, axis=0), (positions[:, None] + columns).reshape(-1), ACCEPT
    )
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(accept_keys)
    # Not <=: a draft that the model forbids must not be accepted at a random number of exactly 0.
    mixture = p_draft if weight is None else weight * p_draft + (1 - weight) * q_draft
    accepted = accepted_prefix(uniform.reshape(q_draft.shape) * q_draft < mixture, drafted.size)

    p_next = jnp.take_along_axis(p, accepted[:, None, None], axis=1)[:, 0]
    q_next = jnp.take_along_axis(q, jnp.minimum(accepted, width - 1)[:, None, None], axis=1)[:, 0]
    residual = jnp.maximum(p_next - jnp.where((accepted < drafted.size)[:, None], q_next, 0.0), 0.0)
    # With the mixture in place of p it is the same distribution: weight * (p - q), normalised.
    # If p = q up to rounding, no entry of p - q is positive.
    residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p_next)
    token = choose_sample(position_keys(keys, positions + accepted, RESIDUAL), jnp.log(residual))
    tokens = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(width + 1) == accepted[:, None], token[:, None], tokens), accepted


def _probability_of(p: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    return jnp.take_along_axis(p, tokens[..., None], axis=2)[..., 0]
