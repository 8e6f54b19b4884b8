"""Which drafted tokens stay, and the token after them.

Two rules. `match` keeps drafts while they are what the model itself chooses. `speculative` keeps
them by chance, such that tokens come out distributed as the model's, whatever drafted them
(Leviathan et al. 2022, arXiv:2211.17192, algorithm 1; Chen et al. 2023, arXiv:2302.01318).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.generation.strategies.token_choice import choose_sample

# A position has a key for each kind of draw, so that its draws are independent of each other.
DRAFT, ACCEPT, REST = range(3)


class Drafted(NamedTuple):
    """What a draft proposes to follow each row."""

    tokens: Int[Array, "B G"]
    size: Int[Array, " B"]
    """How many of them are meant."""
    scores: Float[Array, "B G V"] | None = None
    """The processed scores that each was drawn from."""


def position_keys(
    keys: Key[Array, " B"], positions: Int[Array, " B"], kind: int | None = None
) -> Key[Array, " B"]:
    """A key for the new token at each row's position, and there for one kind of draw.

    Without `kind` it is the key that plain sampling draws that token with.
    """
    keys = jax.vmap(jax.random.fold_in)(keys, positions)
    return keys if kind is None else jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, kind)


def leading(agree: Bool[Array, "B G"], count: Int[Array, " B"]) -> Int[Array, " B"]:
    """How many of the first `count` agree before one does not.

    >>> import jax.numpy as jnp
    >>> leading(jnp.array([[True, True, False, True]]), jnp.array([4])).tolist()
    [2]
    """
    meant = jnp.arange(agree.shape[1]) < count[:, None]
    return jnp.sum(jnp.cumprod(agree & meant, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)


def ensemble(
    scores: Float[Array, "B C V"], drafted: Drafted, weight: Float[Array, ""]
) -> Float[Array, "B C V"]:
    """The mixture ``weight * p + (1 - weight) * q`` of model and draft, for each drafted token; p
    for the token after them (`assistant_ensemble_weight`, arXiv:2604.07622)."""
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    q = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    meant = jnp.arange(p.shape[1]) < drafted.size[:, None]
    return jnp.where(meant[..., None], weight * p + (1 - weight) * q, p)


def match(
    selected: Int[Array, "B C"], drafted: Drafted
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """The model's own choices, and how many drafts precede the last one that is used.

    With choices that are samples, this is the speculative rule for drafts of probability one: the
    draft d stays with probability p(d), and what replaces it is drawn from the others.
    """
    return selected, leading(selected[:, :-1] == drafted.tokens, drafted.size)


def speculative(
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    drafted: Drafted,
    scores: Float[Array, "B C V"],
    weight: Float[Array, ""] | None = None,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """Keeps a draft x with probability min(1, p(x) / q(x)), up to the first that is not kept.

    After n kept ones comes a token from norm(max(p - q, 0)), or from p if all were kept. p and q
    are the softmax of the model's and the draft's processed scores.

    Args:
        keys: one a row; draws depend on it and on the new token's position alone.
        positions: how many new tokens each row has so far.
        drafted: with its scores.
        scores: after the newest token and after each draft.
        weight: of p; a draft is then kept as if ``weight * p + (1 - weight) * q`` were the
            model's, and tokens are no longer distributed as the model's.

    Returns:
        The tokens, and how many drafts are kept; tokens beyond the next one have no meaning.
    """
    most = drafted.tokens.shape[1]
    columns = jnp.arange(most, dtype=jnp.int32)
    assert drafted.scores is not None
    p, q = jax.nn.softmax(scores, axis=-1), jax.nn.softmax(drafted.scores, axis=-1)
    p_draft = _at(p[:, :most], drafted.tokens)
    q_draft = _at(q, drafted.tokens)
    each = position_keys(
        jnp.repeat(keys, most, axis=0), (positions[:, None] + columns).reshape(-1), ACCEPT
    )
    chance = jax.vmap(lambda key: jax.random.uniform(key, (), jnp.float32))(each)
    # Not <=: a draft that the model forbids must not pass on a chance of exactly 0.
    judge = p_draft if weight is None else weight * p_draft + (1 - weight) * q_draft
    kept = leading(chance.reshape(q_draft.shape) * q_draft < judge, drafted.size)

    p_next = jnp.take_along_axis(p, kept[:, None, None], axis=1)[:, 0]
    q_next = jnp.take_along_axis(q, jnp.minimum(kept, most - 1)[:, None, None], axis=1)[:, 0]
    rest = jnp.maximum(p_next - jnp.where(kept < drafted.size, 1.0, 0.0)[:, None] * q_next, 0.0)
    # Against the mixture it would be the same distribution: weight * (p - q), normalised.
    # p = q but for rounding: nothing is left, and what was turned down was as good as anything.
    rest = jnp.where(jnp.any(rest > 0, axis=-1, keepdims=True), rest, p_next)
    token = choose_sample(position_keys(keys, positions + kept, REST), jnp.log(rest))
    tokens = jnp.pad(drafted.tokens, ((0, 0), (0, 1)))
    return jnp.where(jnp.arange(most + 1) == kept[:, None], token[:, None], tokens), kept


def _at(p: Float[Array, "B G V"], tokens: Int[Array, "B G"]) -> Float[Array, "B G"]:
    return jnp.take_along_axis(p, tokens[..., None], axis=2)[..., 0]
