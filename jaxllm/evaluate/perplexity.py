"""Perplexity of a long text, in windows of the model's context."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np

from jaxllm.common.arguments import checked, is_integer
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.scoring import score
from jaxllm.models.decoder import GenerativeModel, checked_generative
from jaxllm.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class PerplexityOutput:
    """Log-likelihood of a text."""

    log_likelihood: float
    """Sum over its tokens, in nats."""
    tokens: int
    """Number of tokens that were predicted: all but the first, which has nothing before it."""
    text_bytes: int
    """Bytes of the text in UTF-8."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood of a token; infinity on overflow."""
        try:
            return math.exp(-self.log_likelihood / self.tokens)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """Negative log-likelihood in bits, per byte: independent of the tokenizer."""
        return -self.log_likelihood / math.log(2) / self.text_bytes


def perplexity(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    text: str,
    *,
    context: int | None = None,
    stride: int | None = None,
    batch_size: int = 8,
) -> PerplexityOutput:
    """Computes the perplexity of a text with a causal language model.

    Windows of `context` tokens begin every `stride` tokens. Each token is predicted once, in the
    first window that holds it, so with at least `context - stride` tokens before it (those of the
    first window have fewer). A smaller stride gives a lower, better founded perplexity and takes
    longer.

    Args:
        text: tokenized as a whole, with the special tokens that the tokenizer adds.
        context: tokens of a window; None: the model's context, but at most 2048.
        stride: None: half of `context`.
        batch_size: windows that are computed at once.

    Raises:
        UnsupportedError: the model is an encoder-decoder.
        InputError: the text has fewer than two tokens, or a number is out of range.
    """
    checked_generative(model, "perplexity")
    checked(tokenizer, (Tokenizer,), "tokenizer", "the model's tokenizer")
    checked(text, (str,), "text", "a text")
    if model.is_encoder_decoder:
        raise UnsupportedError("perplexity: an encoder-decoder has none of a text alone")
    limit = model.config.context_length
    context = model.config.default_window if context is None else context
    if not is_integer(context) or context < 2 or (limit is not None and context > limit):
        raise InputError(f"context: expected 2 to {limit or 'any'} tokens, found {context!r}")
    stride = max(context // 2, 1) if stride is None else stride
    if not is_integer(stride) or not 1 <= stride <= context:
        raise InputError(f"stride: expected 1 to context ({context}), found {stride!r}")
    text_bytes = len(text.encode("utf-8"))
    ids = tokenizer.encode(text, max_bytes=max(text_bytes, 1))
    if len(ids) < 2:
        raise InputError(f"text: has {len(ids)} tokens; a perplexity needs two or more")
    prompts, completions = zip(*windows(ids, context, stride), strict=True)
    out = score(model, prompts, completions, batch_size=batch_size)
    return PerplexityOutput(
        log_likelihood=float(np.sum(out.log_likelihoods, dtype=np.float64)),
        tokens=sum(map(len, completions)),
        text_bytes=text_bytes,
    )


def windows(
    ids: Sequence[int], context: int, stride: int
) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
    """Pairs of the tokens before and the tokens to predict, which together are all but the first.

    >>> list(windows([1, 2, 3, 4, 5, 6], 4, 2))
    [([1], [2, 3, 4]), ([3, 4], [5, 6])]
    """
    done = 1
    for start in range(0, len(ids), stride):
        end = min(start + context, len(ids))
        if end > done:
            # With a stride of the whole context a window would begin with a token to predict.
            yield ids[min(start, done - 1) : done], ids[done:end]
            done = end
