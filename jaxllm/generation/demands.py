"""What a call asks of its strategy beyond tokens, and which strategies can do it."""

from __future__ import annotations

from typing import Any

from jaxllm.errors import UnsupportedError
from jaxllm.generation.columns import Columns
from jaxllm.generation.config import GenerationConfig
from jaxllm.generation.strategy import Strategy


def check_strategy(
    strategy: Strategy[Any],
    config: GenerationConfig,
    given: Columns,
    continued: bool,
    returns_past: bool,
    guided: bool,
) -> None:
    """Raises for what the strategy cannot give, or start from.

    Args:
        given: the decoder's prompt.
        continued: the call has `past_key_values`.
        returns_past: it has `return_past_key_values`.
        guided: it has unconditional contexts, and with them twice the rows.
    """
    for name in ("output_hidden_states", "output_attentions"):
        if getattr(config, name) and continued:
            raise UnsupportedError(f"`{name}`: not beside past_key_values, whose part is not read")
    if continued and not strategy.continues:
        raise UnsupportedError(
            "past_key_values: contrastive search compares hidden states of the whole text, which a "
            "cache does not hold (transformers fails there, too)"
        )
    asked = {"past_key_values": continued, "return_past_key_values": returns_past}
    for name, wanted in asked.items():
        if wanted and guided:
            raise UnsupportedError(f"{name}: not together with guidance_scale")
    sliding = config.cache_implementation == "sliding_window"
    if sliding and not strategy.slides:
        raise UnsupportedError(
            "cache_implementation: only greedy search, sampling and DoLa have a sliding window"
        )
    if sliding and config.output_attentions:
        raise UnsupportedError(
            "`output_attentions`: not with a sliding window, whose slots are not columns"
        )
    if sliding and returns_past:
        raise UnsupportedError(
            "return_past_key_values: a sliding window has lost what a later call needs"
        )
    if returns_past and given.ids is None:
        raise UnsupportedError(
            "return_past_key_values: a prompt of inputs_embeds has no tokens that a later call "
            "could be compared with"
        )
