"""Drafts: tokens proposed by an assistant model, the model's own first layers, or a prompt lookup.

The rows of a batch have different lengths, since they accept different numbers of drafted tokens.

Prompt lookup is after https://github.com/apoorvumang/prompt-lookup-decoding, as in transformers
5.23 (`PromptLookupCandidateGenerator`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import Cache, write_columns
from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.base import History
from jaxllm.generation.processors.warpers import (
    Filter,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from jaxllm.generation.strategies.guidance import with_guidance_of
from jaxllm.generation.strategies.strategy import (
    DecodeSettings,
    Length,
    PrefillInputs,
    is_eos,
    nonfinite,
    unconditional,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput

DraftState: TypeAlias = Any
"""State that a draft keeps between rounds, a pytree: the cache of an assistant, or None."""
Choose = Callable[[Float[Array, "B V"], Int[Array, " B"]], Int[Array, " B"]]
"""`(processed scores, columns) -> tokens`: each row's token for its column."""
SCORE_DEPENDENT = (Filter, UnbatchedClassifierFreeGuidanceLogitsProcessor)
"""Processors that depend on the scores, which a lookup does not have."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftTokens:
    """Tokens that a draft proposes for each row."""

    tokens: Int[Array, "B G"]
    size: Int[Array, " B"]
    """Number of proposed tokens; the others are filler."""
    scores: Float[Array, "B G V"] | None = None
    """Processed scores that each token was drawn from."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenBuffer:
    """The sequences of a batch; drafted tokens follow from column `cur_len` on."""

    sequences: Int[Array, "B L"]
    mask: Bool[Array, "B L"]
    """True at real tokens of `sequences`."""
    cur_len: Int[Array, " B"]
    """Number of accepted columns of each row."""

    def put(
        self, tokens: Int[Array, "B T"], real: Bool[Array, "B T"], offset: int | Int[Array, ""] = 0
    ) -> TokenBuffer:
        """The buffer with tokens written from column `cur_len + offset` on."""
        position = self.cur_len + offset
        return dataclasses.replace(
            self,
            sequences=write_columns(self.sequences, tokens, position),
            mask=write_columns(self.mask, real, position),
        )


@dataclasses.dataclass(frozen=True)
class DraftInputs:
    """Arguments of `Draft.propose`."""

    model: Decoder
    """The model that checks the draft."""
    buffer: TokenBuffer
    cache: Cache
    """The model's cache: each row without its newest token."""
    draft_state: DraftState
    """State from `Draft.init` or from the last round."""
    limit: Int[Array, " B"]
    """Most tokens to propose for each row."""
    choose: Choose
    prompt_len: Int[Array, ""]
    """Columns of the prompt."""
    settings: DecodeSettings
    max_draft: int
    """G: columns of a draft, a static bound of `limit`."""
    keep_scores: bool
    """Keep the scores that tokens are drawn from, for acceptance."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A draft, and the buffers that it was written to."""

    drafted: DraftTokens
    buffer: TokenBuffer
    cache: Cache
    """The model's cache."""
    draft_state: DraftState


class Draft:
    """Proposes tokens for each row. A pytree, like the strategy that it belongs to."""

    has_scores: ClassVar[bool] = True
    """Its tokens are drawn from scores, which the speculative rule of acceptance needs."""

    def init(
        self, model: Decoder, inputs: PrefillInputs, capacity: int, samples: int
    ) -> DraftState:
        """The draft's own state after the prompt.

        Args:
            capacity: slots of the model's cache.
            samples: results per row.
        """
        return None

    def propose(self, inputs: DraftInputs) -> Proposal:
        raise NotImplementedError

    def drop_rejected(self, draft_state: DraftState, length: Int[Array, " B"]) -> DraftState:
        """The draft's state without rejected tokens.

        Args:
            length: columns of each row in the model's cache.
        """
        return draft_state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistantModel(Draft):
    """A model of the same vocabulary, with a cache of its own (its draft state)."""

    model: Decoder
    threshold: Float[Array, ""]
    """A row's draft ends with a token less probable than this."""

    def init(self, model: Decoder, inputs: PrefillInputs, capacity: int, samples: int) -> Cache:
        if "inputs_embeds" in inputs.decoder_inputs or inputs.encoder_inputs.keys() & {
            "inputs_embeds",
            "encoder_states",
        }:
            raise UnsupportedError(
                "assistant_model: needs a prompt of input_ids, since it cannot read another "
                "model's embeddings or encoder outputs; assistant_early_exit and "
                "prompt_lookup_num_tokens take them"
            )
        network, (batch, width) = with_guidance_of(model, self.model), inputs.mask.shape
        if inputs.past_cache is None:
            cache = network.init_cache(batch, capacity, **inputs.encoder_inputs)
            cache = network.decode(
                cache=inputs.cache_kind.convert(cache),
                cache_is_empty=True,
                logits_column=inputs.last_column,
                **inputs.decoder_inputs,
            ).cache
        else:
            # The assistant has not seen the conversation: it prefills all of it.
            lacks_encoder_ids = (
                inputs.past_cache.cross is not None and "input_ids" not in inputs.encoder_inputs
            )
            if lacks_encoder_ids or "token_type_ids" in inputs.decoder_inputs:
                raise UnsupportedError(
                    "assistant_model: cannot continue past_key_values without the encoder's input "
                    "ids, or together with token_type_ids; use assistant_early_exit or "
                    "prompt_lookup_num_tokens"
                )
            cache = network.init_cache(batch, width, **inputs.encoder_inputs)
            cache = network.decode(
                inputs.sequences, inputs.mask, inputs.cache_kind.convert(cache), cache_is_empty=True
            ).cache.compact(capacity)
        length = repeat_for_samples(inputs.cache_len, batch * samples)
        return cache.repeat(samples).replace(length=length)

    def propose(self, inputs: DraftInputs) -> Proposal:
        network = with_guidance_of(inputs.model, self.model)
        drafted, buffer, cache = run_draft(network, self.threshold, inputs, inputs.draft_state)
        # The last token of a draft is proposed, but not in the assistant's cache.
        cache = cache.replace(length=inputs.cache.length + jnp.maximum(drafted.size, 1))
        return Proposal(drafted, buffer, inputs.cache, cache)

    def drop_rejected(self, draft_state: Cache, length: Int[Array, " B"]) -> Cache:
        return draft_state.truncate(jnp.minimum(draft_state.length, length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyExit(Draft):
    """The model's own first layers, with its final norm and LM head (LayerSkip, arXiv:2404.16710).

    Their keys and values equal those of the whole model, so drafts are written to its cache, where
    the whole model later writes the same values.
    """

    layers: int = dataclasses.field(metadata={"static": True})
    threshold: Float[Array, ""]
    """A row's draft ends with a token less probable than this."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        n, cache = self.layers, inputs.cache
        first_layers = cache.replace(
            layers=cache.layers[:n], cross=None if cache.cross is None else cache.cross[:n]
        )
        network = inputs.model.early_exit(n)
        drafted, buffer, first_layers = run_draft(network, self.threshold, inputs, first_layers)
        cache = cache.replace(layers=(*first_layers.layers, *cache.layers[n:]))
        return Proposal(drafted, buffer, cache, None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftLoopState:
    """State of the loop over the tokens of one draft."""

    i: Int[Array, ""]
    """Index of the token to propose; -1 while the cache lacks an earlier token of some row."""
    drafting: Bool[Array, " B"]
    """True if the row's draft has not ended."""
    buffer: TokenBuffer
    cache: Cache
    """The network's cache."""
    drafted: DraftTokens


def run_draft(
    network: Decoder, threshold: Float[Array, ""], inputs: DraftInputs, cache: Cache
) -> tuple[DraftTokens, TokenBuffer, Cache]:
    """Drafts tokens with a network, one at a time.

    Args:
        threshold: a row's draft ends with a token less probable than this.
        cache: the network's; it lacks each row's newest token, and in some rows the one before.

    Returns:
        The draft, the buffer with it, and the cache with its columns written; the length and
        positions of the cache are out of date.
    """
    batch, buffer = inputs.limit.shape[0], inputs.buffer
    slot = inputs.cache.length  # of the newest token
    drafting = inputs.limit > 0
    missing = slot - cache.length
    scores = None
    if inputs.keep_scores:
        scores = jnp.zeros((batch, inputs.max_draft, network.config.vocab_size), jnp.float32)
    start = DraftLoopState(
        i=jnp.where(jnp.any(drafting & (missing > 0)), -1, 0).astype(jnp.int32),
        drafting=drafting,
        buffer=buffer,
        cache=cache,
        drafted=DraftTokens(
            tokens=jnp.zeros((batch, inputs.max_draft), jnp.int32),
            size=jnp.zeros((batch,), jnp.int32),
            scores=scores,
        ),
    )

    def step(state: DraftLoopState) -> DraftLoopState:
        i, buffer = state.i, state.buffer
        column = buffer.cur_len + i - 1
        token = jnp.take_along_axis(buffer.sequences, column[:, None], axis=1)
        # At i = -1 rows that lack no earlier token are masked, and overwrite nothing.
        real = state.drafting & (i >= -missing)
        cache = state.cache.replace(length=slot + jnp.maximum(i, -missing))
        out = network.decode(token, real[:, None], cache)
        return _append_token(dataclasses.replace(state, cache=out.cache), out, threshold, inputs)

    final = lax.while_loop(lambda state: state.drafting.any(), step, start)
    return final.drafted, final.buffer, final.cache


def _append_token(
    state: DraftLoopState, out: DecodeOutput, threshold: Float[Array, ""], inputs: DraftInputs
) -> DraftLoopState:
    """Appends one token to the rows that are drafting."""
    buffer, drafted, settings = state.buffer, state.drafted, inputs.settings
    logits = out.logits[:, 0]
    i = jnp.maximum(state.i, 0)
    scores = settings.processors(
        buffer.sequences,
        logits,
        buffer.cur_len + i,
        mask=buffer.mask,
        prompt_len=inputs.prompt_len,
        unconditional_logits=unconditional(out),
    )
    token = inputs.choose(scores, buffer.cur_len + i)
    # A draft cannot affect the result: non-finite scores only end it.
    is_valid = state.drafting & (state.i >= 0) & ~nonfinite(logits, scores)
    token = jnp.where(is_valid, token, settings.pad)
    probability = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), token[:, None], axis=1)
    ends = is_eos(token, settings.eos) | (probability[:, 0] < threshold)
    ends |= i + 1 >= inputs.limit
    draft_scores = drafted.scores
    if draft_scores is not None:
        draft_scores = lax.dynamic_update_slice_in_dim(draft_scores, scores[:, None], i, axis=1)
    return DraftLoopState(
        i=state.i + 1,
        drafting=jnp.where(state.i < 0, state.drafting, is_valid & ~ends),
        buffer=buffer.put(token[:, None], is_valid[:, None], i),
        cache=state.cache,
        drafted=DraftTokens(
            tokens=lax.dynamic_update_slice_in_dim(drafted.tokens, token[:, None], i, axis=1),
            size=drafted.size + is_valid.astype(jnp.int32),
            scores=draft_scores,
        ),
    )


def repeat_for_samples(columns: Length, rows: int) -> Int[Array, " rows"]:
    """Repeats column counts, one for all rows or one per row, for each sample of each row."""
    columns = jnp.asarray(columns, jnp.int32).reshape(-1)
    return jnp.repeat(columns, rows // columns.shape[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup(Draft):
    """Draft of the tokens after an earlier occurrence of a row's last n-gram."""

    has_scores: ClassVar[bool] = False
    ngram_size: Int[Array, ""]
    """The longest n-gram to look for."""

    def propose(self, inputs: DraftInputs) -> Proposal:
        buffer = inputs.buffer
        history = History.of(buffer.sequences, buffer.cur_len, buffer.mask)
        # Rules forbid tokens independently of the scores.
        rules = LogitsProcessorList(
            p for p in inputs.settings.processors if not isinstance(p, SCORE_DEPENDENT)
        )
        vocabulary = inputs.model.config.vocab_size
        scores = rules(
            buffer.sequences,
            jnp.ones((buffer.sequences.shape[0], vocabulary), jnp.float32),
            buffer.cur_len,
            mask=buffer.mask,
            prompt_len=inputs.prompt_len,
        )
        allowed = scores > jnp.finfo(jnp.float32).min
        column, has_match = earlier_match(history.tokens, history.size, allowed, self.ngram_size)
        limit = jnp.where(has_match, inputs.limit, 0)
        drafted = draft_from(
            history.tokens, history.size, column, limit, inputs.settings.eos, inputs.max_draft
        )
        real = jnp.arange(inputs.max_draft)[None] < drafted.size[:, None]
        buffer = buffer.put(drafted.tokens, real)
        return Proposal(drafted, buffer, inputs.cache, inputs.draft_state)


def earlier_match(
    tokens: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    allowed: Bool[Array, "B V"],
    longest: Int[Array, ""],
) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """First earlier occurrence of each row's last n-gram that an allowed token follows, for the
    largest n up to `longest`.

    Args:
        tokens: tokens of each row, left-aligned.
        size: number of tokens of each row.

    Returns:
        The column after the n-gram, and whether there is one.

    >>> import jax.numpy as jnp
    >>> tokens, allowed = jnp.array([[5, 1, 2, 6, 1, 2, 7, 1, 2]]), jnp.ones((1, 8), bool)
    >>> [x.tolist() for x in earlier_match(tokens, jnp.array([[9]]), allowed, jnp.int32(2))]
    [[3], [True]]
    """
    columns = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]

    def one_longer(k: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        agrees, length = carry
        last = jnp.take_along_axis(tokens, jnp.maximum(size - 1 - k, 0), axis=1)
        agrees &= (columns >= k) & (jnp.roll(tokens, k, axis=1) == last)
        return agrees, length + agrees.astype(jnp.int32)

    # Columns in which the n-gram may end: another token follows.
    start = columns < size - 1
    _, length = lax.fori_loop(
        0, jnp.minimum(longest, tokens.shape[1]), one_longer, (start, jnp.zeros_like(tokens))
    )
    follower = jnp.clip(jnp.roll(tokens, -1, axis=1), 0, allowed.shape[1] - 1)
    length = jnp.where(jnp.take_along_axis(allowed, follower, axis=1), length, 0)
    best = jnp.max(length, axis=1, keepdims=True)
    match = jnp.argmax(length == best, axis=1).astype(jnp.int32)
    return match + 1, best[:, 0] > 0


def draft_from(
    tokens: Int[Array, "B L"],
    size: Int[Array, "B 1"],
    column: Int[Array, " B"],
    limit: Int[Array, " B"],
    eos: Int[Array, "R E"],
    max_draft: int,
) -> DraftTokens:
    """Drafts up to `limit` tokens of each row from `column` on, and stops before an end token."""
    columns = column[:, None] + jnp.arange(max_draft, dtype=jnp.int32)[None]
    drafted = jnp.take_along_axis(tokens, jnp.minimum(columns, tokens.shape[1] - 1), axis=1)
    continues = (columns < size) & ~is_eos(drafted, eos)
    before_end = jnp.sum(jnp.cumprod(continues, axis=1, dtype=jnp.int32), axis=1, dtype=jnp.int32)
    return DraftTokens(drafted, jnp.minimum(before_end, limit))
