"""Processors of the whole distribution: guidance, and the warpers for sampling.

The warpers are temperature and the filters, which drop the tail of the distribution.

A filter sets the scores of dropped tokens to ``filter_value`` (-inf) and keeps at least
``min_tokens_to_keep`` tokens. Behaviour, names and arguments are those of transformers 5.23,
except that a neutral value (``top_k=0``, ``top_p=1``, ``mass=1``, ``epsilon=0``) is accepted and
costs nothing at run time, so that a disabled filter may stay in the program.

The functions below the filters find the kept tokens without sorting. Sorting 50,000 scores takes
ten times longer than the rest of a filter. Two exact methods replace it:

- `top_k` finds the ``CANDIDATES`` largest scores; usually the kept tokens are among them.
- Otherwise bisection finds the threshold: the bits of float32 numbers, with the sign mapped, sort
  as unsigned integers in the same order, so 32 passes over the scores determine its 32 bits.

Sums of probabilities are float32 (XLA adds in blocks; relative error about 1e-7). So a sum within
1e-6 of p counts as p: of 0.5, 0.3, 0.1, 0.1, top-p 0.8 keeps two tokens, although their sum is
below 0.8 in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import Number, float_leaf, int_rows, is_number
from jaxllm.generation.processors.base import (
    CurLen,
    History,
    LogitsProcessor,
    Scores,
    ScoresProcessor,
    logits_processor,
    store,
)
from jaxllm.parallel.vocabulary import top_k

NEG_INF = -float("inf")
CANDIDATES = 128
"""Number of largest scores that `top_k` finds before falling back to bisection."""
_MINUS_INFINITY = 0x007FFFFF  # ordered_bits of it; smaller numbers stand for NaN
_ROUNDING = 1e-6  # relative; sums of probabilities this close to the target reach it


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

    :meth:`keep` is not computed at run time if :meth:`off` is True for every row. By default a
    filter is never off.
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
        return jnp.zeros_like(self.filter_value, bool)

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


def ordered_bits(x: Float[Array, " ..."]) -> UInt32[Array, " ..."]:
    """Maps float32 numbers to unsigned integers of the same order (-0 as 0)."""
    bits = lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def from_ordered_bits(bits: UInt32[Array, " ..."]) -> Float[Array, " ..."]:
    """Inverse of :func:`ordered_bits`; some bit patterns are NaN."""
    negative = bits >> 31 == 0
    return lax.bitcast_convert_type(
        jnp.where(negative, ~bits, bits & jnp.uint32((1 << 31) - 1)), jnp.float32
    )


def threshold(
    x: Float[Array, "B V"],
    weights: Float[Array, "B V"] | Float[Array, ""] | float,
    target: Float[Array, " B"],
) -> Float[Array, " B"]:
    """Largest number t such that the weights at ``x >= t`` add up to at least ``target``.

    With weights 1 and target k it is the k-th largest of ``x``; with probabilities and target p it
    is the least value of the smallest set of largest ``x`` whose mass reaches p. The result is
    one of the row's values: the largest if the target is 0 or less. If all weights together do not
    reach the target, it is -inf.
    """
    ordered = ordered_bits(x)
    bits = _bisect(lambda least: jnp.where(ordered >= least, weights, 0.0), target, bits=32)
    return from_ordered_bits(jnp.maximum(bits, jnp.uint32(_MINUS_INFINITY)))


def _bisect(
    weights_from: Callable[[UInt32[Array, "B 1"]], Float[Array, "B V"]],
    target: Float[Array, " B"],
    bits: int,
) -> UInt32[Array, " B"]:
    """Largest number of ``bits`` bits whose ``weights_from`` add up to ``target``, or 0.

    ``weights_from(n)`` are the weights of the entries at or above n, and zeros below. If the target
    is 0 or less, any weight above 0 reaches it.
    """

    def fix_bit(i: Int[Array, ""], number: UInt32[Array, " B"]) -> UInt32[Array, " B"]:
        candidate = number | (jnp.uint32(1 << (bits - 1)) >> i.astype(jnp.uint32))
        weight = jnp.sum(weights_from(candidate[:, None]), axis=-1)
        return jnp.where((weight >= target) & (weight > 0), candidate, number)

    return lax.fori_loop(0, bits, fix_bit, jnp.zeros(target.shape, jnp.uint32))


def kth_largest(x: Float[Array, "B V"], k: Int[Array, "*B"]) -> Float[Array, " B"]:
    """The ``k``-th largest value of each row, counting ties; ``k`` is traced, 1 to V."""
    width, row_k = min(CANDIDATES, x.shape[1]), jnp.broadcast_to(k, x.shape[:1])

    def among_candidates() -> Float[Array, " B"]:
        among_k = jnp.arange(width)[None] < row_k[:, None]
        return _smallest(top_k(x, width)[0], among_k)

    def by_bisection() -> Float[Array, " B"]:
        return threshold(x, 1.0, row_k.astype(jnp.float32))

    return lax.cond(jnp.all(row_k <= width), among_candidates, by_bisection)


def top_k_mask(x: Float[Array, "B V"], k: Int[Array, "*B"]) -> Bool[Array, "B V"]:
    """True at the ``k`` largest of each row and at ties with the k-th."""
    return x >= kth_largest(x, k)[:, None]


def top_p_mask(x: Float[Array, "B V"], p: Float[Array, "*B"], least: int = 1) -> Bool[Array, "B V"]:
    """True at the fewest largest scores whose probabilities add up to ``p`` (within 1e-6) or more.

    Among equal scores at the threshold, the later columns are kept, as by a stable ascending sort
    that drops from the front. At least ``least`` are kept.
    """
    size = x.shape[1]
    least = min(least, size)
    width = min(max(CANDIDATES, least), size)
    weights = unnormalised(x)
    mass = p * (1 - _ROUNDING) * jnp.sum(weights, axis=-1)
    top = top_k(x, width)[0]
    # Not the candidates' entries of `weights`: a gather takes longer to compile.
    top_weights = unnormalised(top)
    order = jnp.arange(width)
    # A cumulative sum as a product, which compiles in half the time of `jnp.cumsum`.
    is_before = (order[:, None] < order[None]).astype(jnp.float32)
    mass_before = jnp.dot(top_weights, is_before, precision="highest")

    def among_candidates() -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        # A token is kept if the mass of the larger ones is below the target.
        kept = (mass_before < mass[:, None]) | (order < least)[None]
        edge = _smallest(top, kept)
        return edge, _count(kept & (top == edge[:, None]))

    def by_bisection() -> tuple[Float[Array, " B"], Float[Array, " B"]]:
        edge = threshold(x, weights, mass)
        if least > 1:
            edge = jnp.minimum(edge, top[:, least - 1])
        above = x > edge[:, None]
        missing = mass - jnp.sum(jnp.where(above, weights, 0.0), axis=-1)
        # The weight of the largest score is 1.
        count = jnp.ceil(missing / jnp.exp(edge - _finite(top[:, 0])))
        return edge, jnp.maximum(count, least - _count(above) if least > 1 else 1.0)

    reached = (mass_before + top_weights)[:, -1] >= mass
    edge, count_at_edge = lax.cond(
        (size <= width) | jnp.all(reached), among_candidates, by_bisection
    )
    edge = edge[:, None]

    def split_ties() -> Bool[Array, "B V"]:
        position = jnp.arange(size, dtype=jnp.uint32)[None]
        first = _bisect(
            lambda least: jnp.where((x == edge) & (position >= least), 1.0, 0.0),
            count_at_edge,
            bits=max(1, (size - 1).bit_length()),
        )
        return (x > edge) | ((x == edge) & (position >= first[:, None]))

    is_split = jnp.any(_count(x == edge) > count_at_edge)
    return lax.cond(is_split, split_ties, lambda: x >= edge)


def nearest_mask(
    distance: Float[Array, "B V"],
    weights: Float[Array, "B V"],
    mass: Float[Array, " B"],
    least: int = 1,
) -> Bool[Array, "B V"]:
    """True at the smallest distances, up to where the summed weights reach ``mass`` (within 1e-6).

    Ties with it are kept. At least ``least`` are kept, earlier columns first among equals.
    """
    nearness = -distance
    mask = nearness >= threshold(nearness, weights, mass * (1 - _ROUNDING))[:, None]
    _, nearest = top_k(nearness, min(least, nearness.shape[1]))
    return mask | _mask_of(nearest, nearness.shape[1])


def top_mask(x: Float[Array, "B V"], count: int) -> Bool[Array, "B V"]:
    """True at the ``count`` largest of each row and at ties with the last of them."""
    if count == 1:
        return x >= jnp.max(x, axis=-1, keepdims=True)
    return x >= top_k(x, min(count, x.shape[1]))[0][:, -1:]


def entropy_mask(x: Float[Array, "B V"], fraction: Float[Array, "*B"]) -> Bool[Array, "B V"]:
    """Top-h: True at the largest scores while their summed -p log p is <= fraction * entropy.

    Uses the 100 largest scores only, renormalised; the largest is always kept.
    """
    top, columns = top_k(x, min(100, x.shape[1]))
    p = jax.nn.softmax(top, axis=-1)
    terms = jnp.where(p > 0, -p * jnp.log(jnp.where(p > 0, p, 1.0)), 0.0)
    budget = jnp.reshape(fraction, (-1, 1)) * jnp.sum(terms, axis=-1, keepdims=True)
    keep = (jnp.cumsum(terms, axis=-1) <= budget) & (p > 0)
    return _mask_of(jnp.where(keep.at[:, 0].set(True), columns, x.shape[1]), x.shape[1])


def unnormalised(x: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """Probabilities divided by the row's largest, which becomes 1; a row of -inf gives zeros."""
    return jnp.exp(x - _finite(jnp.max(x, axis=-1, keepdims=True)))


def _finite(largest: Float[Array, " ..."]) -> Float[Array, " ..."]:
    return jnp.where(jnp.isfinite(largest), largest, 0.0)


def _smallest(x: Float[Array, "B n"], where: Bool[Array, "B n"]) -> Float[Array, " B"]:
    return jnp.min(jnp.where(where, x, jnp.inf), axis=-1)


def _count(mask: Bool[Array, "B n"]) -> Float[Array, " B"]:
    # In float32, exact below 2**24: XLA's CPU compiler has a ready kernel for such sums.
    return jnp.sum(jnp.where(mask, jnp.float32(1), jnp.float32(0)), axis=-1)


def _mask_of(columns: Int[Array, "B n"], width: int) -> Bool[Array, "B width"]:
    rows = jnp.arange(columns.shape[0])[:, None]
    return jnp.zeros((columns.shape[0], width), bool).at[rows, columns].set(True, mode="drop")
