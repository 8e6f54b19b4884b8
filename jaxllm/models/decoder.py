"""The interface between models and decoding strategies.

`init_cache` allocates the KV cache; an encoder-decoder also runs its encoder there, once, and
computes the cross-attention keys and values. `decode` runs new columns after the cached ones.
Most strategies use nothing else of a model; DoLa, guidance and early exit use the other members.
Models do not depend on strategies.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, Self

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.arguments import NO_HEAD
from jaxllm.common.errors import UnsupportedError
from jaxllm.models.config import ModelConfig
from jaxllm.models.outputs import DecodeOutput


class Decoder(Protocol):
    """Model interface of decoding strategies: a pytree that decodes step by step.

    All arguments are arrays; token ids and lengths are already checked. From `config`, generation
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
        """True if the LM head shares the embedding matrix."""
        ...

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings, without positions and token types."""
        ...

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """Float32 logits of hidden states (LM head)."""
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
        """Runs T new columns after the cached ones.

        Decoder-only models also take `inputs_embeds` [B, T, D] (`tokens` is then None) and
        `token_type_ids` [B, T].

        Args:
            tokens: ids of the new columns.
            mask: True at real tokens.
            cache: the KV cache; the new columns are written to its next free slots.
            cache_is_empty: prefill; the new columns attend to each other only.
            logits_column: the one column per row to compute logits for; None: all columns.
            branches: the new columns are alternatives for one position, not a sequence.
        """
        ...

    def early_exit(self, layers: int) -> Decoder:
        """A model with only the first decoder layers; it shares the parameters."""
        ...


class GenerativeModel(Decoder, Protocol):
    """Interface of a decoder with the card of its checkpoint (see `Model`)."""

    generation_config: Any

    @property
    def card(self) -> Any: ...

    @property
    def forward_config(self) -> ModelConfig: ...

    def checked_card(self, purpose: str) -> Any: ...

    @property
    def cache_slot_tile(self) -> int:
        """The device pads the slots of a KV cache to a multiple of this number."""
        ...

    @property
    def cache_slot_multiple(self) -> int:
        """Attention takes a KV cache whose slots are a multiple of this number."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FlatModel:
    """The leaves of a model as an argument of compiled programs.

    JAX flattens a model of 32 layers in several milliseconds, so a call flattens its model once for
    all of its programs. Each call gathers the leaves anew: the next call sees what was assigned to
    the model.
    """

    leaves: list[Any]
    structure: Any = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, model: Decoder) -> Self:
        return cls(*jax.tree.flatten(model))

    def model(self) -> Any:
        """The model of these leaves, a `Decoder`."""
        return jax.tree.unflatten(self.structure, self.leaves)


def checked_generative(model: Any, name: str) -> GenerativeModel:
    """Returns the model, which must have a language-model head.

    Args:
        name: of the function that needs it, or of the model, for the message.
    """
    if not (hasattr(model, "decode") and hasattr(model, "init_cache")):  # bytes have decode too
        advice = f"; {NO_HEAD}" if hasattr(model, "checked_card") else ""
        raise UnsupportedError(f"{name}: {type(model).__name__} has no language-model head{advice}")
    return model
