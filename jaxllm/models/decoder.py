"""The interface between models and decoding strategies.

`init_cache` allocates the KV cache (an encoder-decoder encodes and projects its cross-attention
keys and values there, once). `decode` runs new columns on top of the cache. Strategies know nothing
of models beyond this; models know nothing of strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.models.config import ModelConfig
from jaxllm.models.outputs import DecodeOutput
from jaxllm.nn.blocks import StackOutput
from jaxllm.parallel.sharding import constrain


class Decoder(Protocol):
    """A model that decodes step by step: a pytree of arrays, as strategies see it.

    All arguments are arrays; token ids and lengths were checked before. Of `config` generation
    reads `vocab_size`, `max_positions`, `context_length`, `eos_token_ids` and the special tokens.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def is_encoder_decoder(self) -> bool: ...

    @property
    def depth(self) -> int:
        """Number of decoder layers."""
        ...

    @property
    def tied_embedding(self) -> bool:
        """The LM head shares the embedding matrix."""
        ...

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings, without positions and token types."""
        ...

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The LM head: float32 logits of hidden states."""
        ...

    def init_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache of `capacity` columns.

        Encoder inputs are further keyword arguments: an encoder-decoder's `input_ids` [B, E] or
        `inputs_embeds` [B, E, D] or `encoder_states` [B, E, D] with their `attention_mask` [B, E];
        GPT-2's `encoder_hidden_states` [B, E, D] with `encoder_attention_mask` [B, E].
        """
        ...

    def decode(
        self,
        tokens: Int[Array, "B T"],
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        cache_is_empty: bool = False,
        logits_column: Int[Array, " B"] | None = None,
        branches: Branches | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> DecodeOutput:
        """Runs T new columns on top of the cache.

        Decoder-only models also take `inputs_embeds` [B, T, D] (`tokens` is then None) and
        `token_type_ids` [B, T].

        Args:
            tokens: ids of the new columns.
            mask: True at real tokens.
            cache: what came before; its first free slots take the new columns.
            cache_is_empty: prefill: the new columns attend to each other only.
            logits_column: the column of each row whose logits are computed; None: all columns.
            branches: the new columns are alternatives side by side, not one after the other.
        """
        ...

    def early_exit(self, layers: int) -> Decoder:
        """A model with only the first decoder layers; it shares the parameters."""
        ...


class EncoderDecoder(Decoder, Protocol):
    """A decoder with an encoder."""

    def encode(
        self,
        input_ids: Int[Array, "B E"] | None,
        mask: Bool[Array, "B E"],
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
    ) -> StackOutput:
        """The encoder's output; `x` is what `init_cache` takes as `encoder_states`."""
        ...


class GenerativeModel(Decoder, Protocol):
    """A decoder as users hold it: with the settings that its checkpoint brings (see `Model`)."""

    generation_config: Any
    extra_eos_token_ids: tuple[int, ...]


def decode_output(
    out: StackOutput,
    logits: Callable[[Array], Array],
    cache: Cache,
    logits_column: Int[Array, " B"] | None,
) -> DecodeOutput:
    """The output of `Decoder.decode` from that of the decoder's stack."""
    scores = logits(out.x if logits_column is None else take_column(out.x, logits_column))
    # Keep logits vocab-sharded, then all-gather: in one step XLA may all-gather the head's weights.
    scores = constrain(constrain(scores, "rows", None, "vocab"), "rows")
    return DecodeOutput(
        logits=scores,
        cache=cache.replace(layers=out.layers),
        last_hidden_state=out.x,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        cross_attentions=out.cross_attentions,
    )


def take_column(x: Float[Array, "B T D"], column: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """Column column[b] of each row b."""
    return jnp.take_along_axis(x, column[:, None, None], axis=1)
