"""SynthID watermark (Dathathri et al. 2024, doi:10.1038/s41586-024-08025-4), as transformers 5.23.

Every token after every context has one bit per key. Sampling is biased towards tokens with more
ones ("tournament sampling"), so that the mean of a sequence's bits reveals the watermark: detect it
with the bits and masks that the processor computes, and with the scores below.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Num, UInt8

from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError
from jaxllm.contrib.watermark.green_list import WatermarkSettings
from jaxllm.contrib.watermark.torch_numbers import Int64, random_bits
from jaxllm.generation.inputs.values import int_leaf
from jaxllm.generation.processors.base import (
    History,
    LogitsProcessor,
    Scores,
    logits_processor,
    prompt_length,
    store,
)

_MULTIPLIER = Int64.of_ints(6364136223846793005)  # from Knuth's MMIX generator
_ONE = Int64.of_ints(1)
_LARGEST_TABLE = 2**24


@logits_processor(
    static=(
        *("ngram_len", "sampling_table_size", "context_history_size"),
        *("skip_first_ngram_calls", "debug_mode"),
    )
)
class SynthIDTextWatermarkLogitsProcessor(LogitsProcessor):
    """Biases the scores by the bits of each token; returns log-probabilities.

    The context of a token is the ``ngram_len - 1`` new tokens before it, padded with zeros on the
    left. A context that occurred among the last ``context_history_size`` gets no watermark again.
    transformers keeps this history as state; here it is computed from the tokens so far, with the
    same result (and correct for beams, which are reordered).

    Args:
        ngram_len: context length plus one, at least 2.
        keys: secret keys, 64-bit integers, one per round.
        sampling_table_size: number of bits in the table, at most 2**24.
        sampling_table_seed: seed of the table, drawn as by torch's generator.
        context_history_size: number of previous contexts that count as used.
        skip_first_ngram_calls: no watermark until the context has ``ngram_len - 1`` new tokens.
        debug_mode: replaces all scores by ones before biasing.
        prompt_len: columns before the first new token, for calls that do not pass it.
    """

    keys: Int64
    sampling_table: UInt8[Array, " P"]
    prompt_len: Int[Array, ""] | None
    ngram_len: int
    sampling_table_size: int
    context_history_size: int
    skip_first_ngram_calls: bool
    debug_mode: bool

    def __init__(
        self,
        ngram_len: int,
        keys: Sequence[int],
        sampling_table_size: int = 2**16,
        sampling_table_seed: int = 0,
        context_history_size: int = 1024,
        skip_first_ngram_calls: bool = False,
        debug_mode: bool = False,
        prompt_len: int | Array | None = None,
    ) -> None:
        owner = type(self).__name__
        for name, value, minimum, maximum in (
            ("ngram_len", ngram_len, 2, 2**16),
            ("sampling_table_size", sampling_table_size, 1, _LARGEST_TABLE),
            ("sampling_table_seed", sampling_table_seed, -(2**63), 2**64 - 1),
            ("context_history_size", context_history_size, 1, 2**31 - 1),
        ):
            if not is_integer(value) or not minimum <= value <= maximum:
                raise InputError(
                    f"{owner}: `{name}` must be an integer from {minimum} to {maximum}, but is "
                    f"{value!r}"
                )
        key_list = list(keys) if isinstance(keys, Sequence | np.ndarray) else []
        if not key_list or not all(is_integer(k) and -(2**63) <= k < 2**63 for k in key_list):
            raise InputError(
                f"{owner}: `keys` must be a non-empty list of integers of 64 bits, but is {keys!r}"
            )
        for name, flag in (
            ("skip_first_ngram_calls", skip_first_ngram_calls),
            ("debug_mode", debug_mode),
        ):
            if not isinstance(flag, bool):
                raise InputError(f"{owner}: `{name}` must be true or false, but is {flag!r}")
        store(
            self,
            keys=Int64.of_ints([int(k) for k in key_list]),
            sampling_table=random_bits(sampling_table_seed, sampling_table_size),
            prompt_len=None if prompt_len is None else int_leaf(owner, "prompt_len", prompt_len),
            ngram_len=int(ngram_len),
            sampling_table_size=int(sampling_table_size),
            context_history_size=int(context_history_size),
            skip_first_ngram_calls=skip_first_ngram_calls,
            debug_mode=debug_mode,
        )

    def process(self, history: History, scores: Scores) -> Scores:
        if self.debug_mode:
            scores = jnp.ones_like(scores)
        context, repeated, count = self._context(history, prompt_length(self, history))
        unmarked = repeated
        if self.skip_first_ngram_calls:
            unmarked |= count < self.ngram_len - 1
        return jnp.where(unmarked[:, None], scores, self._watermarked(context, scores))

    def _context(
        self, history: History, prompt_len: Int[Array, "#B 1"]
    ) -> tuple[Int[Array, "B c"], Bool[Array, " B"], Int[Array, " B"]]:
        """Current context, a mask of rows whose context is repeated, and new tokens per row."""
        rows, columns = history.ids.shape
        width = self.ngram_len - 1
        length = jnp.broadcast_to(history.length, (rows, 1))
        column = jnp.arange(columns)[None]
        new = jnp.where((column >= prompt_len) & (column < length), history.ids, 0)
        padded = jnp.pad(new, ((0, 0), (width, 0)))  # column c follows padded[:, c : c + width]
        context = jnp.take_along_axis(padded, length + jnp.arange(width), axis=1)
        first = prompt_len + (width if self.skip_first_ngram_calls else 0)
        first = jnp.maximum(first, length - self.context_history_size)
        equal = (column >= first) & (column < length)
        for i in range(width):
            equal &= padded[:, i : i + columns] == context[:, i : i + 1]
        return context, equal.any(-1), (length - prompt_len)[:, 0]

    def _watermarked(self, context: Int[Array, "B c"], scores: Scores) -> Scores:
        """Log-probabilities after all tournament rounds (equation 2 of the paper's methods)."""
        tokens = Int64.of_tokens(jnp.arange(scores.shape[1]))
        hashed = accumulate_hash(_ONE, context).map(lambda half: half[:, None])
        hashed = _step(hashed, tokens)

        def tournament(probs: Array, key: Int64) -> tuple[Array, None]:
            bits = self._bits(_step(hashed, key)).astype(jnp.float32)
            mass = (bits * probs).sum(-1, keepdims=True)
            return probs * (1 + bits - mass), None

        probs, _ = lax.scan(tournament, jax.nn.softmax(scores, -1), self.keys)
        log_probs = jnp.log(probs)
        lowest = jnp.finfo(jnp.float32).min
        return jnp.where(jnp.isfinite(log_probs), log_probs, lowest)

    def _bits(self, keys: Int64) -> UInt8[Array, " ..."]:
        return jnp.asarray(self.sampling_table)[keys.modulo(self.sampling_table_size)]

    def compute_g_values(self, input_ids: Int[Array, "B L"]) -> UInt8[Array, "B N K"]:
        """Bit of each token for each key (g-values), without the first ``ngram_len - 1`` tokens."""
        ids = jnp.asarray(self._checked(input_ids))
        count = ids.shape[1] - self.ngram_len + 1
        ngrams = jnp.stack([ids[:, i : i + count] for i in range(self.ngram_len)], -1)
        hashed = accumulate_hash(_ONE, ngrams).map(lambda half: half[..., None])
        return self._bits(_step(hashed, self.keys))

    def compute_context_repetition_mask(self, input_ids: Int[Array, "B L"]) -> np.ndarray:
        """Mask ``[B, L - ngram_len + 1]``, False where the context was used before."""
        ids = np.asarray(self._checked(input_ids))
        width = self.ngram_len - 1
        mask = np.ones((ids.shape[0], ids.shape[1] - width), bool)
        history = self.context_history_size
        for row, row_mask in zip(ids, mask, strict=True):
            last_use: dict[bytes, int] = {}
            for i in range(row_mask.size):
                context = row[i : i + width].tobytes()
                row_mask[i] = i - last_use.get(context, -history - 1) > history
                last_use[context] = i
        return mask

    def compute_eos_token_mask(
        self, input_ids: Int[Array, "B L"], eos_token_id: int
    ) -> Bool[Array, "B L"]:
        """Mask, False from the first end token on."""
        ended = jnp.asarray(self._checked(input_ids)) == eos_token_id
        return jnp.cumsum(ended, axis=1) == 0

    def expected_mean_g_value(self, vocab_size: int, coinflip_prob: float = 0.5) -> float:
        """Expected mean bit after one watermark round, for a uniform language model."""
        return coinflip_prob + coinflip_prob * (1 - coinflip_prob) * (1 - 1 / vocab_size)

    def _checked(self, input_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
        shape = np.shape(input_ids)
        if len(shape) != 2 or shape[1] < self.ngram_len:
            raise InputError(
                f"input_ids: expected [batch, length] with at least ngram_len = {self.ngram_len} "
                f"tokens, found {shape}"
            )
        return input_ids


@dataclass(frozen=True)
class SynthIDTextWatermarkingConfig(WatermarkSettings):
    """SynthID config (Dathathri et al. 2024); see :class:`SynthIDTextWatermarkLogitsProcessor`."""

    ngram_len: int
    keys: tuple[int, ...]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.keys, list):
            object.__setattr__(self, "keys", tuple(self.keys))
        self.construct_processor()

    def construct_processor(
        self, vocab_size: int | None = None, prompt_len: int | None = None
    ) -> SynthIDTextWatermarkLogitsProcessor:
        """Builds the processor; ``vocab_size`` is unused. ``generate`` passes the prompt length."""
        return SynthIDTextWatermarkLogitsProcessor(**self.to_dict(), prompt_len=prompt_len)


def accumulate_hash(start: Int64, data: Int[Array, "*shape n"]) -> Int64:
    """Hashes tokens along the last axis, starting from ``start``; returns shape ``shape``."""
    for i in range(data.shape[-1]):
        start = _step(start, Int64.of_tokens(data[..., i]))
    return start


def _step(hashed: Int64, data: Int64) -> Int64:
    return hashed.plus(data).times(_MULTIPLIER).plus(_ONE)


def mean_score(
    g_values: Num[Array, "B N K"], mask: Bool[Array, "B N"] | Int[Array, "B N"]
) -> Float[Array, " B"]:
    """Mean of the unmasked bits: about 0.5 without a watermark, more with one."""
    weights = jnp.ones((np.shape(g_values)[-1],))
    return _score(g_values, mask, weights)


def weighted_mean_score(
    g_values: Num[Array, "B N K"],
    mask: Bool[Array, "B N"] | Int[Array, "B N"],
    weights: Float[Array, " K"] | None = None,
) -> Float[Array, " B"]:
    """Mean of the unmasked bits, weighted by round; None: 10 down to 1, as early rounds weigh more.

    Both scores match the paper's own code; neither needs training.
    """
    if weights is None:
        weights = jnp.linspace(10.0, 1.0, np.shape(g_values)[-1])
    return _score(g_values, mask, jnp.asarray(weights) / jnp.mean(jnp.asarray(weights)))


def _score(g_values: Array, mask: Array, weights: Array) -> Float[Array, " B"]:
    token_weights = jnp.asarray(mask, jnp.float32)
    means = (jnp.asarray(g_values, jnp.float32) * weights).mean(-1)
    return (means * token_weights).sum(-1) / token_weights.sum(-1)
