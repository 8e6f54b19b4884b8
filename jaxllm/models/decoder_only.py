"""Decoder-only models: backbone alone, with LM head and KV cache, or with a classifier's head."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Set
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import AttentionView, document_lengths, make_view
from jaxllm.cache.kv_cache import KV, Cache
from jaxllm.common.arguments import checks_flags
from jaxllm.common.errors import InputError, UnsupportedError, quoted
from jaxllm.models import input_checks as check
from jaxllm.models.backbone import Backbone, lm_head
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.config import DecoderOnlyConfig
from jaxllm.models.decoder import Decoder
from jaxllm.models.losses import causal_loss, classification_loss, load_balancing_loss
from jaxllm.models.model import (
    BaseModel,
    LanguageModel,
    Model,
    base_output,
    model_call,
    take_column,
)
from jaxllm.models.outputs import (
    BaseOutput,
    CausalLMOutput,
    DecodeOutput,
    SequenceClassifierOutput,
)
from jaxllm.nn.block import Stack, StackOutput, shallow_copy
from jaxllm.nn.linear import Embedding, Linear, split_key

M = TypeVar("M")


class DecoderOnly(Model[DecoderOnlyConfig]):
    """Base of decoder-only models: input checks and the forward pass of the backbone."""

    backbone_class: ClassVar[Callable[..., Backbone[Any]]]
    """Backbone class of the family."""

    backbone: Backbone[Any]

    def __init__(
        self, config: DecoderOnlyConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None
    ):
        super().__init__(config)
        self.backbone = type(self).backbone_class(config, options, rngs=rngs)

    @property
    def embedding(self) -> Embedding:
        return self.backbone.embed

    @classmethod
    def call_options(cls) -> Set[str]:
        return inspect.signature(DecoderOnly.hidden).parameters.keys()

    @checks_flags
    def hidden(
        self,
        input_ids: object = None,
        attention_mask: object = None,
        position_ids: object = None,
        inputs_embeds: object = None,
        token_type_ids: object = None,
        encoder_hidden_states: object = None,
        encoder_attention_mask: object = None,
        segment_ids: object = None,
        cache: Cache | None = None,
        head_mask: object = None,
        rope_length: object = "batch",
        dropout_key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseOutput:
        """Checks the inputs and runs the backbone; for the arguments see `CausalLM.__call__`."""
        inputs = check.sequence_inputs(
            input_ids,
            inputs_embeds,
            attention_mask,
            segment_ids,
            vocab_size=self.config.vocab_size,
            width=self.backbone.embed.features,
        )
        if segment_ids is not None:
            for name, value in (("cache", cache), ("encoder_hidden_states", encoder_hidden_states)):
                if value is not None:
                    raise InputError(f"{name}: packed rows (segment_ids) cannot have one")
        masked = any(x is not None for x in (attention_mask, segment_ids, cache))
        view, cache = self._view(inputs, cache, position_ids)
        if position_ids is not None and not masked:
            check.check_one_document(position_ids)
        if token_type_ids is not None:
            token_type_ids = self._token_types(token_type_ids, inputs.mask.shape)
        blocks = self.backbone.stack.blocks
        head_mask = check.head_mask("head_mask", head_mask, len(blocks), blocks[0].attn.heads)
        dropout_key, cross_key = split_key(dropout_key, 2)
        cross_kv, cross_mask = self._cross_inputs(
            encoder_hidden_states, encoder_attention_mask, cache, inputs.mask.shape[0], cross_key
        )
        backbone = with_rope_length(self, rope_length).backbone
        out = backbone.run(
            inputs.input_ids,
            view,
            inputs_embeds=inputs.inputs_embeds,
            token_type_ids=token_type_ids,
            cache=cache,
            cross_kv=cross_kv,
            cross_mask=cross_mask,
            head_mask=head_mask,
            cross_head_mask=head_mask,
            key=dropout_key,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        asked = bool(out.router_logits) and self.config.aux_loss is not None
        return base_output(out, cache, output_router_logits=asked)

    def _view(
        self, inputs: check.SequenceInputs, cache: Cache | None, position_ids: object
    ) -> tuple[AttentionView, Cache | None]:
        """Attention view of a call, and the cache with the new columns reserved."""
        if position_ids is not None and not self.backbone.takes_position_ids:
            raise InputError(
                "position_ids: this model has none, since its distances follow from the attention "
                "mask; leave them out"
            )
        mask, segments, limit = inputs.mask, inputs.segments, self.backbone.max_positions
        check.check_capacity(mask, cache, None if position_ids is not None else limit, segments)
        if cache is None:
            view = make_view(mask, causal=self.backbone.is_causal, segments=segments)
        else:
            view, cache = cache.make_view(mask)
        if position_ids is not None:
            positions = check.position_ids(position_ids, mask.shape, limit)
            lengths = document_lengths(positions, mask, segments)
            view = dataclasses.replace(view, positions=positions, rope_length=lengths)
        return view, cache

    def _cross_inputs(
        self, states: object, mask: object, cache: Cache | None, rows: int, key: Array | None
    ) -> tuple[tuple[KV, ...] | None, Any]:
        """Keys and values of the call's encoder output with its mask, or those of the cache."""
        if states is not None:
            cross_kv, cross_mask = self.cross_kv(states, mask, key)
            if cross_mask.shape[0] != rows:
                raise InputError(
                    f"encoder_hidden_states: {cross_mask.shape[0]} rows, but the call has {rows}"
                )
            return cross_kv, cross_mask
        if mask is not None:
            raise InputError("encoder_attention_mask: given without encoder_hidden_states")
        return (None, None) if cache is None else (cache.cross, cache.cross_mask)

    def _token_types(self, ids: object, shape: tuple[int, ...]) -> Int[Array, "B T"]:
        ids = check.token_id_array("token_type_ids", ids, self.config.vocab_size)
        if ids.shape != shape:
            raise InputError(f"token_type_ids: expected {shape}, found {ids.shape}")
        return ids

    def cross_kv(
        self,
        encoder_hidden_states: object,
        encoder_attention_mask: object,
        key: Array | None = None,
    ) -> tuple[tuple[KV, ...], Any]:
        """Cross-attention keys and values, and the encoder's padding mask (GPT-2 with
        `add_cross_attention`)."""
        if self.backbone.stack.blocks[0].cross is None:
            raise InputError(
                "encoder_hidden_states: this model has no cross-attention (add_cross_attention)"
            )
        width = self.backbone.embed.features
        states = check.embeddings("encoder_hidden_states", encoder_hidden_states, width)
        mask = check.mask_of("encoder_attention_mask", encoder_attention_mask, states.shape[:2])
        return self.backbone.stack.project_cross_kv(states, key), mask


class DecoderOnlyModel(DecoderOnly, BaseModel[DecoderOnlyConfig]):
    """Decoder-only model without a head: hidden states, for embeddings of sequences."""

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B T"] | None = None,
        attention_mask: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> BaseOutput:
        """One forward pass: `last_hidden_state` [B, T, D], after the final norm.

        `options` are those of `CausalLM`, except `labels` and `logits_to_keep`.
        """
        return self.hidden(input_ids, attention_mask, **options)


class CausalLM(DecoderOnly, LanguageModel[DecoderOnlyConfig]):
    """Decoder-only language model: backbone and LM head. `lm_head` None: tied embedding."""

    head_bias: ClassVar[bool] = False
    """True if the LM head has a bias."""

    def __init__(
        self, config: DecoderOnlyConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None
    ):
        super().__init__(config, options, rngs=rngs)
        std = config.initializer_range
        self.lm_head = lm_head(config, options, rngs, std=std, bias=self.head_bias)

    @model_call
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
                left-padded, right-padded and unpadded rows give the same logits.
            labels: token ids, -100 at ignored positions; `loss` is their mean cross-entropy, each
                predicted by the logits of the previous position (no padding predicts a token).
            logits_to_keep: 0 for all columns, n for the last n, or the indices of columns.
            options: `segment_ids` [B, T] instead of the mask, for packed rows (0 at pads, a
                document's number from 1 elsewhere), `position_ids` [B, T], `inputs_embeds`,
                `token_type_ids` [B, T] (GPT-2, GPT-Neo, GPT-J), `encoder_hidden_states` [B, E, D]
                and `encoder_attention_mask` [B, E] (GPT-2 with cross-attention), `cache` (a KV
                cache to continue; the output has the updated one), `head_mask` [L, N],
                `rope_length` ("batch" or "row": the sequence length that dynamic and longrope RoPE
                use, of the longest row as in transformers, or of each row alone), `dropout_key`
                (training), `output_hidden_states`, `output_attentions`.

        Raises:
            InputError: token ids outside the vocabulary, or shapes that do not match.
        """
        key, head_key = split_key(options.pop("dropout_key", None), 2)
        out = self.hidden(input_ids, attention_mask, dropout_key=key, **options)
        x = out.last_hidden_state
        logits = self.logits(x[:, check.columns_to_keep(logits_to_keep, x.shape[1])], head_key)
        loss, segments = None, options.get("segment_ids")
        aux_loss = self._router_loss(out, segments, attention_mask)
        if labels is not None:
            labels = check.checked_labels(labels, x.shape[:2], logits)
            loss = causal_loss(logits, labels, segments, attention_mask)
            if aux_loss is not None:
                assert self.config.aux_loss is not None
                loss = loss + self.config.aux_loss.weight * aux_loss
        return CausalLMOutput(
            logits=logits,
            loss=loss,
            aux_loss=aux_loss,
            hidden_states=out.hidden_states,
            attentions=out.attentions,
            cross_attentions=out.cross_attentions,
            cache=out.cache,
            router_logits=out.router_logits,
        )

    def head_inputs(
        self, *, dropout_key: Array | None = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], Array | None, Float[Array, ""] | None]:
        key, head_key = split_key(dropout_key, 2)
        out = self.hidden(dropout_key=key, **inputs)
        masks = (inputs.get("segment_ids"), inputs.get("attention_mask"))
        loss = self._router_loss(out, *masks)
        return self.scaled_for_head(out.last_hidden_state), head_key, loss

    def _router_loss(
        self, out: BaseOutput, segments: object, attention_mask: object
    ) -> Float[Array, ""] | None:
        """`load_balancing_loss` of the call's tokens; None if no layer has experts, or the config
        asks for none."""
        if out.router_logits is None:
            return None
        assert self.config.aux_loss is not None
        given = attention_mask if segments is None else segments
        mask = jnp.ones(len(out.router_logits[0])) if given is None else jnp.asarray(given)
        top_k = self.config.aux_loss.top_k
        return load_balancing_loss(out.router_logits, top_k, mask.reshape(-1) != 0)

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        encoder_hidden_states: Float[Array, "B E D"] | None = None,
        encoder_attention_mask: Bool[Array, "B E"] | None = None,
    ) -> Cache:
        if not self.config.is_causal:
            raise UnsupportedError(
                "use_bidirectional_attention: a model whose tokens attend to both sides cannot "
                "generate; it gives embeddings and classes of whole texts"
            )
        cache = self.empty_cache(batch, capacity)
        if encoder_hidden_states is None:
            return cache
        cross, mask = self.cross_kv(encoder_hidden_states, encoder_attention_mask)
        return cache.replace(cross=cross, cross_mask=mask)

    @property
    def decoder_stack(self) -> Stack:
        return self.backbone.stack

    def run_decoder(
        self,
        tokens: Int[Array, "B T"] | None,
        view: AttentionView,
        cache: Cache,
        **options: Any,
    ) -> StackOutput:
        cross = {"cross_kv": cache.cross, "cross_mask": cache.cross_mask}
        return self.backbone.run(tokens, view, cache=cache, **cross, **options)

    def decode(
        self,
        tokens: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        logits_column: Int[Array, " B"] | None = None,
        token_type_ids: Int[Array, "B T"] | None = None,
        **options: Any,
    ) -> DecodeOutput:
        """`Decoder.decode`, with token types (GPT-2) and `inputs_embeds` [B, T, D]."""
        if token_type_ids is None and cache.token_type is not None:
            token_type_ids = jnp.broadcast_to(cache.token_type[:, None], mask.shape)
        elif token_type_ids is not None:
            # New tokens get the type of the prompt's last column, as in transformers.
            last = token_type_ids[:, -1:]
            if logits_column is not None:
                last = take_column(token_type_ids, logits_column)
            cache = cache.replace(token_type=last[:, 0])
        options.update(logits_column=logits_column, token_type_ids=token_type_ids)
        return super().decode(tokens, mask, cache, **options)

    def early_exit(self, layers: int) -> Self:
        first = shallow_copy(self.backbone, stack=self.backbone.stack.first_blocks(layers))
        return shallow_copy(self, backbone=first)


class SequenceClassifier(DecoderOnly):
    """Backbone and a linear head on each row's last real token, with left or right padding."""

    config_reads = ("pad_token_id", "num_labels", "problem_type")

    score: Linear

    def __init__(
        self, config: DecoderOnlyConfig, options: Options = FLOAT32, *, rngs: nnx.Rngs | None
    ):
        super().__init__(config, options, rngs=rngs)
        sizes, std = (config.width, config.num_labels), config.initializer_range
        self.score = Linear(*sizes, std=std, rngs=rngs, **options.dtypes)

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B T"] | None = None,
        attention_mask: Int[Array, "B T"] | None = None,
        *,
        labels: Array | None = None,
        **options: Any,
    ) -> SequenceClassifierOutput:
        """Class `logits` [B, C]; with `labels` also the loss of the config's `problem_type`.

        The last real token is the last one in the mask; without a mask the last that is not
        `pad_token_id`, as in transformers. `options` are those of `CausalLM`, except
        `logits_to_keep`, `cache` and `segment_ids`.
        """
        if options.get("cache") is not None:
            raise InputError("cache: a classifier reads its sequence in one call")
        if options.get("segment_ids") is not None:
            raise InputError("segment_ids: a classifier reads one sequence a row")
        key, head_key = split_key(options.pop("dropout_key", None), 2)
        out = self.hidden(input_ids, attention_mask, dropout_key=key, **options)
        x = out.last_hidden_state
        columns = jnp.arange(x.shape[1])
        if attention_mask is not None:
            real = jnp.asarray(attention_mask).astype(bool)
        elif input_ids is not None and self.config.pad_token_id is not None:
            real = jnp.asarray(input_ids) != self.config.pad_token_id
        elif input_ids is not None and x.shape[0] != 1:
            raise InputError(
                "attention_mask: needed for a batch, since the config has no pad_token_id"
            )
        else:
            real = jnp.ones(x.shape[:2], bool)
        last = jnp.max(jnp.where(real, columns, 0), axis=-1)
        logits = self.score(take_column(x, last), head_key)[:, 0].astype(jnp.float32)
        loss = None
        if labels is not None:
            loss = classification_loss(logits, labels, self.config.problem_type)
        return SequenceClassifierOutput(
            logits=logits, loss=loss, hidden_states=out.hidden_states, attentions=out.attentions
        )


def with_rope_per_row(model: M) -> M:
    """A copy of a model whose result for a row does not depend on the other rows of a call.

    Dynamic and longrope RoPE use the sequence length. In transformers this is the length of the
    longest row of a batch. The copy uses the length of each row, and in packed rows the length of
    each document. Other models depend on no length and are returned as they are.
    """
    backbone = getattr(model, "backbone", None)
    if not isinstance(backbone, Backbone):
        return model
    per_row = backbone.stack.with_rope_per_row()
    if per_row is backbone.stack:
        return model
    return shallow_copy(model, backbone=shallow_copy(backbone, stack=per_row))


def with_rope_length(model: M, rope_length: object) -> M:
    """The model itself for `rope_length="batch"`, and `with_rope_per_row` for "row"."""
    if not isinstance(rope_length, str) or rope_length not in ("batch", "row"):
        raise InputError(f"rope_length: expected 'batch' or 'row', found {quoted(rope_length)}")
    return model if rope_length == "batch" else with_rope_per_row(model)


if TYPE_CHECKING:
    _: type[Decoder] = CausalLM
