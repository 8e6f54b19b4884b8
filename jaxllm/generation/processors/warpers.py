"""Processors of the whole distribution: guidance, and the warpers for sampling.

The warpers are temperature and the filters, which drop the tail of the distribution.

A filter sets the scores of dropped tokens to ``filter_value`` (-inf) and keeps at least
``min_tokens_to_keep`` tokens. Behaviour, names and arguments are those of transformers 5.23,
except that a neutral value (``top_k=0``, ``top_p=1``, ``mass=1``, ``epsilon=0``) is accepted and
costs nothing at run time, so that a disabled filter may stay in the program.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import Number, float_leaf, int_rows, is_integer, is_number
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    LogitsProcessor,
    Scores,
    ScoresProcessor,
    logits_processor,
    store,
)
from jaxllm.generation.processors.top_k_top_p import (
    entropy_mask,
    nearest_mask,
    top_k_mask,
    top_mask,
    top_p_mask,
    unnormalised,
)

NEG_INF = -float("inf")


@logits_processor(rows=True)
class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Moves log-probabilities away from those of the unconditional context.

    Computes ``u + guidance_scale * (c - u)``, with c and u the log-softmax of the conditional and
    unconditional logits. A scale of 1 leaves the scores unchanged; a larger scale favours tokens
    that the prompt makes more likely than the unconditional context does. Results match
    transformers 5.23, whose processor runs the model on the unconditional context itself; here
    ``generate()`` runs both contexts and passes the logits in. Tokens with score -inf keep it.

    Sanchez et al., "Stay on topic with classifier-free guidance", https://arxiv.org/abs/2306.17806.

    >>> import jax.numpy as jnp
    >>> c, u = jnp.log(jnp.array([[[0.5, 0.5]], [[0.8, 0.2]]]))
    >>> guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0)
    >>> scores = guide(jnp.zeros((1, 4), jnp.int32), c, 2, unconditional_logits=u)
    >>> [round(float(x), 4) for x in jnp.exp(scores[0])]
    [0.3125, 1.25]
    """

    guidance_scale: Float[Array, " R"]

    def __init__(self, guidance_scale: Number) -> None:
        scale = float_leaf(type(self).__name__, "guidance_scale", guidance_scale, "(-inf, inf)")
        store(self, guidance_scale=scale[None])

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        unconditional_logits: Scores | None = None,
        **_: object,
    ) -> Scores:
        """float32 ``[B, V]``.

        Args:
            unconditional_logits: ``[B, V]``, the model's logits for the unconditional context.

        Raises:
            InputError: `unconditional_logits` is None.
        """
        if unconditional_logits is None:
            raise InputError(
                f"{type(self).__name__}: no unconditional_logits; set `guidance_scale` in "
                "generate(), which runs the model on the negative prompt as well"
            )
        scores = jnp.asarray(scores, jnp.float32)
        c = jax.nn.log_softmax(scores, axis=-1)
        u = jax.nn.log_softmax(jnp.asarray(unconditional_logits, jnp.float32), axis=-1)
        scale = self.guidance_scale[:, None]
        guided = jnp.where(jnp.isneginf(c), -jnp.inf, scale * (c - u) + u)
        # A scale of 1 returns raw logits, not log-probabilities, as in transformers.
        return jnp.where(scale == 1, scores, guided)


@logits_processor(rows=True)
class TemperatureLogitsWarper(ScoresProcessor):
    """Divides the scores by ``temperature``, a number above 0.

    >>> import jax.numpy as jnp
    >>> warp = TemperatureLogitsWarper(0.5)
    >>> warp(jnp.zeros((1, 1), jnp.int32), jnp.array([[1.0, 3.0]]), 1).tolist()
    [[2.0, 6.0]]
    """

    temperature: Float[Array, " R"]

    def __init__(self, temperature: Number) -> None:
        if is_number(temperature) and temperature == 0:
            raise InputError(
                "TemperatureLogitsWarper: `temperature` must be above 0, but is 0; "
                "for greedy decoding set do_sample=False"
            )
        leaf = float_leaf(type(self).__name__, "temperature", temperature, "(0, inf)")[None]
        store(self, temperature=leaf)

    def process(self, history: History, scores: Scores) -> Scores:
        return scores / self.temperature[:, None]


@dataclass(frozen=True, init=False, eq=False)
class Filter(ScoresProcessor):
    """Base class of filters: sets the scores of tokens outside :meth:`keep` to ``filter_value``.

    :meth:`keep` is not computed at run time if :meth:`off` is True for every row.
    """

    filter_value: Float[Array, " R"]
    min_tokens_to_keep: int

    def __init__(self, filter_value: Number, min_tokens_to_keep: int, **values: Array) -> None:
        owner = type(self).__name__
        if not is_integer(min_tokens_to_keep) or min_tokens_to_keep < 1:
            raise InputError(
                f"{owner}: `min_tokens_to_keep` must be an integer of at least 1, "
                f"but is {quoted(min_tokens_to_keep)}"
            )
        value = float_leaf(owner, "filter_value", filter_value, "[-inf, inf]")[None]
        store(self, filter_value=value, min_tokens_to_keep=int(min_tokens_to_keep), **values)

    def process(self, history: History, scores: Scores) -> Scores:
        off = self.off(scores)

        def apply() -> Scores:
            mask = self.keep(scores) | off[:, None]
            return jnp.where(mask, scores, self.filter_value[:, None])

        return lax.cond(jnp.all(off), lambda: scores, apply)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        raise NotImplementedError

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        raise NotImplementedError


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class TopKLogitsWarper(Filter):
    """Keeps the ``top_k`` largest scores and ties with the k-th; 0 keeps all."""

    top_k: Int[Array, " R"]

    def __init__(
        self, top_k: int | Array, filter_value: Number = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        leaf = int_rows(type(self).__name__, "top_k", top_k)
        super().__init__(filter_value, min_tokens_to_keep, top_k=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return (self.top_k <= 0) | (self.top_k >= scores.shape[1])

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        least = min(self.min_tokens_to_keep, scores.shape[1])
        # A small k for disabled rows: a large one would send all rows to the slower bisection.
        k = jnp.where(self.off(scores), least, self.top_k)
        return top_k_mask(scores, jnp.maximum(k, least))


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class TopPLogitsWarper(Filter):
    """Keeps the fewest most probable tokens whose probabilities add up to ``top_p`` or more.

    Nucleus sampling (Holtzman et al. 2020). 0 keeps the best token, 1 keeps all.
    """

    top_p: Float[Array, " R"]

    def __init__(
        self, top_p: Number, filter_value: Number = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        leaf = float_leaf(type(self).__name__, "top_p", top_p, "[0, 1]")[None]
        super().__init__(filter_value, min_tokens_to_keep, top_p=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return self.top_p >= 1.0

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        p = jnp.where(self.off(scores), 0.0, self.top_p)  # disabled rows: see TopKLogitsWarper
        return top_p_mask(scores, p, self.min_tokens_to_keep)


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class MinPLogitsWarper(Filter):
    """Drops tokens less probable than ``min_p`` times the most probable one; 0 keeps all."""

    min_p: Float[Array, " R"]

    def __init__(
        self, min_p: Number, filter_value: Number = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        leaf = float_leaf(type(self).__name__, "min_p", min_p, "[0, 1]")[None]
        super().__init__(filter_value, min_tokens_to_keep, min_p=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return self.min_p <= 0.0

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        likely = unnormalised(scores) >= self.min_p[:, None]
        return likely | top_mask(scores, self.min_tokens_to_keep)


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class TopHLogitsWarper(Filter):
    """Keeps the most probable tokens while their share of the entropy is at most ``top_h``.

    Considers the 100 most probable tokens only, so ``top_h=1`` drops the rest too.
    """

    top_h: Float[Array, " R"]

    def __init__(self, top_h: Number, filter_value: Number = NEG_INF) -> None:
        leaf = float_leaf(type(self).__name__, "top_h", top_h, "(0, 1]")[None]
        super().__init__(filter_value, 1, top_h=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return jnp.zeros_like(self.top_h, bool)

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        return entropy_mask(scores, self.top_h)


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class TypicalLogitsWarper(Filter):
    """Keeps the tokens whose -log p is nearest to the entropy, up to total probability ``mass``.

    Locally typical sampling (Meister et al. 2022); 1 keeps all.
    """

    mass: Float[Array, " R"]

    def __init__(
        self, mass: Number = 0.9, filter_value: Number = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        leaf = float_leaf(type(self).__name__, "mass", mass, "(0, 1]")[None]
        super().__init__(filter_value, min_tokens_to_keep, mass=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return self.mass >= 1.0

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        surprise = -jax.nn.log_softmax(scores, axis=-1)
        distance = jnp.abs(surprise - _entropy(scores)[:, None])
        weights = unnormalised(scores)
        mass = self.mass * jnp.sum(weights, axis=-1)
        return nearest_mask(distance, weights, mass, self.min_tokens_to_keep)


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class EpsilonLogitsWarper(Filter):
    """Drops tokens of probability below ``epsilon`` (Hewitt et al. 2022); 0 keeps all."""

    epsilon: Float[Array, " R"]

    def __init__(
        self, epsilon: Number, filter_value: Number = NEG_INF, min_tokens_to_keep: int = 1
    ) -> None:
        leaf = float_leaf(type(self).__name__, "epsilon", epsilon, "[0, 1)")[None]
        super().__init__(filter_value, min_tokens_to_keep, epsilon=leaf)

    def off(self, scores: Scores) -> Bool[Array, " R"]:
        return self.epsilon <= 0.0

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        likely = jax.nn.softmax(scores, axis=-1) >= self.epsilon[:, None]
        return likely | top_mask(scores, self.min_tokens_to_keep)


@logits_processor(static=("min_tokens_to_keep",), rows=True)
class EtaLogitsWarper(EpsilonLogitsWarper):
    """Drops tokens of probability below min(epsilon, sqrt(epsilon) exp(-entropy)); 0 keeps all.

    Eta sampling (Hewitt et al. 2022).
    """

    def keep(self, scores: Scores) -> Bool[Array, "B V"]:
        epsilon = self.epsilon[:, None]
        eta = jnp.sqrt(epsilon) * jnp.exp(-_entropy(scores)[:, None])
        likely = jax.nn.softmax(scores, axis=-1) >= jnp.minimum(epsilon, eta)
        return likely | top_mask(scores, self.min_tokens_to_keep)


def _entropy(scores: Scores) -> Float[Array, " B"]:
    log_p = jax.nn.log_softmax(scores, axis=-1)
    return -jnp.sum(jnp.where(jnp.isfinite(log_p), jnp.exp(log_p) * log_p, 0.0), axis=-1)
