"""Base of language models: LM head, and decoding with a KV cache."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.cache.attention_view import AttentionView, Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.arguments import checked
from jaxllm.common.errors import InputError, quoted
from jaxllm.models.model import C, Model
from jaxllm.models.outputs import DecodeOutput
from jaxllm.models.pretrained import Generates
from jaxllm.nn.head_products import LANES
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.stack import Stack, StackOutput
from jaxllm.parallel.sharding import constrain


class LanguageModel(Generates, Model[C]):
    """Base of models with an LM head. Implements `Decoder`; a subclass defines `embedding`,
    `decoder_stack` and `run_decoder`."""

    lm_head: Linear | None
    """None: tied embedding."""

    @property
    def decoder_stack(self) -> Stack:
        """Blocks of the decoder."""
        raise NotImplementedError

    def run_decoder(
        self,
        tokens: Int[Array, "B T"] | None,
        view: AttentionView,
        cache: Cache,
        **options: Any,
    ) -> StackOutput:
        """Runs new columns; `options` are other inputs of the family and those of `Stack`."""
        raise NotImplementedError

    @property
    def depth(self) -> int:
        return len(self.decoder_stack.blocks)

    @property
    def tied_embedding(self) -> bool:
        return self.lm_head is None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.embedding(tokens)

    @property
    def head(self) -> Linear | Embedding:
        """The LM head, or the tied embedding in its place."""
        return self.embedding if self.lm_head is None else self.lm_head

    def scaled_for_head(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        """Hidden states as the LM head reads them."""
        return x

    def logits(self, x: Float[Array, "... D"], key: Array | None = None) -> Float[Array, "... V"]:
        """Float32 logits of hidden states."""
        return head_logits(self.head, self.scaled_for_head(x), key)

    def head_inputs(
        self, *, dropout_key: Array | None = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], Array | None]:
        """One forward pass up to the LM head: its input, and its dropout key.

        ``head_logits(model.head, *model.head_inputs(...))`` are the logits of `__call__`.
        """
        raise NotImplementedError

    @property
    def cache_slot_tile(self) -> int:
        # A cache with an axis of heads has its slots in the lanes.
        return LANES if self.decoder_stack.blocks[0].attn.cache_head_axis else 1

    def empty_cache(self, batch: int, capacity: int) -> Cache:
        """A self-attention cache of `capacity` columns, without tokens."""
        for name, size in (("batch", batch), ("capacity", capacity)):
            if checked(size, (int, np.integer), name, "an integer of 1 or more") < 1:
                raise InputError(f"{name}: expected an integer of 1 or more, found {quoted(size)}")
        stack = self.decoder_stack
        attn = stack.blocks[0].attn
        return Cache.empty(
            len(stack.blocks),
            batch,
            capacity,
            attn.kv_heads,
            attn.head_dim,
            attn.k.dtype,
            windows=stack.has_windows,
            head_axis=attn.cache_head_axis,
        )

    def decode(
        self,
        tokens: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        cache_is_empty: bool = False,
        logits_column: Int[Array, " B"] | None = None,
        branches: Branches | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **inputs: Any,
    ) -> DecodeOutput:
        """Runs new columns after the cached ones (`Decoder.decode`); `inputs` are the family's."""
        view, cache = cache.make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
        out = self.run_decoder(
            tokens,
            view,
            cache,
            cache_is_empty=cache_is_empty,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            **inputs,
        )
        logits = self.logits(out.x if logits_column is None else take_column(out.x, logits_column))
        # Keep logits vocab-sharded, then all-gather: in one step XLA may all-gather the head's
        # weights.
        logits = constrain(constrain(logits, "rows", None, "vocab"), "rows")
        return DecodeOutput(
            logits=logits,
            cache=cache.replace(layers=out.layers),
            last_hidden_state=out.x,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            cross_attentions=out.cross_attentions,
        )


def head_logits(
    head: Linear | Embedding, x: Float[Array, "... D"], key: Array | None = None
) -> Float[Array, "... V"]:
    """Float32 logits of an LM head or a tied embedding."""
    logits = head.attend(x) if isinstance(head, Embedding) else head(x, key)
    return logits.astype(jnp.float32)


def take_column(
    x: Shaped[Array, "B T *rest"], column: Int[Array, " B"]
) -> Shaped[Array, "B 1 *rest"]:
    """Takes x[b, column[b]] of each row b, as a sequence of length 1."""
    return jnp.take_along_axis(x, column.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)
