"""Checks the arguments of `JaxLM`, and gives those that were left out."""

from __future__ import annotations

from os import PathLike
from typing import Any

from lm_eval.models.utils import DEFAULT_MAX_LENGTH

import jaxllm
from jaxllm.common.errors import InputError
from jaxllm.common.progress import Reporter
from jaxllm.generation.inputs.values import is_integer
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers import Tokenizer

DEFAULT_BATCH_SIZE = 32
UNLIMITED = 10**29
"""transformers writes 1e30 as the `model_max_length` of a tokenizer without a limit."""


def load_pretrained(
    pretrained: str | PathLike[str] | GenerativeModel, reporter: Reporter, **options: Any
) -> tuple[GenerativeModel, Tokenizer | None]:
    """Loads a model and its tokenizer; a model itself comes without one.

    Args:
        options: of `jaxllm.load`; those that are None are as if left out.
    """
    if isinstance(pretrained, str | PathLike):
        with reporter.phase(f"loading {pretrained}") as update:
            return jaxllm.load(pretrained, progress=update, **options)
    for name, value in options.items():
        if value is not None:
            raise InputError(f"{name}: has no effect on a model that is loaded; load it with it")
    return pretrained, None


def batch_sizes(batch_size: int | str | None, max_batch_size: int | None) -> tuple[int, int | None]:
    """Pairs that are scored at once, and slots (None: the batch engine's default).

    >>> batch_sizes("auto", None), batch_sizes("auto:4", 8), batch_sizes("16", None)
    ((32, None), (8, 8), (16, 16))
    """
    text = str("auto" if batch_size is None else batch_size)
    if text == "auto" or text.startswith("auto:"):
        return max_batch_size or DEFAULT_BATCH_SIZE, max_batch_size
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"batch_size: expected a positive integer or auto, found {batch_size!r}")
    return int(text), int(text)


def length_limit(model: GenerativeModel, tokenizer: Tokenizer, max_length: int | None) -> int:
    """Tokens that are read at once: `max_length`, the model's context, its tokenizer's, or 2048."""
    if max_length is None:
        limit: Any = model.config.context_length
        if limit is None:
            limit = tokenizer.settings.options.get("model_max_length")
        return int(limit) if is_integer(limit) and limit < UNLIMITED else DEFAULT_MAX_LENGTH
    positions = model.config.max_positions
    if not is_integer(max_length) or not 1 < max_length <= (positions or max_length):
        raise InputError(f"max_length: expected 2 to {positions or 'any'}, found {max_length!r}")
    return int(max_length)
