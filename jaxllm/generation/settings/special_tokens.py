"""Special tokens of a call: those that end a sequence, and the one that pads rows."""

from __future__ import annotations

from typing import Any

from jaxllm.common.errors import InputError
from jaxllm.generation.settings.config import GenerationConfig


def resolve_eos(config: GenerationConfig, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """The end-of-sequence tokens: those of the settings, else ``default`` (the model's).

    ``eos_token_id=None`` given in code means none at all.
    """
    if "eos_token_id" in config.to_dict():
        return token_tuple(config.eos_token_id)
    return default


def resolve_pad(config: GenerationConfig, eos: tuple[int, ...]) -> int | None:
    """The padding token: that of the settings, else the first end token, else None."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    return eos[0] if eos else None


def token_tuple(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """No token, one, or several, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_pad(model: Any, config: GenerationConfig, eos: tuple[int, ...]) -> int | None:
    """The padding token of the settings or else of the model, checked against the vocabulary."""
    pad = resolve_pad(config, eos)
    pad = model.config.pad_token_id if pad is None else pad
    vocabulary = model.config.vocab_size
    if pad is not None and not 0 <= pad < vocabulary:
        raise InputError(f"pad_token_id: {pad} is not in the vocabulary (0 to {vocabulary - 1})")
    return pad
