"""The green-list watermark of Kirchenbauer et al. 2023 (arXiv:2301.10226, arXiv:2306.04634).

The green lists equal those of transformers 5.23 on the CPU, so each library detects the other's
watermark. (On a GPU, transformers draws different lists, which only the same kind of GPU can
reproduce.)
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.torch_numbers import (
    Int64,
    first_of_permutation,
    first_of_permutations,
    permutation,
    smallest,
)
from jaxllm.generation.inputs.values import Number, float_leaf, is_integer
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    store,
)

SCHEMES = ("lefthash", "selfhash")
_TABLE_SIZE = 1_000_003
_CANDIDATES = 40  # for selfhash; the number used by the original implementation


@logits_processor(static=("vocab_size", "greenlist_size", "seeding_scheme", "context_width"))
class WatermarkLogitsProcessor(LogitsProcessor):
    """Adds ``bias`` to the scores of the green tokens, which depend on the last tokens.

    ``lefthash``: the last token seeds a permutation of the vocabulary, whose first
    ``greenlist_ratio`` is green. ``selfhash``: each of the 40 best tokens, with the tokens before
    it, seeds its own list and is green if that list contains it; much slower, since it computes 40
    permutations per row.

    Padding is ignored, and a row with fewer than ``context_width`` tokens gets no watermark yet
    (transformers counts padding as tokens).

    Args:
        vocab_size: size of the model's vocabulary; part of the hash.
        greenlist_ratio: share of green tokens, in (0, 1).
        bias: number added to the scores of green tokens.
        hashing_key: secret key, a non-negative integer. Changing it or ``bias`` does not compile
            again.
        seeding_scheme: "lefthash" or "selfhash".
        context_width: number of tokens that determine the list; for ``selfhash``, with the new one.
    """

    bias: Float[Array, ""]
    key: Int64
    table: Int[Array, " P"]
    vocab_size: int
    greenlist_size: int
    seeding_scheme: str
    context_width: int

    def __init__(
        self,
        vocab_size: int,
        greenlist_ratio: float = 0.25,
        bias: Number = 2.0,
        hashing_key: int = 15485863,
        seeding_scheme: str = "lefthash",
        context_width: int = 1,
    ) -> None:
        owner = type(self).__name__
        if seeding_scheme not in SCHEMES:
            raise InputError(
                f"{owner}: `seeding_scheme` must be one of {SCHEMES}, but is {seeding_scheme!r}"
            )
        for name, value in (("vocab_size", vocab_size), ("context_width", context_width)):
            if not is_integer(value) or value < 1:
                raise InputError(f"{owner}: `{name}` must be a positive integer, but is {value!r}")
        if not is_integer(hashing_key) or not 0 <= hashing_key * vocab_size < 2**63:
            raise InputError(
                f"{owner}: `hashing_key` must be a non-negative integer, and its product with the "
                f"size of the vocabulary must be below 2**63, but it is {hashing_key!r}"
            )
        float_leaf(owner, "greenlist_ratio", greenlist_ratio, "(0, 1)")
        table = _fixed_table(int(hashing_key)) if seeding_scheme == "selfhash" else _NO_TABLE
        store(
            self,
            bias=float_leaf(owner, "bias", bias, "(-inf, inf)"),
            key=Int64.of_ints(int(hashing_key)),
            table=table,
            vocab_size=int(vocab_size),
            greenlist_size=int(vocab_size * greenlist_ratio),
            seeding_scheme=seeding_scheme,
            context_width=int(context_width),
        )

    def process(self, history: History, scores: Scores) -> Scores:
        context, exists = history.last(self.context_width)
        if self.seeding_scheme == "lefthash":
            green = first_of_permutations(
                self._left_hash_seed(context[:, -1]), self.vocab_size, self.greenlist_size
            )
        else:
            green = lax.map(lambda row: self._self_hash_green(*row), (context[:, 1:], scores))
        green = _to_width(green, scores.shape[1]) & exists.all(-1, keepdims=True)
        return jnp.where(green, scores + self.bias, scores)

    def is_green(self, context: Int[Array, " w"], token: Int[Array, ""]) -> Bool[Array, ""]:
        """True if ``token`` is in the green list after ``context``, the tokens before it.

        For ``selfhash`` the context ends with the token itself.
        """
        if self.seeding_scheme == "lefthash":
            seed = self._left_hash_seed(context[-1])
        else:
            seed = self._self_hash_seed(context[:-1], context[-1])
        return self._green(seed, token)

    def _green(self, seed: UInt32[Array, ""], token: Int[Array, ""]) -> Bool[Array, ""]:
        green = first_of_permutation(seed, self.vocab_size, self.greenlist_size)
        return green[jnp.minimum(token, self.vocab_size - 1)] & (token < self.vocab_size)

    def _left_hash_seed(self, token: Int[Array, " ..."]) -> UInt32[Array, " ..."]:
        return self.key.lo * jnp.asarray(token, jnp.uint32)

    def _self_hash_seed(
        self, before: Int[Array, " w"], candidate: Int[Array, ""]
    ) -> UInt32[Array, ""]:
        """Least hash of the candidate with itself and with each token before it."""
        tokens = jnp.append(before, candidate)
        hashed = Int64.of_tokens(jnp.asarray(self.table)[tokens % _TABLE_SIZE] + 1)
        least = smallest(self.key.times(hashed).times(hashed.map(lambda half: half[-1])))
        # transformers takes the seed modulo 2**64 - 1, which subtracts one from a negative number.
        return least.lo - least.negative().astype(jnp.uint32)

    def _self_hash_green(
        self, before: Int[Array, " w"], scores: Float[Array, " V"]
    ) -> Bool[Array, " V"]:
        _, best = lax.top_k(scores, min(_CANDIDATES, scores.shape[0]))
        seeds = jax.vmap(self._self_hash_seed, in_axes=(None, 0))(before, best)
        green = jax.vmap(self._green)(seeds, best)
        return jnp.zeros(scores.shape, bool).at[best].set(green)


def _to_width(green: Bool[Array, "B v"], width: int) -> Bool[Array, "B V"]:
    """Crops or pads the mask to ``width``; ids beyond the watermark's vocabulary are not green."""
    missing = max(width - green.shape[1], 0)
    return jnp.pad(green, ((0, 0), (0, missing)))[:, :width]


@functools.lru_cache(maxsize=4)
def _fixed_table(hashing_key: int) -> np.ndarray:
    return permutation(hashing_key, _TABLE_SIZE)


_NO_TABLE = np.zeros((0,), np.int32)
