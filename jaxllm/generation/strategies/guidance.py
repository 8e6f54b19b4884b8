"""Classifier-free guidance: decodes the prompt and a negative prompt together in one model.

`Guided` wraps the model: strategies run a `Decoder` whose cache has twice the rows, and pass the
logits of the second half, the unconditional contexts, to the processors; the first of these
combines the two (Sanchez et al. 2023, arXiv:2306.17806, as in transformers).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.generation.inputs.arguments import (
    CallArguments,
    PaddedBatch,
    checked_ids,
    checked_mask,
    last_token_columns,
    pad_right,
)
from jaxllm.generation.inputs.values import is_traced
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.config import ModelConfig
from jaxllm.models.decoder import Decoder, GenerativeModel
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NegativePrompt:
    """The prompts of the unconditional contexts, one for each row."""

    tokens: Int[Array, "B T"]
    """int32, padded on either side."""
    mask: Bool[Array, "B T"]
    """True at real tokens."""
    last_column: Int[Array, " B"]
    """int32. The column of each row's last real token."""

    @staticmethod
    def of(prompt: PaddedBatch) -> NegativePrompt:
        return NegativePrompt(prompt.ids, prompt.mask, last_token_columns(prompt.mask))

    def padded(self, width: int) -> NegativePrompt:
        """The prompts padded on the right to `width` columns."""
        extra = max(width - self.mask.shape[1], 0)
        return NegativePrompt(
            pad_right(self.tokens, extra, 0), pad_right(self.mask, extra, False), self.last_column
        )


@dataclasses.dataclass(frozen=True)
class Guided:
    """A decoder-only model that also decodes unconditional contexts, with a `Decoder`'s methods.

    A call with B rows runs 2B through the model: the conditional rows, then the unconditional ones.
    It returns the output of the first B, with the cache of all and `unconditional_logits`.
    """

    model: Decoder
    negative: NegativePrompt | None = None
    """Needed in prefill only."""
    is_encoder_decoder = False

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def depth(self) -> int:
        return self.model.depth

    @property
    def tied_embedding(self) -> bool:
        return self.model.tied_embedding

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return self.model.embed(tokens)

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return self.model.logits(x)

    def init_cache(self, batch: int, capacity: int, **encoder_inputs: Any) -> Cache:
        return self.model.init_cache(2 * batch, capacity, **encoder_inputs)

    def decode(
        self,
        tokens: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        cache_is_empty: bool = False,
        logits_column: Int[Array, " B"] | None = None,
        branches: Branches | None = None,
        inputs_embeds: Float[Array, "B T D"] | None = None,
        **options: Any,
    ) -> DecodeOutput:
        """Runs `Decoder.decode` on conditional and unconditional rows.

        In prefill the unconditional rows run their own prompts, also if the cache of a continued
        conversation has no rows for them yet.
        """
        if cache.mask.shape[0] == mask.shape[0]:
            return self.continue_conversation(
                tokens,
                mask,
                cache,
                logits_column=logits_column,
                inputs_embeds=inputs_embeds,
                **options,
            )
        # The chosen token is appended to both contexts, in the same slots.
        length = cache.length
        if jnp.ndim(length) == 1:
            cache = cache.replace(length=concatenate_rows(length, length))
        unconditional = (tokens, mask, logits_column)
        if cache_is_empty:
            assert self.negative is not None
            negative = self.negative.padded(mask.shape[1])
            unconditional = (negative.tokens, negative.mask, negative.last_column)
            if inputs_embeds is not None:
                tokens, embeds = None, self.model.embed(negative.tokens)
                inputs_embeds = jnp.concatenate([inputs_embeds.astype(embeds.dtype), embeds])
        if branches is not None:
            columns = branches.columns
            branches = Branches(
                seen=concatenate_rows(branches.seen, branches.seen),
                columns=concatenate_rows(columns, columns) if columns.ndim == 2 else columns,
            )
        if inputs_embeds is not None:
            options["inputs_embeds"] = inputs_embeds
        out = self.model.decode(
            concatenate_rows(tokens, unconditional[0]),
            concatenate_rows(mask, unconditional[1]),
            cache,
            cache_is_empty=cache_is_empty,
            logits_column=concatenate_rows(logits_column, unconditional[2]),
            branches=branches,
            **options,
        )
        rows = mask.shape[0]
        conditional = jax.tree.map(lambda x: x[:rows], out.replace(cache=None))
        cache = out.cache
        if jnp.ndim(length) == 1:
            cache = cache.replace(length=cache.length[:rows])
        return conditional.replace(cache=cache, unconditional_logits=out.logits[rows:])

    def continue_conversation(
        self, tokens: Any, mask: Bool[Array, "B T"], cache: Cache, **options: Any
    ) -> DecodeOutput:
        """Runs the new part of a conversation, and unconditional contexts in additional rows."""
        negative, rows = self.negative, mask.shape[0]
        assert negative is not None
        conditional = self.model.decode(tokens, mask, cache, **options)
        options.update(logits_column=negative.last_column, inputs_embeds=None)
        empty = cache.truncate(jnp.zeros((rows,), jnp.int32))
        unconditional = self.model.decode(
            negative.tokens, negative.mask, empty, cache_is_empty=True, **options
        )
        return conditional.replace(
            cache=conditional.cache.append_rows(unconditional.cache),
            unconditional_logits=unconditional.logits,
        )

    def early_exit(self, layers: int) -> Guided:
        return dataclasses.replace(self, model=self.model.early_exit(layers))


def with_guidance_of(model: Decoder, assistant: Decoder) -> Decoder:
    """The assistant with the unconditional contexts of the model, if it has any."""
    return Guided(assistant, model.negative) if isinstance(model, Guided) else assistant


def concatenate_rows(a: Array | None, b: Array | None) -> Any:
    """Concatenates the rows of two arrays; None if either is None."""
    return None if a is None or b is None else jnp.concatenate([a, b])


def negative_prompt(
    model: GenerativeModel,
    config: GenerationConfig,
    arguments: CallArguments,
    prompt: PaddedBatch,
) -> PaddedBatch | None:
    """Unconditional contexts, by default each prompt's last token; None without guidance.

    Args:
        arguments: of the call, before the checks.
        prompt: the prompts, checked.

    Raises:
        InputError: ids and prompts do not fit each other, or there is no guidance to use them.
        UnsupportedError: an encoder-decoder, or an input that unconditional rows cannot share.
    """
    ids, mask = arguments.negative_prompt_ids, arguments.negative_prompt_attention_mask
    if mask is not None and ids is None:
        raise InputError("negative_prompt_attention_mask: given without negative_prompt_ids")
    scale = config.guidance_scale
    if scale is None or (not is_traced(scale) and scale == 1):
        if ids is not None and scale is None:
            raise InputError("negative_prompt_ids: has no effect without guidance_scale")
        return None
    if model.is_encoder_decoder:
        raise UnsupportedError(
            "guidance_scale: not for encoder-decoders (nor in transformers, which would run the "
            "model on the decoder's tokens without an encoder's input)"
        )
    for name in ("token_type_ids", "encoder_hidden_states"):
        if getattr(arguments, name) is not None:
            raise UnsupportedError(
                f"guidance_scale: cannot be combined with {name}, which unconditional rows lack"
            )
    if ids is None:
        return last_tokens(prompt)
    ids = checked_ids("negative_prompt_ids", ids, model.config.vocab_size)
    if ids.shape[0] != prompt.rows:
        raise InputError(f"negative_prompt_ids: {ids.shape[0]} rows for {prompt.rows} prompts")
    return PaddedBatch(ids, checked_mask(mask, ids.shape, "negative_prompt_attention_mask"))


def last_tokens(prompt: PaddedBatch) -> PaddedBatch:
    """Contexts of one column: the last real token of each prompt."""
    if prompt.ids is None:
        raise InputError("negative_prompt_ids: needed where the prompt has no token ids")
    column = last_token_columns(prompt.mask)[:, None]
    host = jnp if is_traced(prompt.ids) or is_traced(column) else np
    ids = host.take_along_axis(host.asarray(prompt.ids), column, axis=1)
    return PaddedBatch(ids, np.ones(ids.shape, bool))
