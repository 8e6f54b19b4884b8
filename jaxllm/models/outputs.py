"""What a call of a model returns: Hugging Face's field names, in pytrees that pass through jit."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxllm.cache.kv_cache import Cache

Layers = tuple[Float[Array, " ..."], ...] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOutput:
    last_hidden_state: Float[Array, "B T D"]
    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None
    cache: Cache | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """What a strategy of generation gets to see of new columns."""

    logits: Float[Array, "B N V"]
    """Float32; of every new column (N = T), or of the one that was asked for (N = 1)."""
    unconditional_logits: Float[Array, "B N V"] | None = None
    """Those after the negative prompt, where there is guidance."""
    cache: Cache
    last_hidden_state: Float[Array, "B T D"]
    """After the final norm; of every new column."""
    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None
    encoder_hidden_states: Layers = None
    """Of an encoder-decoder's prompt, where they are kept."""
    encoder_attentions: Layers = None

    def replace(self, **changes) -> DecodeOutput:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLMOutput:
    """`logits` are float32. `loss` is the mean over the labels that are not -100."""

    logits: Float[Array, "B T V"]
    loss: Float[Array, ""] | None = None
    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None
    cache: Cache | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Seq2SeqLMOutput:
    logits: Float[Array, "B T V"]
    loss: Float[Array, ""] | None = None
    encoder_last_hidden_state: Float[Array, "B E D"] | None = None
    encoder_hidden_states: Layers = None
    encoder_attentions: Layers = None
    decoder_hidden_states: Layers = None
    decoder_attentions: Layers = None
    cross_attentions: Layers = None
    cache: Cache | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceClassifierOutput:
    logits: Float[Array, "B C"]
    loss: Float[Array, ""] | None = None
    hidden_states: Layers = None
    attentions: Layers = None
