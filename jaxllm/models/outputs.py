"""Outputs of models: pytrees with Hugging Face's field names."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.field_mapping import ArrayMapping

PerLayer = tuple[Float[Array, " ..."], ...] | None


class ModelOutput(ArrayMapping):
    """Base of outputs: fields by attribute, name and index, as of transformers' outputs.

    Fields that are None do not count: ``out[0]`` is the loss if there is one, else the logits.
    Iterating gives names, as for any mapping; ``to_tuple()`` gives the values.
    """

    def __getitem__(self, key: str | int | slice) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else self.to_tuple()[key]

    def to_tuple(self) -> tuple[Any, ...]:
        """Values of the fields that are not None, in order."""
        return tuple(self.values())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BaseOutput(ModelOutput):
    """Output of a backbone or an encoder. `hidden_states`: each block's input, then the last
    hidden state. `attentions`: attention weights [B, N, T, S] per layer."""

    last_hidden_state: Float[Array, "B T D"]
    cache: Cache | None = None
    hidden_states: PerLayer = None
    attentions: PerLayer = None
    cross_attentions: PerLayer = None
    router_logits: PerLayer = None
    """Logits of the experts, [B * T, E] of each layer that has any; None for other models."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """Output of `Decoder.decode` for the new columns."""

    logits: Float[Array, "B N V"]
    """Float32 logits of every new column (N = T), or of `logits_column` only (N = 1)."""
    unconditional_logits: Float[Array, "B N V"] | None = None
    """Logits of the negative prompt's rows (classifier-free guidance)."""
    cache: Cache
    last_hidden_state: Float[Array, "B T D"]
    """Hidden states of every new column, after the final norm."""
    hidden_states: PerLayer = None
    attentions: PerLayer = None
    cross_attentions: PerLayer = None
    encoder_hidden_states: PerLayer = None
    """Hidden states of the encoder, after a prefill that records them."""
    encoder_attentions: PerLayer = None

    def replace(self, **changes: Any) -> DecodeOutput:
        return dataclasses.replace(self, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class CausalLMOutput(ModelOutput):
    """Output of a decoder-only LM. `loss` is the mean over the labels that are not -100, to which a
    mixture of experts may add `aux_loss` times a weight, the loss of its routers."""

    loss: Float[Array, ""] | None = None
    aux_loss: Float[Array, ""] | None = None
    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    hidden_states: PerLayer = None
    attentions: PerLayer = None
    cross_attentions: PerLayer = None
    router_logits: PerLayer = None
    """Logits of the experts, [B * T, E] of each layer that has any, where `aux_loss` is."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Seq2SeqLMOutput(ModelOutput):
    """Output of an encoder-decoder; `loss` as in `CausalLMOutput`."""

    loss: Float[Array, ""] | None = None
    logits: Float[Array, "B T V"]
    cache: Cache | None = None
    decoder_hidden_states: PerLayer = None
    decoder_attentions: PerLayer = None
    cross_attentions: PerLayer = None
    encoder_last_hidden_state: Float[Array, "B E D"] | None = None
    encoder_hidden_states: PerLayer = None
    encoder_attentions: PerLayer = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class SequenceClassifierOutput(ModelOutput):
    """Output of a classifier: class logits; `loss` depends on the config's `problem_type`."""

    loss: Float[Array, ""] | None = None
    logits: Float[Array, "B C"]
    hidden_states: PerLayer = None
    attentions: PerLayer = None
