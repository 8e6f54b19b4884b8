"""What every strategy of generation is: a start, a step and an end over one driver (`loop`).

A strategy is a frozen dataclass and a pytree. What shapes its program (the number of beams) is
static; its numbers (a length penalty) are leaves, so that another number compiles nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache.kv_cache import Cache
from jaxllm.cache.variants import PLAIN, CacheKind
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.stopping import StoppingCriteriaList
from jaxllm.generation.strategies.records import Records
from jaxllm.models.outputs import DecodeOutput

NEVER = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prompt:
    """The arrays of one call, in buckets."""

    inputs: dict[str, Any]
    """What `model.decode` takes: `tokens` [B, T] or `inputs_embeds` [B, T, D], `mask` [B, T],
    `token_type_ids` [B, T]."""
    encoder: dict[str, Any]
    """What `model.start` takes."""
    sequences: Int[Array, "B L"]
    """The buffer that the result grows in: the prompt, then pads."""
    mask: Bool[Array, "B L"]
    """Which columns of `sequences` hold real tokens."""
    start_len: Int[Array, ""] | Int[Array, " B"]
    """Columns of `sequences` that the prompt fills. One number a row in batch slots alone."""
    columns: Int[Array, ""] | Int[Array, " B"]
    """Columns of the prompt that are not bucket padding; new tokens overwrite that. More than
    `start_len` with embeddings alone."""
    at: Int[Array, " B"]
    """The column that holds each row's last real token."""
    keys: Key[Array, " Bn"]
    """A key for each sample of each row."""
    kind: CacheKind = PLAIN
    """Of the cache."""
    past: Cache | None = None
    """What an earlier call left. `inputs` and `at` are then of the new columns alone, padded on the
    right, and `columns` is one number a row: the real ones, old and new."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """What all strategies read, all traced: another EOS set or length compiles nothing."""

    processors: LogitsProcessorList
    eos: Int[Array, " E"] | Int[Array, "B E"]
    """End tokens, filled up with -1, which no token equals; each row's own in batch slots."""
    pad: Int[Array, ""]
    """What finished rows emit."""
    max_length: Int[Array, ""] | Int[Array, " B"]
    """Columns of the longest result."""
    stops: StoppingCriteriaList
    """What ends a row besides `eos` and `max_length`."""
    allow_nonfinite: bool = dataclasses.field(metadata={"static": True})
    """`remove_invalid_values`: NaN and infinite logits are mended, not reported."""
    keep_scores: bool = dataclasses.field(default=False, metadata={"static": True})
    keep_logits: bool = dataclasses.field(default=False, metadata={"static": True})
    keep_hidden_states: bool = dataclasses.field(default=False, metadata={"static": True})
    keep_attentions: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def decode_options(self) -> dict[str, Any]:
        """Arguments of `model.decode`, at every step."""
        return {
            "output_hidden_states": self.keep_hidden_states,
            "output_attentions": self.keep_attentions,
        }


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistedCounts:
    """What assisted generation did, for each row; `accepted / drafted` is the acceptance rate."""

    drafted: Int[Array, " R"]
    """Tokens that the draft proposed."""
    accepted: Int[Array, " R"]
    """Those of them that are in the result."""
    target_calls: Int[Array, " R"]
    """Forward passes of the model while the row was live, the prompt's included."""
    num_assistant_tokens: Int[Array, " R"]
    """The schedule's last value; passed to the next call it carries the heuristic on."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What a strategy ends with; R rows are returned."""

    sequences: Int[Array, "R L"]
    length: Int[Array, ""]
    """Columns of the longest row; while some are live, those that every live row has."""
    steps: Int[Array, ""]
    """Entries in the records below."""
    first_nonfinite_step: Int[Array, " B"]
    """The first step at which a live row had no finite logits or no token left, or -1."""
    longest: Int[Array, ""] | None = None
    """Columns of the longest row so far, where rows do not advance together; else None."""
    over: Bool[Array, ""] | None = None
    """Nothing is left to do. Set by the driver."""
    scores: Float[Array, "N Bn V"] | None = None
    logits: Float[Array, "N Bn V"] | None = None
    sequences_scores: Float[Array, " R"] | None = None
    beam_indices: Int[Array, "R N"] | None = None
    records: Records | None = None
    assisted: AssistedCounts | None = None


S = TypeVar("S")


class Strategy(Generic[S]):
    """One way of choosing tokens. S is the state that its loop carries; `cur_len`, `step`,
    `first_nonfinite_step` and `cache` are in every state, and `done` where `open_rows` is not
    overridden."""

    streams: ClassVar[bool] = True
    """Tokens once chosen stay."""
    slides: ClassVar[bool] = False
    """It reads new columns one at a time, so that a sliding window may be a ring."""
    continues: ClassVar[bool] = True
    """It can start from a cache of `PastKeyValues`."""
    read_options: ClassVar[Mapping[str, Any]] = {}
    """More arguments of `model.decode` for the prompt; greedy search, sampling and DoLa give them
    at every step."""

    @property
    def samples(self) -> int:
        """Random keys a row."""
        return 1

    def slots(self, new: int) -> int:
        """Cache slots that `new` tokens take."""
        return new

    def init(
        self, model: Any, prompt: Prompt, read: DecodeOutput, settings: DecodeSettings, room: int
    ) -> S:
        """The state after the first token, from what the model read of the prompt; or before it,
        where choosing it takes another call of the model.

        Args:
            read: logits of each row's last real column [B, 1, V], the filled cache, and the hidden
                states of all columns.
            room: most new tokens, a bucket.
        """
        raise NotImplementedError

    def step(self, model: Any, state: S, settings: DecodeSettings) -> S:
        """One more token for every live row."""
        raise NotImplementedError

    def open_rows(self, state: Any) -> Bool[Array, " B"]:
        """Rows that have not ended."""
        return ~state.done

    def alive(self, state: Any, until: Int[Array, ""]) -> Bool[Array, ""]:
        """Whether to go on: some row has not ended, and has fewer than `until` columns."""
        return jnp.any(self.open_rows(state) & (state.cur_len < until))

    def finish(self, state: S, settings: DecodeSettings) -> Result:
        """The rows to return."""
        raise NotImplementedError

    def leave(self, state: Any) -> tuple[Cache, Int[Array, "R L"], Bool[Array, "R L"]]:
        """What a later call may start from: the cache of the rows to return, their tokens, and
        which of these are real. The first ones of each row are in the cache."""
        # Unconditional contexts lie below, and belong to a call.
        return state.cache.first(state.mask.shape[0]), state.sequences, state.mask


def note_nonfinite(
    first_nonfinite_step: Int[Array, " B"],
    step: Int[Array, ""] | Int[Array, " B"],
    live: Bool[Array, " B"],
    logits: Float[Array, "B V"],
    scores: Float[Array, "B V"],
) -> Int[Array, " B"]:
    """`first_nonfinite_step` after a look at this step."""
    return jnp.where(
        nonfinite(logits, scores) & live & (first_nonfinite_step == NEVER),
        step,
        first_nonfinite_step,
    )


def nonfinite(logits: Float[Array, "... V"], scores: Float[Array, "... V"]) -> Bool[Array, " ..."]:
    """NaN or infinite logits, or every token forbidden.

    A -inf among the logits is no fault (a head may mask); nothing but -inf is.
    """
    best = jnp.max(scores, axis=-1)
    return ~jnp.isfinite(jnp.max(logits, axis=-1)) | jnp.isnan(best) | (best == -jnp.inf)


def unconditional(read: DecodeOutput) -> Float[Array, "B V"] | None:
    """The logits of the unconditional contexts, where there is guidance."""
    logits = read.unconditional_logits
    return None if logits is None else logits[:, 0]
