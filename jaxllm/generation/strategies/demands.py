"""What a call asks of its strategy beyond tokens, and which strategies can do it."""

from __future__ import annotations

from typing import Any

from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.inputs.padded_batch import PaddedBatch
from jaxllm.generation.strategies.strategy import Strategy


def check_strategy(
    strategy: Strategy[Any],
    given: PaddedBatch,
    continued: bool,
    returns_past: bool,
) -> None:
    """Raises for what the strategy cannot give, or start from.

    Args:
        given: the decoder's prompt.
        continued: the call has `past_key_values`.
        returns_past: it has `return_past_key_values`.
    """
    if continued and not strategy.continues:
        raise UnsupportedError(
            "past_key_values: contrastive search compares hidden states of the whole text, which a "
            "cache does not hold (transformers fails there, too)"
        )
    if returns_past and given.ids is None:
        raise UnsupportedError(
            "return_past_key_values: a prompt of inputs_embeds has no tokens that a later call "
            "could be compared with"
        )
