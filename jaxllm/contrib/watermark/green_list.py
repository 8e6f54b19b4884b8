"""The green-list watermark of Kirchenbauer et al. 2023 (arXiv:2301.10226, arXiv:2306.04634).

The green lists equal those of transformers 5.23 on the CPU, so each library detects the other's
watermark. (On a GPU, transformers draws different lists, which only the same kind of GPU can
reproduce.) `WatermarkDetector` finds the watermark by their z-test.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.torch_numbers import (
    Int64,
    first_of_permutation,
    first_of_permutations,
    permutation,
    smallest,
)
from jaxllm.generation.inputs.values import Number, bucket, float_leaf
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
_AT_ONCE = 32  # permutations of the vocabulary held in memory at a time
_SMALLEST_BUCKET = 32


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


class WatermarkSettings:
    """Base class of the configs of watermarks: conversion from and to a mapping."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any]) -> Self:
        """Creates the config from names and values, as in a file."""
        names = {field.name for field in fields(cls)}  # pyright: ignore[reportArgumentType]
        unknown = sorted(map(str, set(config_dict) - names))
        if unknown:
            raise InputError(
                f"watermarking_config: {unknown[0]!r} is not among the settings of "
                f"{cls.__name__}, which are {sorted(names)}"
            )
        try:
            return cls(**config_dict)
        except TypeError as error:  # a setting without a default is missing
            raise InputError(f"watermarking_config: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class WatermarkingConfig(WatermarkSettings):
    """Green-list config (Kirchenbauer et al. 2023); see :class:`WatermarkLogitsProcessor`.

    >>> WatermarkingConfig.from_dict({"bias": 2.5, "seeding_scheme": "selfhash"}).context_width
    1
    """

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def __post_init__(self) -> None:
        self.construct_processor(vocab_size=2**10)

    def construct_processor(self, vocab_size: int) -> WatermarkLogitsProcessor:
        return WatermarkLogitsProcessor(vocab_size, **self.to_dict())


@dataclass(frozen=True)
class WatermarkDetectorOutput:
    """Detection results, float64 ``[B]`` each (``prediction``: bool); p-values are one-sided."""

    num_tokens_scored: np.ndarray
    num_green_tokens: np.ndarray
    green_fraction: np.ndarray
    z_score: np.ndarray
    p_value: np.ndarray
    prediction: np.ndarray
    confidence: np.ndarray


class WatermarkDetector:
    """Detects whether sequences carry the watermark; transformers' class of this name.

    Args:
        model_config: the model's config: ``vocab_size``, and the decoder start or BOS token.
        watermarking_config: the settings that the sequences were generated with.
        ignore_repeated_ngrams: whether to count each n-gram once per sequence.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(vocab_size=50, bos_token_id=1)
    >>> detector = WatermarkDetector(config, WatermarkingConfig())
    >>> detector([[7, 8, 9, 10]])
    array([False])
    """

    def __init__(
        self,
        model_config: Any,
        watermarking_config: WatermarkingConfig | Mapping[str, Any],
        ignore_repeated_ngrams: bool = False,
    ) -> None:
        if isinstance(watermarking_config, Mapping):
            watermarking_config = WatermarkingConfig.from_dict(watermarking_config)
        start = getattr(model_config, "decoder_start_token_id", None)
        self.bos_token_id = model_config.bos_token_id if start is None else start
        self.greenlist_ratio = watermarking_config.greenlist_ratio
        self.ignore_repeated_ngrams = ignore_repeated_ngrams
        self.processor = watermarking_config.construct_processor(model_config.vocab_size)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        z_threshold: float = 3.0,
        return_dict: bool = False,
        *,
        attention_mask: Bool[Array, "B L"] | Int[Array, "B L"] | None = None,
    ) -> WatermarkDetectorOutput | np.ndarray:
        """Tests each row.

        Args:
            input_ids: sequences, preferably without prompts, which carry no watermark.
            z_threshold: z-score above which a sequence counts as watermarked.
            return_dict: whether to return all statistics instead of the predictions alone.
            attention_mask: padding mask; n-grams with a masked token do not count. None: all tokens
                count (as always in transformers).

        Raises:
            InputError: the rows are too short, or only some begin with BOS.
        """
        ids = np.asarray(input_ids)
        mask = np.ones(ids.shape, bool) if attention_mask is None else np.asarray(attention_mask)
        if ids.ndim != 2 or mask.shape != ids.shape or not ids.size:
            raise InputError(
                f"input_ids: expected [batch, length] and a mask alike, found {ids.shape} and "
                f"{mask.shape}"
            )
        begins_with_bos = ids[:, 0] == self.bos_token_id
        if begins_with_bos.any() != begins_with_bos.all():
            raise InputError("input_ids: some rows begin with BOS and some do not")
        if begins_with_bos.all():
            ids, mask = ids[:, 1:], mask[:, 1:]
        width = self.processor.context_width
        if ids.shape[1] <= width:
            raise InputError(
                f"input_ids: {ids.shape[1]} tokens without BOS, but the first that can be scored "
                f"has {width} before it"
            )
        scored, green = self._count(ids, mask.astype(bool))
        expected = self.greenlist_ratio
        with np.errstate(divide="ignore", invalid="ignore"):  # a row without a counted token: NaN
            fraction = green / scored
            z = (green - expected * scored) / np.sqrt(scored * expected * (1 - expected))
        prediction = z > z_threshold
        if not return_dict:
            return prediction
        p = np.array([0.5 * math.erfc(value / math.sqrt(2)) for value in z])
        return WatermarkDetectorOutput(scored, green, fraction, z, p, prediction, 1 - p)

    def _count(self, ids: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Number of n-grams that count in each row, and how many of them end in a green token."""
        width = self.processor.context_width
        self_hash = self.processor.seeding_scheme == "selfhash"
        size = width if self_hash else width + 1
        windows = np.lib.stride_tricks.sliding_window_view(ids, size, axis=1)
        masks = np.lib.stride_tricks.sliding_window_view(mask, size, axis=1)
        unmasked = np.logical_and.reduce(masks, axis=-1)
        ngrams, numbers = np.unique(windows.reshape(-1, size), axis=0, return_inverse=True)
        numbers = numbers.reshape(unmasked.shape)
        padded = np.zeros((bucket(len(ngrams), _SMALLEST_BUCKET), size), np.int32)
        padded[: len(ngrams)] = ngrams
        contexts = padded if self_hash else padded[:, :-1]
        green = np.asarray(_green(self.processor, contexts, padded[:, -1]))
        scored = [row[real] for row, real in zip(numbers, unmasked, strict=True)]
        if self.ignore_repeated_ngrams:
            scored = [np.unique(row) for row in scored]
        return (
            np.array([float(len(row)) for row in scored]),
            np.array([float(green[row].sum()) for row in scored]),
        )


@jax.jit
def _green(
    processor: WatermarkLogitsProcessor, contexts: Int[Array, "N w"], tokens: Int[Array, " N"]
) -> Bool[Array, " N"]:
    return jax.lax.map(
        lambda pair: processor.is_green(*pair), (contexts, tokens), batch_size=_AT_ONCE
    )
