"""Special tokens of a call: end-of-sequence tokens and the padding token."""

from __future__ import annotations

from jaxllm.common.errors import InputError
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.decoder import GenerativeModel


def resolve_eos(config: GenerationConfig, default: tuple[int, ...] = ()) -> tuple[int, ...]:
    """End-of-sequence tokens: from the settings, else ``default`` (the model's).

    ``eos_token_id=None`` given in code means no end-of-sequence token.
    """
    if "eos_token_id" in config.to_dict():
        return token_tuple(config.eos_token_id)
    return default


def resolve_pad(config: GenerationConfig, eos: tuple[int, ...]) -> int | None:
    """Padding token: from the settings, else the first end-of-sequence token, else None."""
    if config.pad_token_id is not None:
        return config.pad_token_id
    return eos[0] if eos else None


def token_tuple(value: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Converts None, one token id or several to a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def checked_pad(
    model: GenerativeModel, config: GenerationConfig, eos: tuple[int, ...]
) -> int | None:
    """Padding token of a call: from `resolve_pad`, or else the model's config.

    A token of a file that is not in the vocabulary counts as unset.

    Raises:
        InputError: the call sets a token that is not in the vocabulary.
    """
    size = model.config.vocab_size
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < size:
        if "pad_token_id" in config.explicit:
            raise InputError(
                f"pad_token_id: {config.pad_token_id} is not in the vocabulary (0 to {size - 1})"
            )
        config = config.without(["pad_token_id"])
    pad = resolve_pad(config, eos)
    return model.config.pad_token_id if pad is None else pad
