"""What the beam strategies share: their state, their candidates, and what they return."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache.kv_cache import Cache
from jaxllm.generation.strategies.beam.beam_cache import BeamCache
from jaxllm.generation.strategies.beam.hypotheses import (
    WORST,
    Count,
    Hypotheses,
    column,
    global_indices,
    largest,
    result_length,
)
from jaxllm.generation.strategies.records import Records, first_records
from jaxllm.generation.strategies.sample import record, with_records
from jaxllm.generation.strategies.strategy import (
    NEVER,
    DecodeSettings,
    Prompt,
    Result,
    Strategy,
    note_nonfinite,
)
from jaxllm.generation.strategies.token_choice import draw_without_replacement
from jaxllm.models.outputs import DecodeOutput
from jaxllm.parallel.field_axes import axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BeamState:
    """What every beam strategy carries.

    The rows of a call go step by step together. Rows that each began at a time of their own, as the
    batch engine's do, have a `start_len`, `cur_len` and `step` each.
    """

    running: Hypotheses
    """Scores are sums of log-probabilities."""
    finished: Hypotheses
    """The best finished texts, in order; scores with the length penalty."""
    mask: Bool[Array, "B L"]
    """Which columns of the sequences hold real tokens."""
    start_len: Count
    cur_len: Count
    step: Count
    keys: Key[Array, " B"]
    first_nonfinite_step: Int[Array, " B"]
    tree: BeamCache
    scores: Float[Array, "T BN V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    logits: Float[Array, "T BN V"] | None = dataclasses.field(
        default=None, metadata=axes(None, "rows")
    )
    records: Records | None = dataclasses.field(default=None, metadata=axes(None, "rows"))
    """Of all running beams, each a row."""

    @property
    def cache(self) -> Cache:
        return self.tree.cache

    def replace(self, **changes: Any) -> Any:
        return dataclasses.replace(self, **changes)


S = TypeVar("S", bound=BeamState)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beams(Strategy[S]):
    """Base of the beam strategies, which define `choose`; their open rows are those whose pool may
    still change."""

    length_penalty: Float[Array, ""] | Float[Array, " B"]
    beams: int = dataclasses.field(metadata={"static": True})
    returns: int = dataclasses.field(metadata={"static": True})
    early_stopping: bool | str = dataclasses.field(metadata={"static": True})

    streams: ClassVar[bool] = False

    def slots(self, new):
        return self.beams * new

    def choose(
        self,
        state: S,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> S:
        """From the logits of all beams (with guidance, of both contexts) to the next beams and the
        pool."""
        raise NotImplementedError

    def first(
        self, prompt: Prompt, cache: Cache, room: int, firsts: Bool[Array, " N"]
    ) -> dict[str, Any]:
        """The fields of a state before the first choice. All beams hold the same text so far, so
        that of each set of equals one alone may be chosen from, the one marked in `firsts`."""
        batch = prompt.mask.shape[0]
        return {
            "running": Hypotheses.start(prompt, self.beams, room, jnp.where(firsts, 0.0, WORST)),
            "finished": Hypotheses.start(prompt, self.beams, room, jnp.full((self.beams,), WORST)),
            "mask": jnp.asarray(prompt.mask),
            "start_len": jnp.asarray(prompt.start_len),
            "cur_len": jnp.asarray(prompt.start_len),
            "step": jnp.zeros_like(prompt.start_len, jnp.int32),
            "keys": prompt.keys,
            "first_nonfinite_step": jnp.full((batch,), NEVER, jnp.int32),
            "tree": BeamCache.start(cache, batch, self.beams),
        }

    def choose_first(self, state: S, read: DecodeOutput, settings: DecodeSettings, room: int) -> S:
        width = read.cache.capacity - (self.beams - 1) * room
        kept = first_records(read, self.beams, room, width=width, **settings.decode_options)
        state = state.replace(records=kept)
        both = (read.logits, read.unconditional_logits)
        logits, other = jax.tree.map(lambda x: jnp.repeat(x[:, 0], self.beams, axis=0), both)
        return self.choose(with_records(state, logits, settings, room), logits, other, settings)

    def step(self, model, state, settings):
        newest = column(state.running.sequences, state.cur_len - 1)
        read, tree = state.tree.read(model, newest, **settings.decode_options)
        if state.records is not None:
            kept = state.records.write_branches(read, state.step, tree.columns)
            state = state.replace(records=kept)
        both = (read.logits, read.unconditional_logits)
        logits, other = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]), both)
        return self.choose(state.replace(tree=tree), logits, other, settings)

    def ranked(self, state: S) -> Hypotheses:
        """Sequences to return, the best first."""
        return state.finished

    def best(self, state: S) -> Hypotheses:
        """Those that are returned."""
        return jax.tree.map(lambda x: x[:, : self.returns], self.ranked(state))

    def finish(self, state, settings):
        best = self.best(state)
        return Result(
            sequences=best.sequences.reshape(-1, best.sequences.shape[2]),
            length=result_length(best.origin, state.start_len),
            steps=state.step,
            first_nonfinite_step=state.first_nonfinite_step,
            scores=state.scores,
            logits=state.logits,
            sequences_scores=best.scores.reshape(-1),
            beam_indices=global_indices(best.origin, self.beams),
            records=state.records,
        )

    def leave(self, state):
        return _leave(self, state)


@jax.jit
def _leave(strategy: Beams[Any], state: BeamState) -> tuple[Cache, Array, Array]:
    best = strategy.best(state)
    lengths = state.start_len + jnp.sum(best.origin >= 0, axis=2)
    written = jnp.arange(state.mask.shape[1]) < lengths[..., None]
    mask = (state.mask[:, None] & written).reshape(-1, state.mask.shape[1])
    sequences = best.sequences.reshape(mask.shape)
    return state.tree.texts(best.origin), sequences, mask


def note_step(
    state: Any,
    live: Bool[Array, " B"],
    logits: Float[Array, "BN V"],
    scores: Float[Array, "BN V"],
    settings: DecodeSettings,
) -> Any:
    """Keeps the records of a step, and notes rows without finite logits."""
    first_nonfinite_step = state.first_nonfinite_step
    if not settings.allow_nonfinite:
        rows = (live.shape[0], -1)
        first_nonfinite_step = note_nonfinite(
            first_nonfinite_step, state.step, live, logits.reshape(rows), scores.reshape(rows)
        )
    return state.replace(
        scores=record(state.scores, scores, state.step),
        logits=record(state.logits, logits, state.step),
        first_nonfinite_step=first_nonfinite_step,
    )


def note_choice(state: Any, running: Hypotheses, parents: Int[Array, "B N"], **changes: Any) -> Any:
    """The state with its next beams, each of which continues one of `parents`."""
    return state.replace(
        running=running,
        tree=state.tree.keep(parents),
        mask=grown(state),
        cur_len=state.cur_len + 1,
        step=state.step + 1,
        **changes,
    )


def grown(state: BeamState) -> Bool[Array, "B L"]:
    """`mask` with the next column."""
    return state.mask | (jnp.arange(state.mask.shape[1]) == state.cur_len[..., None])


@dataclasses.dataclass(frozen=True)
class Candidates:
    """The K best continuations of a row's beams, best first (or in the order they were drawn)."""

    value: Float[Array, "B K"]
    """Sums of log-probabilities."""
    beam: Int[Array, "B K"]
    token: Int[Array, "B K"]
    ends: Bool[Array, "B K"]
    spare: Bool[Array, " K"] | Bool[Array, "B K"]
    """Beyond the number that is wanted."""


def candidates(
    total: Float[Array, "B N V"],
    state: BeamState,
    settings: DecodeSettings,
    *,
    sampling: bool = False,
) -> Candidates:
    """The best continuations of all beams of each row, or a draw among them.

    As many as leave N that do not end, even if every beam ends with every end token. There is room
    for as many end tokens as the table has places; what lies beyond those in use is `spare`.
    """
    batch, beams, vocab = total.shape
    flat = total.reshape(batch, -1)
    places = min(max(2, 1 + settings.eos.shape[-1]), vocab) * beams
    wanted = jnp.maximum(2, 1 + jnp.sum(settings.eos >= 0, axis=-1)) * beams
    if sampling:
        step = jnp.broadcast_to(state.step, state.keys.shape)
        keys = jax.vmap(jax.random.fold_in)(state.keys, step)
        value, index = draw_without_replacement(keys, flat, places, wanted, worst=WORST)
    else:
        value, index = largest(flat, places)
    token = index % vocab
    return Candidates(
        value=value,
        beam=index // vocab,
        token=token,
        ends=jnp.any(token[..., None] == settings.eos[..., None, :], axis=-1),
        spare=jnp.arange(places) >= wanted[..., None],
    )
