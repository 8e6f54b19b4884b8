"""Encoder-decoders: encoder, decoder with cross-attention, LM head, decoding with a KV cache.

A family builds the stacks, and may change what `embed_inputs` gives them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any, Literal, Self

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import AttentionView, SequenceMask, document_starts, make_view
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import ConfigError, InputError
from jaxllm.models import input_checks as check
from jaxllm.models.decoder import Decoder
from jaxllm.models.input_checks import IGNORED
from jaxllm.models.losses import token_loss
from jaxllm.models.model import BaseModel, C, LanguageModel, Model, base_output, model_call
from jaxllm.models.outputs import BaseOutput, Seq2SeqLMOutput
from jaxllm.nn.block import Context, Stack, StackOutput, shallow_copy
from jaxllm.nn.linear import Embedding, split_key

Side = Literal["encoder", "decoder"]


@dataclasses.dataclass(frozen=True)
class Seq2SeqInputs:
    """Unchecked arguments of an encoder-decoder's forward call, by Hugging Face's names."""

    input_ids: Any = None  # [B E]
    attention_mask: Any = None  # [B E]
    """Padding mask of the encoder: 1 at real tokens; None: all are real."""
    decoder_input_ids: Any = None  # [B T]
    """Decoder ids, starting with `decoder_start_token_id`. Default: `labels` shifted right."""
    decoder_attention_mask: Any = None  # [B T]
    inputs_embeds: Any = None  # [B E D]
    """Embeddings instead of `input_ids`."""
    decoder_inputs_embeds: Any = None  # [B T D]
    """Embeddings instead of `decoder_input_ids`."""
    encoder_outputs: Any = None  # BaseOutput or [B E D]
    """Encoder output instead of encoder inputs; `attention_mask` applies to it."""
    segment_ids: Any = None  # [B E]
    """Document numbers of packed rows, instead of the mask: 0 at pads; the same number in encoder
    and decoder."""
    decoder_segment_ids: Any = None  # [B T]
    head_mask: Any = None  # [L N]
    """Factor per layer and head of the encoder; the next two are for the decoder."""
    decoder_head_mask: Any = None  # [L N]
    cross_attn_head_mask: Any = None  # [L N]


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Encoder output, with its padding mask and segment ids."""

    output: BaseOutput
    mask: Bool[Array, "B E"]
    segments: Int[Array, "B E"] | None = None


class WithEncoder(Model[C]):
    """Base of models with an encoder: token embedding, stack of blocks, checks of inputs."""

    shared: Embedding
    """Of the encoder, and of the decoder unless `embedding` is another one."""
    encoder: Stack

    @property
    def embedding(self) -> Embedding:
        return self.shared

    def encode(
        self,
        input_ids: Int[Array, "B E"] | None,
        attention_mask: Bool[Array, "B E"] | Int[Array, "B E"] | None = None,
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        segments: Int[Array, "B E"] | None = None,
        **options: Any,
    ) -> StackOutput:
        """Runs the encoder on arrays, whose values are not checked; without a mask all columns are
        real tokens."""
        x = self.shared.from_ids_or_embeds(input_ids, inputs_embeds)
        ones = jnp.ones(x.shape[:2], bool)
        mask = ones if attention_mask is None else jnp.asarray(attention_mask).astype(bool)
        view = make_view(mask, causal=False, segments=segments)
        x = self.embed_inputs(x, view, "encoder", input_ids)
        return self.encoder(x, Context(view=view), **options)

    def embed_inputs(
        self,
        x: Float[Array, "B T D"],
        view: AttentionView,
        side: Side,
        ids: Int[Array, "B T"] | None,
    ) -> Float[Array, "B T D"]:
        """Input of a stack, from token embeddings; a family may add positions.

        `ids` are the tokens, None if the caller gave embeddings.
        """
        return x

    def inputs(self, *arrays: Any, side: str = "") -> check.SequenceInputs:
        """Checks token ids, embeddings, mask and segment ids of the encoder or the decoder."""
        c = self.config
        sizes = {"vocab_size": c.vocab_size, "width": c.width if side else c.encoder_width}
        inputs = check.sequence_inputs(*arrays, **sizes, side=side)
        check.check_capacity(inputs.mask, None, self.config.max_positions, inputs.segments)
        return inputs

    def encoded(self, inputs: check.SequenceInputs, head_mask: object, **options: Any) -> Encoded:
        """Runs the encoder on checked inputs."""
        out = self.encode(
            inputs.input_ids,
            inputs.mask,
            inputs_embeds=inputs.inputs_embeds,
            segments=inputs.segments,
            head_mask=self.head_mask("head_mask", head_mask, self.encoder),
            **options,
        )
        return Encoded(base_output(out), inputs.mask, inputs.segments)

    def head_mask(self, name: str, mask: object, stack: Stack) -> Float[Array, "L N"] | None:
        return check.head_mask(name, mask, len(stack.blocks), stack.blocks[0].attn.heads)


class EncoderModel(WithEncoder[C], BaseModel[C]):
    """Encoder of an encoder-decoder alone, for embeddings of sequences."""

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B E"] | None = None,
        attention_mask: Int[Array, "B E"] | None = None,
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        segment_ids: Int[Array, "B E"] | None = None,
        head_mask: Float[Array, "L N"] | None = None,
        dropout_key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> BaseOutput:
        """Runs the encoder: `last_hidden_state` [B, E, D].

        `attention_mask` is 1 at real tokens; pads may be anywhere. For packed rows pass
        `segment_ids` instead (0 at pads, a document's number from 1 elsewhere).
        """
        return self.encoded(
            self.inputs(input_ids, inputs_embeds, attention_mask, segment_ids),
            head_mask,
            key=dropout_key,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        ).output


class EncoderDecoderLM(WithEncoder[C], LanguageModel[C]):
    """Encoder-decoder with LM head. `lm_head` None: tied embedding."""

    is_encoder_decoder = True
    config_reads = ("pad_token_id", "decoder_start_token_id")

    decoder: Stack

    @classmethod
    def call_options(cls) -> Set[str]:
        return {field.name for field in dataclasses.fields(Seq2SeqInputs)}

    @model_call
    def __call__(
        self,
        input_ids: Int[Array, "B E"] | None = None,
        attention_mask: Int[Array, "B E"] | None = None,
        decoder_input_ids: Int[Array, "B T"] | None = None,
        *,
        labels: Int[Array, "B T"] | None = None,
        logits_to_keep: int | Int[Array, " K"] = 0,
        cache: Cache | None = None,
        dropout_key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **arrays: Any,
    ) -> Seq2SeqLMOutput:
        """One forward pass of encoder and decoder.

        Args:
            labels: token ids, -100 at ignored positions; `loss` is their mean cross-entropy.
            logits_to_keep: 0 for all columns, n for the last n, or the indices of columns.
            cache: of `init_cache`, which holds the encoder's output. The call runs the new decoder
                tokens, and the output has the updated cache.
            dropout_key: enables dropout (training).
            arrays: other inputs, the fields of `Seq2SeqInputs`.

        Raises:
            InputError: token ids outside the vocabulary, or shapes that do not match.
        """
        inputs = Seq2SeqInputs(input_ids, attention_mask, decoder_input_ids, **arrays)
        records: dict[str, Any] = {
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        if cache is not None:
            for name, value in (("labels", labels), ("dropout_key", dropout_key)):
                if value is not None:
                    raise InputError(f"{name}: cannot be combined with cache; drop one of the two")
            return self._continued(inputs, cache, logits_to_keep, records)
        *keys, head_key = split_key(dropout_key, 4)
        encoded, out = self._states(inputs, labels, keys, **records)
        shape = out.x.shape[:2]
        logits = self.logits(out.x[:, check.columns_to_keep(logits_to_keep, shape[1])], head_key)
        loss = None
        if labels is not None:
            loss = token_loss(logits, check.checked_labels(labels, shape, logits))
        return Seq2SeqLMOutput(
            logits=logits,
            loss=loss,
            encoder_last_hidden_state=encoded.output.last_hidden_state,
            encoder_hidden_states=encoded.output.hidden_states,
            encoder_attentions=encoded.output.attentions,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
        )

    def _continued(
        self, inputs: Seq2SeqInputs, cache: Cache, logits_to_keep: Any, records: dict[str, Any]
    ) -> Seq2SeqLMOutput:
        """The output for new decoder tokens, which follow the tokens in the cache."""
        read = ("decoder_input_ids", "decoder_attention_mask")
        for field in dataclasses.fields(inputs):
            if field.name not in read and getattr(inputs, field.name) is not None:
                raise InputError(
                    f"{field.name}: has no effect beside cache, which holds the encoder's output; "
                    "drop it"
                )
        ids, mask = (getattr(inputs, name) for name in read)
        new = self.inputs(ids, None, mask, None, side="decoder_")
        check.check_capacity(new.mask, cache, self.config.max_positions)
        out = self.decode(new.input_ids, new.mask, cache, **records)
        return Seq2SeqLMOutput(
            logits=out.logits[:, check.columns_to_keep(logits_to_keep, new.mask.shape[1])],
            cache=out.cache,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
        )

    def head_inputs(
        self, *, dropout_key: Array | None = None, **inputs: Any
    ) -> tuple[Float[Array, "B T D"], Array | None, None]:
        *keys, head_key = split_key(dropout_key, 4)
        _, out = self._states(Seq2SeqInputs(**inputs), None, keys)
        return self.scaled_for_head(out.x), head_key, None

    def _states(
        self, inputs: Seq2SeqInputs, labels: object, keys: Sequence[Array | None], **records: Any
    ) -> tuple[Encoded, StackOutput]:
        """Output of encoder and decoder; `keys` are those of encoder, decoder and cross-attention's
        keys and values."""
        encoder_key, decoder_key, cross_key = keys
        encoded = self._encoder_output(inputs, key=encoder_key, **records)
        decoder = self._decoder_inputs(inputs, encoded, labels)
        view = make_view(decoder.mask, segments=decoder.segments)
        x = self.decoder_embedding.from_ids_or_embeds(decoder.input_ids, decoder.inputs_embeds)
        out = self.decoder(
            self.embed_inputs(x, view, "decoder", decoder.input_ids),
            Context(
                view=view,
                cross_visible=SequenceMask(
                    encoded.mask,
                    query_segments=decoder.segments,
                    key_segments=encoded.segments,
                ),
            ),
            cross_kv=self.decoder.project_cross_kv(encoded.output.last_hidden_state, cross_key),
            head_mask=self.head_mask("decoder_head_mask", inputs.decoder_head_mask, self.decoder),
            cross_head_mask=self.head_mask(
                "cross_attn_head_mask", inputs.cross_attn_head_mask, self.decoder
            ),
            key=decoder_key,
            **records,
        )
        return encoded, out

    def _encoder_output(self, inputs: Seq2SeqInputs, **options: Any) -> Encoded:
        """Runs the encoder, or checks and uses the caller's `encoder_outputs`."""
        output = inputs.encoder_outputs
        if output is None:
            arrays = (inputs.input_ids, inputs.inputs_embeds)
            encoder = self.inputs(*arrays, inputs.attention_mask, inputs.segment_ids)
            return self.encoded(encoder, inputs.head_mask, **options)
        for name in ("input_ids", "inputs_embeds", "head_mask", "segment_ids"):
            if getattr(inputs, name) is not None:
                raise InputError(f"{name}: has no effect beside encoder_outputs; drop it")
        is_output = isinstance(output, BaseOutput)
        states = output.last_hidden_state if is_output else output
        states = check.embeddings("encoder_outputs", states, self.config.encoder_width)
        mask = check.mask_of("attention_mask", inputs.attention_mask, states.shape[:2])
        if is_output:
            return Encoded(dataclasses.replace(output, last_hidden_state=states), mask)
        return Encoded(BaseOutput(last_hidden_state=states), mask)

    def _decoder_inputs(
        self, inputs: Seq2SeqInputs, encoded: Encoded, labels: object
    ) -> check.SequenceInputs:
        """Checks the decoder's inputs, by default the labels shifted right."""
        ids, embeds = inputs.decoder_input_ids, inputs.decoder_inputs_embeds
        segments = inputs.decoder_segment_ids
        if (encoded.segments is None) != (segments is None):
            raise InputError("segment_ids, decoder_segment_ids: give both or none")
        if ids is None and embeds is None and labels is not None:
            ids = self.shift_right(check.label_ids(labels, self.config.vocab_size), segments)
        mask = inputs.decoder_attention_mask
        decoder = self.inputs(ids, embeds, mask, segments, side="decoder_")
        rows, expected = decoder.mask.shape[0], encoded.mask.shape[0]
        if rows != expected:
            raise InputError(f"decoder_input_ids: {rows} rows, but the encoder has {expected}")
        return decoder

    def shift_right(
        self, labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Decoder inputs from labels: start token first, last label dropped, -100 replaced by pad.

        In packed rows every document begins with the start token.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            name = "decoder_start_token_id" if start is None else "pad_token_id"
            raise ConfigError(f"{name}: missing in config.json; labels cannot be shifted right")
        shifted = shift_tokens_right(labels, pad, start)
        if segments is not None:
            shifted = jnp.where(document_starts(jnp.asarray(segments)), start, shifted)
        return shifted

    def init_cache(
        self,
        batch: int,
        capacity: int,
        *,
        input_ids: Int[Array, "B E"] | None = None,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        attention_mask: Bool[Array, "B E"] | None = None,
        encoder_states: Float[Array, "B E D"] | None = None,
    ) -> Cache:
        """An empty cache with the cross-attention keys and values of the encoder output.

        Runs the encoder, unless its output is passed as `encoder_states`. Without a mask all
        columns are real tokens.
        """
        if encoder_states is None:
            if input_ids is None and inputs_embeds is None:
                raise InputError("input_ids: init_cache() needs the encoder's input")
            encoder_states = self.encode(input_ids, attention_mask, inputs_embeds=inputs_embeds).x
        if attention_mask is None:
            attention_mask = jnp.ones(encoder_states.shape[:2], bool)
        cross = self.decoder.project_cross_kv(encoder_states, is_inference=True)
        cache = self.empty_cache(batch, capacity)
        return cache.replace(cross=cross, cross_mask=attention_mask)

    @property
    def decoder_stack(self) -> Stack:
        return self.decoder

    def run_decoder(
        self,
        tokens: Int[Array, "B T"] | None,
        view: AttentionView,
        cache: Cache,
        **options: Any,
    ) -> StackOutput:
        assert tokens is not None
        assert cache.cross_mask is not None
        context = Context(view=view, cross_visible=SequenceMask(cache.cross_mask))
        caches = {"layers": cache.layers, "cross_kv": cache.cross}
        x = self.embed_inputs(self.embed(tokens), view, "decoder", tokens)
        return self.decoder(x, context, **caches, **options)

    def early_exit(self, layers: int) -> Self:
        return shallow_copy(self, decoder=self.decoder.first_blocks(layers))


if TYPE_CHECKING:
    _: type[Decoder] = EncoderDecoderLM


def shift_tokens_right(
    input_ids: Int[Array, "B T"], pad_token_id: int, decoder_start_token_id: int
) -> Int[Array, "B T"]:
    """Decoder inputs from labels, as transformers' Flax function: start token first, -100 is pad.

    A model does it by itself: ``model(..., labels=labels)``.

    >>> shift_tokens_right(jnp.array([[5, 6, -100, -100]]), 0, 2).tolist()
    [[2, 5, 6, 0]]
    """
    ids = jnp.asarray(check.on_host("input_ids", input_ids))
    if ids.ndim != 2 or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(f"input_ids: expected token ids [B, T], found {ids.dtype}{[*ids.shape]}")
    start = jnp.full_like(ids[:, :1], decoder_start_token_id)
    shifted = jnp.concatenate([start, ids[:, :-1]], axis=1)
    return jnp.where(shifted == IGNORED, pad_token_id, shifted)
