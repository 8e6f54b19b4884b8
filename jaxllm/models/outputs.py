"""Outputs of models: pytrees with Hugging Face's field names."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from jaxllm.cache.kv_cache import Cache
from jaxllm.nn.blocks import StackOutput

Layers = tuple[Float[Array, " ..."], ...] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BaseOutput:
    """Output of a backbone or an encoder. `hidden_states` are each block's input, then the last
    hidden state; the weights [B, N, T, S] of `attentions` have one entry a layer."""

    last_hidden_state: Float[Array, "B T D"]
    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None
    cache: Cache | None = None


def base_output(out: StackOutput, cache: Cache | None = None) -> BaseOutput:
    """The output of a stack under Hugging Face's names, with the updated cache."""
    return BaseOutput(
        last_hidden_state=out.x,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        cross_attentions=out.cross_attentions,
        cache=None if cache is None else cache.replace(layers=out.layers),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeOutput:
    """Output of `Decoder.decode` for the new columns."""

    logits: Float[Array, "B N V"]
    """Float32; of every new column (N = T), or of the one that was asked for (N = 1)."""
    unconditional_logits: Float[Array, "B N V"] | None = None
    """Logits after the negative prompt (guidance)."""
    cache: Cache
    last_hidden_state: Float[Array, "B T D"]
    """After the final norm, for every new column."""
    hidden_states: Layers = None
    attentions: Layers = None
    cross_attentions: Layers = None
    encoder_hidden_states: Layers = None
    """The encoder's, after the prefill of an encoder-decoder that records them."""
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
    """Output of an encoder-decoder; `loss` as of `CausalLMOutput`."""

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
    """Scores of the classes; `loss` depends on the config's `problem_type`."""

    logits: Float[Array, "B C"]
    loss: Float[Array, ""] | None = None
    hidden_states: Layers = None
    attentions: Layers = None
