"""What decoder-only models share: backbone, forward pass of the heads, decoding on a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import AttentionView, Branches, make_view
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import InputError
from jaxllm.models import input_checks as check
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, decode_output
from jaxllm.models.losses import causal_loss
from jaxllm.models.model import Model
from jaxllm.models.outputs import BaseOutput, CausalLMOutput, DecodeOutput
from jaxllm.nn.blocks import Context, Stack, StackOutput, shallow_copy
from jaxllm.nn.dropout import split
from jaxllm.nn.linear import Embedding, Linear


class Backbone(nnx.Module):
    """Embeddings and blocks of a decoder-only model. A family fills in the two methods below."""

    config: ModelConfig
    embed: Embedding
    stack: Stack

    def embed_tokens(
        self,
        input_ids: Int[Array, "B T"] | None,
        inputs_embeds: Float[Array, "B T D"] | None,
        view: AttentionView,
        token_type_ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        raise NotImplementedError

    def rotary(self, view: AttentionView) -> tuple[Array, Array] | None:
        """Angles of this call's positions, for a family that rotates."""
        return None

    def run(
        self,
        input_ids: Int[Array, "B T"] | None,
        view: AttentionView,
        *,
        inputs_embeds: Float[Array, "B T D"] | None = None,
        token_type_ids: Int[Array, "B T"] | None = None,
        cache: Cache | None = None,
        memory=None,
        memory_mask: Bool[Array, "B E"] | None = None,
        **options: Any,
    ) -> StackOutput:
        x = self.embed_tokens(input_ids, inputs_embeds, view, token_type_ids)
        context = Context(
            view=view,
            rotary=self.rotary(view),
            memory_visible=None if memory_mask is None else memory_mask[:, None, None, :],
        )
        return self.stack(
            x, context, layers=None if cache is None else cache.layers, memory=memory, **options
        )


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The checked arrays of one forward call."""

    input_ids: Int[Array, "B T"] | None
    inputs_embeds: Float[Array, "B T D"] | None
    mask: Bool[Array, "B T"]
    segments: Int[Array, "B T"] | None = None


class DecoderOnly(Model[ModelConfig]):
    """What the heads of Llama and GPT-2 share: input checks, the forward pass, the cache."""

    backbone: Backbone

    def prepare(self, input_ids, inputs_embeds, attention_mask, segment_ids=None) -> Prepared:
        """Checks ids or embeddings, and the mask, which packed rows have in their segments."""
        check.one_of(input_ids, inputs_embeds)
        if input_ids is not None:
            input_ids = check.token_ids("input_ids", input_ids, self.config.vocab_size)
            shape = input_ids.shape
        else:
            width = self.backbone.embed.weight.shape[1]
            inputs_embeds = check.embeddings("inputs_embeds", inputs_embeds, width)
            shape = inputs_embeds.shape[:2]
        segments = check.segment_ids(
            "segment_ids", segment_ids, shape, attention_mask, "attention_mask"
        )
        if segments is not None:
            return Prepared(input_ids, inputs_embeds, segments != 0, segments)
        mask = check.mask_of("attention_mask", attention_mask, shape)
        return Prepared(input_ids, inputs_embeds, mask)

    def hidden(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        inputs_embeds=None,
        token_type_ids=None,
        encoder_hidden_states=None,
        encoder_attention_mask=None,
        segment_ids=None,
        cache: Cache | None = None,
        head_mask=None,
        dropout_key=None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseOutput:
        """The backbone with every option of a forward call; see `__call__` of the heads."""
        given = self.prepare(input_ids, inputs_embeds, attention_mask, segment_ids)
        if segment_ids is not None:
            for name, value in (("cache", cache), ("encoder_hidden_states", encoder_hidden_states)):
                if value is not None:
                    raise InputError(f"{name}: packed rows (segment_ids) cannot have one")
        shape, limit = given.mask.shape, self.config.max_positions
        check.check_room(
            given.mask, cache, None if position_ids is not None else limit, given.segments
        )
        if cache is None:
            view = make_view(given.mask, segments=given.segments)
        else:
            view, cache = cache.make_view(given.mask)
        if position_ids is not None:
            positions = check.position_ids(position_ids, shape, limit)
            view = dataclasses.replace(view, positions=positions, horizon=jnp.max(positions) + 1)
        if token_type_ids is not None:
            token_type_ids = check.token_ids(
                "token_type_ids", token_type_ids, self.config.vocab_size
            )
            if token_type_ids.shape != shape:
                raise InputError(f"token_type_ids: expected {shape}, found {token_type_ids.shape}")
        blocks = self.backbone.stack.blocks
        head_mask = check.head_mask("head_mask", head_mask, len(blocks), blocks[0].attn.heads)
        memory = memory_mask = None
        dropout_key, memory_key = split(dropout_key, 2)
        if encoder_hidden_states is not None:
            memory, memory_mask = self.memory(
                encoder_hidden_states, encoder_attention_mask, memory_key
            )
            if memory_mask.shape[0] != shape[0]:
                raise InputError(
                    f"encoder_hidden_states: {memory_mask.shape[0]} rows, but the call has "
                    f"{shape[0]}"
                )
        elif encoder_attention_mask is not None:
            raise InputError("encoder_attention_mask: given without encoder_hidden_states")
        elif cache is not None and cache.cross is not None:
            memory, memory_mask = cache.cross, cache.cross_mask
        out = self.backbone.run(
            given.input_ids,
            view,
            inputs_embeds=given.inputs_embeds,
            token_type_ids=token_type_ids,
            cache=cache,
            memory=memory,
            memory_mask=memory_mask,
            head_mask=head_mask,
            cross_head_mask=head_mask,
            key=dropout_key,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return BaseOutput(
            last_hidden_state=out.x,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            cache=None if cache is None else cache.replace(layers=out.layers),
        )

    def memory(self, encoder_hidden_states, encoder_attention_mask, key=None):
        """Cross-attention keys and values; only GPT-2 with `add_cross_attention` has any."""
        if self.backbone.stack.blocks[0].cross is None:
            raise InputError(
                "encoder_hidden_states: this model has no cross-attention (add_cross_attention)"
            )
        width = self.backbone.embed.weight.shape[1]
        states = check.embeddings("encoder_hidden_states", encoder_hidden_states, width)
        mask = check.mask_of("encoder_attention_mask", encoder_attention_mask, states.shape[:2])
        return self.backbone.stack.project_memory(states, key), mask


class CausalLM(DecoderOnly):
    """A language model: the backbone and a head, tied to the embedding when `lm_head` is None."""

    body: ClassVar[Callable[..., Backbone]]
    """The family's backbone."""
    lm_head: Linear | None

    def __init__(self, config: Any, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.backbone = type(self).body(config, options, rngs=rngs)
        sizes, std = (config.width, config.vocab_size), config.initializer_range
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(*sizes, std=std, rngs=rngs, **options.dtypes)
        )

    def logits(self, x: Float[Array, "... D"], key: Array | None = None) -> Float[Array, "... V"]:
        """Float32 logits."""
        if self.lm_head is None:
            return self.backbone.embed.attend(x).astype(jnp.float32)
        return self.lm_head(x, key).astype(jnp.float32)

    def __call__(
        self,
        input_ids: Int[Array, "B T"] | None = None,
        attention_mask: Int[Array, "B T"] | None = None,
        *,
        labels: Int[Array, "B T"] | None = None,
        logits_to_keep: int | Int[Array, " K"] = 0,
        **options: Any,
    ) -> CausalLMOutput:
        """One forward pass.

        Args:
            input_ids: token ids; or give `inputs_embeds` [B, T, D].
            attention_mask: 1 at real tokens; None means all. Positions count real tokens only, so
                left-padded, right-padded and lone rows give the same logits.
            labels: ids to predict, -100 where nothing is; `loss` is then their mean cross-entropy,
                each against the logits one position before.
            logits_to_keep: 0 for all positions, n for the last n, or the indices of columns.
            options: `segment_ids` [B, T] in place of the mask for rows that hold several documents
                (0 at pads, 1 and up elsewhere), `position_ids` [B, T], `inputs_embeds`,
                `token_type_ids` [B, T] (GPT-2), `encoder_hidden_states` [B, E, D] and
                `encoder_attention_mask` [B, E] (GPT-2 with cross-attention), `cache`
                (continue from it; it comes back in the output),
                `head_mask` [L, N], `dropout_key` (training), `output_hidden_states`,
                `output_attentions`.

        Raises:
            InputError: ids outside the vocabulary, shapes that do not fit.
        """
        key, head_key = split(options.pop("dropout_key", None), 2)
        out = self.hidden(input_ids, attention_mask, dropout_key=key, **options)
        x = out.last_hidden_state
        logits = self.logits(x[:, check.columns_to_keep(logits_to_keep, x.shape[1])], head_key)
        loss = None
        if labels is not None:
            labels = check.checked_labels(labels, x.shape[:2], logits)
            loss = causal_loss(logits, labels, options.get("segment_ids"))
        return CausalLMOutput(
            logits=logits,
            loss=loss,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            cache=out.cache,
        )

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        encoder_hidden_states: Float[Array, "B E D"] | None = None,
        encoder_attention_mask: Bool[Array, "B E"] | None = None,
    ) -> Cache:
        attn = self.backbone.stack.blocks[0].attn
        cache = Cache.empty(
            len(self.backbone.stack.blocks),
            batch,
            capacity,
            attn.kv_heads,
            attn.head_dim,
            attn.k.dtype,
            windows=self.backbone.stack.has_windows,
        )
        if encoder_hidden_states is None:
            return cache
        cross, mask = self.memory(encoder_hidden_states, encoder_attention_mask)
        return cache.replace(cross=cross, cross_mask=mask)

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
        inputs_embeds: Float[Array, "B T D"] | None = None,
        token_type_ids: Int[Array, "B T"] | None = None,
    ) -> DecodeOutput:
        view, cache = cache.make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
        if token_type_ids is None and cache.token_type is not None:
            token_type_ids = jnp.broadcast_to(cache.token_type[:, None], mask.shape)
        elif token_type_ids is not None:
            # New tokens take the type of the prompt's last column, as in transformers.
            cache = cache.replace(token_type=column_of(token_type_ids, logits_column))
        out = self.backbone.run(
            tokens,
            view,
            inputs_embeds=inputs_embeds,
            token_type_ids=token_type_ids,
            cache=cache,
            memory=cache.cross,
            memory_mask=cache.cross_mask,
            cache_is_empty=cache_is_empty,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return decode_output(out, self.logits, cache, logits_column)

    @property
    def depth(self) -> int:
        return len(self.backbone.stack.blocks)

    @property
    def tied_embedding(self) -> bool:
        return self.lm_head is None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.backbone.embed(tokens)

    def early_exit(self, layers: int) -> Self:
        first = shallow_copy(self.backbone, stack=self.backbone.stack.first(layers))
        return shallow_copy(self, backbone=first)


def column_of(x: Int[Array, "B T"], column: Int[Array, " B"] | None) -> Int[Array, " B"]:
    """x[b, column[b]] of each row b; None: the last column."""
    if column is None:
        return x[:, -1]
    return jnp.take_along_axis(x, column[:, None], axis=1)[:, 0]


if TYPE_CHECKING:
    _: type[Decoder] = CausalLM
