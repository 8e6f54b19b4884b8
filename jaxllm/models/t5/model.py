"""T5 (Raffel et al. 2019, arXiv:1910.10683) with its layouts v1.0, v1.1 / flan, mT5 and umT5."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Self

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import Branches, document_starts, make_view
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import ConfigError, InputError
from jaxllm.models import input_checks as check
from jaxllm.models.build_options import FLOAT32, Options
from jaxllm.models.decoder import EncoderDecoder, decode_output
from jaxllm.models.input_checks import IGNORED
from jaxllm.models.losses import token_loss
from jaxllm.models.model import Model
from jaxllm.models.outputs import BaseOutput, DecodeOutput, Seq2SeqLMOutput
from jaxllm.models.t5.config import T5Config
from jaxllm.models.t5.stack import make_stack
from jaxllm.nn.blocks import Context, Stack, StackOutput, shallow_copy
from jaxllm.nn.dropout import split
from jaxllm.nn.linear import Embedding, Linear


class T5Encoder(Model[T5Config]):
    """What every T5 has: the shared embedding and the encoder."""

    shared: Embedding
    encoder: Stack

    def __init__(self, config: T5Config, options: Options, *, rngs: nnx.Rngs | None):
        super().__init__(config)
        self.shared = Embedding(
            config.vocab_size,
            config.d_model,
            std=config.initializer_factor,
            rngs=rngs,
            **options.dtypes,
        )
        self.encoder = make_stack(config, options, decoder=False, rngs=rngs)

    def encode(
        self,
        input_ids: Int[Array, "B E"] | None,
        mask: Bool[Array, "B E"],
        *,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        segments: Int[Array, "B E"] | None = None,
        **options: Any,
    ) -> StackOutput:
        """Runs the encoder over checked arrays."""
        x = self.shared.of(input_ids, inputs_embeds)
        view = make_view(mask, causal=False, segments=segments)
        return self.encoder(x, Context(view=view), **options)

    def prepare(self, input_ids, inputs_embeds, attention_mask, segment_ids=None):
        """Checks the encoder's inputs: ids, embeddings, mask, documents."""
        check.one_of(input_ids, inputs_embeds)
        if input_ids is not None:
            input_ids = check.token_ids("input_ids", input_ids, self.config.vocab_size)
            shape = input_ids.shape
        else:
            inputs_embeds = check.embeddings("inputs_embeds", inputs_embeds, self.config.d_model)
            shape = inputs_embeds.shape[:2]
        segments = check.segment_ids(
            "segment_ids", segment_ids, shape, attention_mask, "attention_mask"
        )
        if segments is None:
            mask = check.mask_of("attention_mask", attention_mask, shape)
        else:
            mask = segments != 0
        return input_ids, inputs_embeds, mask, segments

    def head_mask(self, name: str, mask, stack: Stack) -> Float[Array, "L N"] | None:
        return check.head_mask(name, mask, len(stack.blocks), self.config.num_heads)


class T5EncoderModel(T5Encoder):
    """The encoder alone, for embeddings of texts."""

    def __init__(self, config: T5Config, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)

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
        """`last_hidden_state` [B, E, D]; the mask is 1 at real tokens, wherever the pads are.

        `segment_ids` in its place: rows of several documents (0 at pads, 1 and up elsewhere).
        """
        ids, embeds, mask, segments = self.prepare(
            input_ids, inputs_embeds, attention_mask, segment_ids
        )
        out = self.encode(
            ids,
            mask,
            inputs_embeds=embeds,
            segments=segments,
            head_mask=self.head_mask("head_mask", head_mask, self.encoder),
            key=dropout_key,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return BaseOutput(
            last_hidden_state=out.x, hidden_states=out.hidden_states, attentions=out.attentions
        )


class T5ForConditionalGeneration(T5Encoder):
    """Encoder, decoder with cross-attention, and a head: tied (`lm_head` None) or its own."""

    is_encoder_decoder = True
    lm_head: Linear | None

    def __init__(self, config: T5Config, options: Options = FLOAT32, *, rngs: nnx.Rngs | None):
        super().__init__(config, options, rngs=rngs)
        self.decoder = make_stack(config, options, decoder=True, rngs=rngs)
        head = (config.d_model, config.vocab_size)
        self.lm_head = (
            None
            if config.tie_word_embeddings
            else Linear(*head, std=config.initializer_factor, rngs=rngs, **options.dtypes)
        )

    def logits(self, x: Float[Array, "... D"], key: Array | None = None) -> Float[Array, "... V"]:
        """Float32 logits. Scaling and tying are two things; see T5Config."""
        if self.config.scaled:
            x = x * self.config.d_model**-0.5
        if self.lm_head is None:
            return self.shared.attend(x).astype(jnp.float32)
        return self.lm_head(x, key).astype(jnp.float32)

    def __call__(
        self,
        input_ids: Int[Array, "B E"] | None = None,
        attention_mask: Int[Array, "B E"] | None = None,
        decoder_input_ids: Int[Array, "B T"] | None = None,
        *,
        decoder_attention_mask: Int[Array, "B T"] | None = None,
        inputs_embeds: Float[Array, "B E D"] | None = None,
        decoder_inputs_embeds: Float[Array, "B T D"] | None = None,
        encoder_outputs: BaseOutput | Float[Array, "B E D"] | None = None,
        segment_ids: Int[Array, "B E"] | None = None,
        decoder_segment_ids: Int[Array, "B T"] | None = None,
        labels: Int[Array, "B T"] | None = None,
        logits_to_keep: int | Int[Array, " K"] = 0,
        head_mask: Float[Array, "L N"] | None = None,
        decoder_head_mask: Float[Array, "L N"] | None = None,
        cross_attn_head_mask: Float[Array, "L N"] | None = None,
        dropout_key: Array | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
    ) -> Seq2SeqLMOutput:
        """One forward pass of encoder and decoder.

        Args:
            input_ids, attention_mask: the encoder's, or `inputs_embeds`, or `encoder_outputs` that
                an encoder gave (the mask goes with them).
            decoder_input_ids: starts with `decoder_start_token_id`; with `labels` alone they are
                the labels shifted right, -100 becoming pad.
            segment_ids, decoder_segment_ids: in place of the two masks, for rows that hold several
                documents: 0 at pads, elsewhere the document's number, the same on both sides.
            labels: ids, -100 where nothing is predicted; `loss` is their mean cross-entropy.
            head_mask, decoder_head_mask, cross_attn_head_mask: a factor per layer and head.
            dropout_key: training.

        Raises:
            InputError: ids outside the vocabulary, shapes that do not fit.
        """
        wanted: dict[str, Any] = {
            "output_hidden_states": output_hidden_states,
            "output_attentions": output_attentions,
        }
        encoder_key, decoder_key, memory_key, head_key = split(dropout_key, 4)
        if encoder_outputs is None:
            ids, embeds, mask, segments = self.prepare(
                input_ids, inputs_embeds, attention_mask, segment_ids
            )
            out = self.encode(
                ids,
                mask,
                inputs_embeds=embeds,
                segments=segments,
                head_mask=self.head_mask("head_mask", head_mask, self.encoder),
                key=encoder_key,
                **wanted,
            )
            encoded = BaseOutput(
                last_hidden_state=out.x, hidden_states=out.hidden_states, attentions=out.attentions
            )
        else:
            for name, value in (
                ("input_ids", input_ids),
                ("inputs_embeds", inputs_embeds),
                ("head_mask", head_mask),
                ("segment_ids", segment_ids),
            ):
                if value is not None:
                    raise InputError(f"{name}: has no effect beside encoder_outputs; drop it")
            encoded, mask = self.given_encoding(encoder_outputs, attention_mask)
            segments = None
        if (segments is None) != (decoder_segment_ids is None):
            raise InputError("segment_ids, decoder_segment_ids: give both or none")
        if decoder_input_ids is None and decoder_inputs_embeds is None and labels is not None:
            decoder_input_ids = self.shift_right(
                check.label_ids(labels, self.config.vocab_size), decoder_segment_ids
            )
        x, decoder_mask, decoder_segments = self.prepare_decoder(
            decoder_input_ids, decoder_inputs_embeds, decoder_attention_mask, decoder_segment_ids
        )
        if x.shape[0] != mask.shape[0]:
            raise InputError(
                f"decoder_input_ids: {x.shape[0]} rows, but the encoder has {mask.shape[0]}"
            )
        out = self.decoder(
            x,
            Context(
                view=make_view(decoder_mask, segments=decoder_segments),
                memory_visible=memory_visible(mask, segments, decoder_segments),
            ),
            memory=self.decoder.project_memory(encoded.last_hidden_state, memory_key),
            head_mask=self.head_mask("decoder_head_mask", decoder_head_mask, self.decoder),
            cross_head_mask=self.head_mask(
                "cross_attn_head_mask", cross_attn_head_mask, self.decoder
            ),
            key=decoder_key,
            **wanted,
        )
        logits = self.logits(out.x[:, check.columns_to_keep(logits_to_keep, x.shape[1])], head_key)
        loss = None
        if labels is not None:
            loss = token_loss(logits, check.checked_labels(labels, x.shape[:2], logits))
        return Seq2SeqLMOutput(
            logits=logits,
            loss=loss,
            encoder_last_hidden_state=encoded.last_hidden_state,
            encoder_hidden_states=encoded.hidden_states,
            encoder_attentions=encoded.attentions,
            decoder_hidden_states=out.hidden_states,
            decoder_attentions=out.attentions,
            cross_attentions=out.cross_attentions,
        )

    def given_encoding(
        self, given: BaseOutput | Float[Array, "B E D"], attention_mask
    ) -> tuple[BaseOutput, Bool[Array, "B E"]]:
        """The caller's `encoder_outputs`, and the mask that belongs to them."""
        if not isinstance(given, BaseOutput):
            given = BaseOutput(last_hidden_state=given)
        states = check.embeddings("encoder_outputs", given.last_hidden_state, self.config.d_model)
        mask = check.mask_of("attention_mask", attention_mask, states.shape[:2])
        return dataclasses.replace(given, last_hidden_state=states), mask

    def prepare_decoder(self, input_ids, inputs_embeds, attention_mask, segment_ids):
        """Embedded decoder inputs, their mask, and their documents."""
        check.one_of(input_ids, inputs_embeds, "decoder_input_ids", "decoder_inputs_embeds")
        if inputs_embeds is not None:
            width = self.config.d_model
            inputs_embeds = check.embeddings("decoder_inputs_embeds", inputs_embeds, width)
        else:
            size = self.config.vocab_size
            input_ids = check.token_ids("decoder_input_ids", input_ids, size)
        x, name = self.shared.of(input_ids, inputs_embeds), "decoder_attention_mask"
        segments = check.segment_ids(
            "decoder_segment_ids", segment_ids, x.shape[:2], attention_mask, name
        )
        if segments is not None:
            return x, segments != 0, segments
        return x, check.mask_of(name, attention_mask, x.shape[:2]), None

    def shift_right(
        self, labels: Int[Array, "B T"], segments: Int[Array, "B T"] | None = None
    ) -> Int[Array, "B T"]:
        """Decoder inputs for labels: the start token first, the last label dropped, -100 as pad.

        Of packed rows every document starts with the start token.
        """
        start, pad = self.config.decoder_start_token_id, self.config.pad_token_id
        if start is None or pad is None:
            name = "decoder_start_token_id" if start is None else "pad_token_id"
            raise ConfigError(f"{name}: missing in config.json; labels cannot be shifted right")
        shifted = jnp.concatenate([jnp.full_like(labels[:, :1], start), labels[:, :-1]], axis=1)
        if segments is not None:
            shifted = jnp.where(document_starts(jnp.asarray(segments)), start, shifted)
        return jnp.where(shifted == IGNORED, pad, shifted)

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
        """Encodes once (or takes `encoder_states`), projects the cross keys and values once."""
        attn = self.decoder.blocks[0].attn
        cache = Cache.empty(
            len(self.decoder.blocks), batch, capacity, attn.kv_heads, attn.head_dim, attn.k.dtype
        )
        if attention_mask is None:
            raise InputError("attention_mask: init_cache() needs the encoder's mask")
        if encoder_states is None:
            encoder_states = self.encode(input_ids, attention_mask, inputs_embeds=inputs_embeds).x
        cross = self.decoder.project_memory(encoder_states)
        return cache.replace(cross=cross, cross_mask=attention_mask)

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
        view, cache = cache.make_view(mask, cache_is_empty=cache_is_empty, branches=branches)
        assert cache.cross_mask is not None
        out = self.decoder(
            self.embed(tokens),
            Context(view=view, memory_visible=cache.cross_mask[:, None, None, :]),
            layers=cache.layers,
            memory=cache.cross,
            cache_is_empty=cache_is_empty,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return decode_output(out, self.logits, cache, logits_column)

    @property
    def depth(self) -> int:
        return len(self.decoder.blocks)

    @property
    def tied_embedding(self) -> bool:
        return self.lm_head is None

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.shared(tokens)

    def early_exit(self, layers: int) -> Self:
        return shallow_copy(self, decoder=self.decoder.first(layers))


def memory_visible(
    mask: Bool[Array, "B E"],
    segments: Int[Array, "B E"] | None,
    decoder_segments: Int[Array, "B T"] | None,
) -> Bool[Array, "B 1 #T E"]:
    """What cross-attention sees: all real tokens of the encoder, or those of the same document."""
    visible = jnp.asarray(mask)[:, None, None, :]
    if segments is None or decoder_segments is None:
        return visible
    same = jnp.asarray(decoder_segments)[:, :, None] == jnp.asarray(segments)[:, None, :]
    return visible & same[:, None]


if TYPE_CHECKING:
    _: type[EncoderDecoder] = T5ForConditionalGeneration
