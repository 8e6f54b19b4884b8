"""Base class of decoding strategies, their inputs and their result.

A strategy is a frozen dataclass and a pytree. Fields that shape its program (the number of beams)
are static; numbers (a length penalty) are leaves, so that another number compiles nothing.
`generation/loop.py` runs `init` once, `step` in a while loop, and `finish` at the end. The state
says how many new tokens each row has, and whether and why it has ended (`count` and `reason`).

B: batch size. T: columns of the prompt. L: columns of the sequence buffers. Bn: samples of all
rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from jaxllm.cache.kv_cache import Cache
from jaxllm.cache.variants import PLAIN, CacheKind
from jaxllm.common.errors import NonFiniteError
from jaxllm.generation.processors import ForcedEOSTokenLogitsProcessor, LogitsProcessorList
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.strategies.guidance import NegativePrompt
from jaxllm.generation.strategies.records import Records
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput

EOS, LENGTH, STOP, NONFINITE, RUNNING = range(5)
FINISH_REASONS = ("eos", "length", "stop", "nonfinite", "running")
"""Names of the codes above, in this order. "eos": an end token. "length": the limit, also where
`forced_eos_token_id` wrote an end token at it. "stop": a stop string, a stopping criterion or
`max_time`. "nonfinite": the logits were NaN or infinite, or every token was forbidden, so that no
token could be chosen. "running": the sequence has not ended."""


Length: TypeAlias = Int[Array, ""] | Int[Array, " B"]
"""int32. A number of columns or steps: one for all rows of a call, one for each in batch slots
(`DecodeSettings.aligned`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillInputs:
    """Prompts of one call, padded to buckets: the input of prefill."""

    decoder_inputs: dict[str, Any]
    """Arguments of `Decoder.decode`: `tokens` int32 [B, T] or `inputs_embeds` [B, T, D], `mask`
    bool [B, T], `token_type_ids` int32 [B, T]."""
    encoder_inputs: dict[str, Any]
    """Arguments of `Decoder.init_cache`; empty without an encoder."""
    sequences: Int[Array, "B L"]
    """int32. The prompt, then pads that new tokens overwrite."""
    mask: Bool[Array, "B L"]
    """True at real tokens of `sequences`."""
    start_len: Length
    """int32. Columns of `sequences` that the prompt fills; one number per row in batch slots."""
    cache_len: Length
    """int32. Columns of the cache that the prompt fills, without bucket padding, which new tokens
    overwrite. More than `start_len` if only `inputs_embeds` were given, which have no token ids."""
    last_column: Int[Array, " B"]
    """int32. The column of `decoder_inputs` that holds each row's last real token."""
    keys: Key[Array, " Bn"] | UInt32[Array, "Bn 3"]
    """Random keys, one for each sample; the samples of a row are adjacent. In batch slots, for each
    sample the seed, the number of the row and the number of the sample, from which
    `keys_of_slots` makes the key. Zeros if the strategy draws no random numbers."""
    cache_kind: CacheKind = PLAIN
    negative: NegativePrompt | None = None
    """Unconditional contexts of classifier-free guidance, padded to the prompts' bucket."""
    past_cache: Cache | None = None
    """Cache of an earlier call. `decoder_inputs` and `last_column` then describe only the new
    columns, padded on the right, and `cache_len` counts the real columns of each row, old and
    new."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """Settings read by all strategies. Numbers are traced: other end tokens or another length
    compile nothing.

    In batch slots the first axis of every array is rows, unless its field declares other axes
    (`field_axes.axes`), as the tables of stop strings do.
    """

    processors: LogitsProcessorList
    eos: Int[Array, "R E"]
    """int32. End tokens, padded with -1, which no token equals; R is 1, or rows of batch slots."""
    pad: Int[Array, ""]
    """int32. Token written to finished rows."""
    max_length: Length
    """int32. Columns of the longest result, prompt included."""
    stops: StoppingCriteriaList
    """Criteria that end a row besides `eos` and `max_length`."""
    allow_nonfinite: bool = dataclasses.field(metadata={"static": True})
    """`remove_invalid_values`: a processor replaces NaN and infinite logits, so they are not
    reported."""
    aligned: bool = dataclasses.field(default=True, metadata={"static": True})
    """True for the rows of a call: prompts may be padded on the left, and all rows write their new
    tokens to one column, so that a `Length` is one number. False in batch slots: every row starts
    at column 0, so that processors and criteria need no mask, and has lengths of its own."""
    is_guided: bool = dataclasses.field(default=False, metadata={"static": True})
    """Unconditional contexts are decoded too."""
    keep_scores: bool = dataclasses.field(default=False, metadata={"static": True})
    """`output_scores`."""
    keep_logits: bool = dataclasses.field(default=False, metadata={"static": True})
    """`output_logits`."""
    keep_hidden_states: bool = dataclasses.field(default=False, metadata={"static": True})
    """`output_hidden_states`."""
    keep_attentions: bool = dataclasses.field(default=False, metadata={"static": True})
    """`output_attentions`."""

    @property
    def keeps_steps(self) -> bool:
        """True if the result has arrays of every step."""
        hidden = self.keep_hidden_states or self.keep_attentions
        return self.keep_scores or self.keep_logits or hidden

    @property
    def forces_eos(self) -> bool:
        """True if a processor writes an end token at the limit."""
        return any(isinstance(p, ForcedEOSTokenLogitsProcessor) for p in self.processors)

    @property
    def decode_options(self) -> dict[str, Any]:
        """Arguments of `Decoder.decode` at every step."""
        return {
            "output_hidden_states": self.keep_hidden_states,
            "output_attentions": self.keep_attentions,
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistedCounts:
    """Counts of assisted generation for each row; `accepted / drafted` is the acceptance rate."""

    drafted: Int[Array, " R"]
    """int32. Tokens that the draft proposed."""
    accepted: Int[Array, " R"]
    """int32. Proposed tokens that are in the result."""
    target_calls: Int[Array, " R"]
    """int32. Forward passes of the model while the row was unfinished, prefill included."""
    num_assistant_tokens: Int[Array, " R"]
    """int32. Last value of the schedule; passed to the next call, it continues the schedule."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of the last W tokens of B rows; new token n is in column n modulo W.

    They are those of the model's own distribution, before processors. Only columns of rows that
    ask for them have a meaning.
    """

    chosen: Float[Array, "B W"]
    """Log-probability of the chosen token."""
    top_tokens: Int[Array, "B W K"]
    """The K most probable tokens, the most probable first."""
    top: Float[Array, "B W K"]
    """Log-probabilities of `top_tokens`."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a strategy, final or partial: R returned rows after N steps."""

    sequences: Int[Array, "R L"]
    """int32. Prompt and new tokens, then pads."""
    length: Length
    """Columns of the longest row; in a partial result, columns that are final in every row. The
    host does not read it of batch slots."""
    steps: Length
    """New tokens of the longest row: entries in `scores`, `logits` and `records`. The host does not
    read it of batch slots."""
    lengths: Int[Array, " R"]
    """int32. New tokens of each row, the end token included."""
    finish_reasons: Int[Array, " R"]
    """int32. Indices of `FINISH_REASONS`; `RUNNING` in a partial result."""
    longest: Int[Array, ""] | None = None
    """Maximum number of columns over rows, in strategies whose rows do not advance together."""
    scores: Float[Array, "N Bn V"] | None = None
    """Processed scores of every step (`output_scores`)."""
    logits: Float[Array, "N Bn V"] | None = None
    """Raw logits of every step (`output_logits`)."""
    sequences_scores: Float[Array, " R"] | None = None
    """With beams: score of each row, length penalty included."""
    beam_indices: Int[Array, "R N"] | None = None
    """With beams: the beam that each new token was chosen from, numbered over the batch; -1 after
    the end."""
    records: Records | None = None
    """Hidden states and attentions."""
    assisted: AssistedCounts | None = None
    """Counts of assisted generation."""
    logprobs: Logprobs | None = None
    """Of the tokens in `sequences`, which are the newest ones only (`StreamedSample`)."""

    @property
    def all_finished(self) -> bool:
        """True if every row has ended. The result must have been fetched to the host."""
        return not (self.finish_reasons == RUNNING).any()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ReturnedCache:
    """Cache of the returned rows, for `past_key_values`."""

    cache: Cache
    sequences: Int[Array, "R L"]
    mask: Bool[Array, "R L"]
    """True at real tokens of `sequences`; the cache holds a prefix of each row's tokens."""


class DecodeState(Protocol):
    """State of a strategy: a pytree that the decode loop carries."""

    @property
    def cur_len(self) -> Length:
        """Columns in use, prompt included."""
        ...

    @property
    def step(self) -> Length:
        """Steps so far."""
        ...

    @property
    def count(self) -> Int[Array, " B"]:
        """int32. New tokens of each row, the end token included."""
        ...

    @property
    def reason(self) -> Int[Array, " B"]:
        """int32. `RUNNING`, or why the row gets no more tokens; an index of `FINISH_REASONS`."""
        ...

    @property
    def mask(self) -> Bool[Array, "B L"]:
        """True at real tokens of the sequences."""
        ...

    @property
    def scores(self) -> Float[Array, ...] | None:
        """Processed scores of every step, if they are kept."""
        ...

    @property
    def logits(self) -> Float[Array, ...] | None:
        """Raw logits of every step, if they are kept."""
        ...

    @property
    def cache(self) -> Cache: ...

    def replace(self, **changes: Any) -> Self: ...


S = TypeVar("S", bound=DecodeState)


class Strategy(Generic[S]):
    """Decoding strategy, with a state S that the decode loop carries."""

    can_stream: ClassVar[bool] = True
    """Chosen tokens are final, so that they can be streamed."""
    allows_ring_cache: ClassVar[bool] = False
    """Decodes new columns one at a time, so that a sliding window may be a ring buffer."""
    can_repeat_steps: ClassVar[bool] = False
    """A step overwrites nothing but the state's small arrays and the cache's slot of the newest
    token, and writes the same there if it runs once more."""
    chooses_in_prefill: ClassVar[bool] = False
    """`init` returns the state after the first token: a call for one token needs no step."""
    can_continue: ClassVar[bool] = True
    """Can start from the cache of `PastKeyValues`."""
    extra_decode_options: ClassVar[Mapping[str, Any]] = {}
    """Extra arguments of `Decoder.decode` in prefill; greedy search, sampling and DoLa pass them
    at every step."""

    @property
    def draws(self) -> bool:
        """True if the strategy uses random keys; other strategies get zeros in place of keys."""
        return True

    @property
    def keys_per_row(self) -> int:
        """Random keys per row: the number of results that draw independently."""
        return 1

    def cache_slots(self, new_tokens: int) -> int:
        """Number of cache slots for `new_tokens` tokens after the prompt."""
        return new_tokens

    def initial_state(self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int) -> S:
        """The state before the first token, with a cache that holds the prompt. Strategies that
        run in batch slots have it."""
        raise NotImplementedError

    def init(
        self,
        model: Decoder,
        inputs: PrefillInputs,
        out: DecodeOutput,
        settings: DecodeSettings,
        new_token_bucket: int,
    ) -> S:
        """The state after the first token, from the output of prefill; or before it, if choosing
        it needs another call of the model (contrastive search).

        Args:
            out: logits of each row's last real column [B, 1, V], the filled cache, and the hidden
                states of all columns.
            new_token_bucket: the limit of new tokens, rounded up.
        """
        raise NotImplementedError

    def step(self, model: Decoder, state: S, settings: DecodeSettings) -> S:
        """The state after one more token (assisted generation: a draft) of each unfinished row."""
        raise NotImplementedError

    def finish(self, state: S, settings: DecodeSettings) -> Result:
        """The result of a state, which need not be the last."""
        raise NotImplementedError

    def returned_cache(self, state: Any) -> ReturnedCache:
        """Cache of the returned rows, from which a later call continues."""
        # With guidance the last rows are unconditional contexts, which belong to this call only.
        cache = state.cache.first_rows(state.mask.shape[0])
        return ReturnedCache(cache, state.sequences, state.mask)


AnyStrategy: TypeAlias = Strategy[Any]
"""A strategy, whatever its state."""


def nonfinite(logits: Float[Array, "... V"], scores: Float[Array, "... V"]) -> Bool[Array, " ..."]:
    """True where logits are NaN or infinite, or every token is forbidden.

    Single logits of -inf are allowed (a model may mask tokens).
    """
    best = jnp.max(scores, axis=-1)
    return ~jnp.isfinite(jnp.max(logits, axis=-1)) | jnp.isnan(best) | (best == -jnp.inf)


def nonfinite_error(step: int, row: int | None = None) -> NonFiniteError:
    """The error of a row whose logits were not finite at new token `step`; `row` is its number in
    a call of `generate`."""
    where = f"at new token {step}" if row is None else f"generate: at new token {step} of row {row}"
    return NonFiniteError(
        f"{where} the model's logits are NaN or infinite, or the settings forbid every token; "
        "check the weights and the settings, or compute in float32 (dtype='float32')"
    )


def is_eos(tokens: Int[Array, " B *rest"], eos: Int[Array, "R E"]) -> Bool[Array, " B *rest"]:
    """True at end tokens. `eos` has one set of end tokens for all rows, or one set for each row."""
    sets = eos.reshape(len(eos), *[1] * (tokens.ndim - 1), -1)
    return jnp.any(tokens[..., None] == sets, axis=-1)


def end_reasons(
    tokens: Int[Array, " B *rest"],
    is_full: Bool[Array, " ..."],
    is_stopped: Bool[Array, " B *rest"] | bool,
    settings: DecodeSettings,
) -> Int[Array, " B *rest"]:
    """Why a sequence ends with each of these tokens as its newest one, or `RUNNING`.

    Args:
        is_full: True where the token is at the limit, `max_length`; broadcasts to the tokens.
        is_stopped: True where a stopping criterion ends the sequence.
    """
    with_eos = jnp.where(is_full, LENGTH, EOS) if settings.forces_eos else EOS
    without_eos = jnp.where(is_stopped, STOP, jnp.where(is_full, LENGTH, RUNNING))
    return jnp.where(is_eos(tokens, settings.eos), with_eos, without_eos)


def unconditional(out: DecodeOutput) -> Float[Array, "B V"] | None:
    """Logits of the unconditional contexts; None without guidance."""
    logits = out.unconditional_logits
    return None if logits is None else logits[:, 0]
