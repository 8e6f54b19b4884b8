"""Constrained beam search (force_words_ids), as in transformers 4.56.

Constraints are phrases that a sequence must contain, as an automaton in arrays for compiled loops.
Each constraint is a trie of one word (a phrase), or of several of which one suffices (a
disjunction). Progress through a list of constraints follows transformers' ConstraintListState
(4.56): one constraint is in progress at a time; a token that does not continue it moves it to the
end of the queue, and is not tried as the start of a phrase.

Besides the best continuations, each step considers every token that advances a beam in its
constraints. The candidates are sorted into banks by their progress, and the next beams are taken
from the banks in turn, so that a less likely sequence that fulfils more is kept (as in Post and
Vilar 2018, arXiv:1804.06609).

Three bugs of transformers are not reproduced: the words of a disjunction in progress share one
list, so that the second is judged wrongly; the first end token replaces the one that was chosen;
the prompt's padding counts as tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import bucket, checked_by, one_word, words
from jaxllm.generation.strategies.beam_search import BeamStrategy
from jaxllm.generation.strategies.beam_state import (
    WORST,
    BeamState,
    Hypotheses,
    advance,
    beam_reasons,
    beam_scores,
    best_candidates,
    end_rows,
    largest,
    length_normalized,
    take_per_row,
)
from jaxllm.generation.strategies.sample import record_step
from jaxllm.generation.strategies.strategy import DecodeSettings, PrefillInputs

SMALLEST_TABLE = 8
"""Smallest bucket of edges and of constraints."""
NO_NODE = -1
"""Value of `ConstraintProgress.node` while no constraint is in progress."""
FORBIDDEN = float(np.finfo(np.float32).min)
"""Score in place of minus infinity of a continuation, as `remove_invalid_values` has it."""
BANK_WEIGHT = 100.0
"""Weight of a bank against a log-probability when candidates are sorted."""


@dataclasses.dataclass(frozen=True, init=False)
class PhrasalConstraint:
    """Requires the tokens of one phrase, in order and without gaps.

    >>> PhrasalConstraint([5, 6]).words
    ((5, 6),)
    """

    words: tuple[tuple[int, ...], ...]

    def __init__(self, token_ids: Sequence[int]):
        phrase = checked_by("PhrasalConstraint", "token_ids", one_word, token_ids)
        object.__setattr__(self, "words", (phrase,))


@dataclasses.dataclass(frozen=True, init=False)
class DisjunctiveConstraint:
    """Requires one of several phrases, none of which may be a prefix of another.

    >>> DisjunctiveConstraint([[5], [6, 7]]).words
    ((5,), (6, 7))
    """

    words: tuple[tuple[int, ...], ...]

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]):
        alternatives = checked_by(
            "DisjunctiveConstraint", "nested_token_ids", words, nested_token_ids
        )
        for word in alternatives:
            if any(other is not word and other[: len(word)] == word for other in alternatives):
                raise InputError(
                    f"DisjunctiveConstraint: {list(word)} begins another of its words, which "
                    "could then never be completed; drop one of the two"
                )
        object.__setattr__(self, "words", alternatives)


Constraint = PhrasalConstraint | DisjunctiveConstraint


def force_words(phrases: Sequence[Any]) -> tuple[Constraint, ...]:
    """Constraints of `force_words_ids`; for an item that is a list of phrases one of them suffices.

    >>> force_words([[5, 6], [[7], [8, 9]]])[1].words
    ((7,), (8, 9))
    """
    try:
        return tuple(
            PhrasalConstraint(item) if isinstance(item[0], int) else DisjunctiveConstraint(item)
            for item in phrases
        )
    except InputError as error:
        raise InputError(f"`force_words_ids`: {error}") from None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tries:
    """Edge tables of all tries, and sizes of the constraints. Traced, and padded to buckets."""

    source: Int[Array, " E"]
    """Node at the beginning of an edge; -2 in padding of the table."""
    token: Int[Array, " E"]
    """Token of an edge; -1 in padding."""
    target: Int[Array, " E"]
    """Node at the end of an edge; -1 in padding."""
    owner: Int[Array, " E"]
    """Constraint of an edge."""
    from_root: Bool[Array, " E"]
    """True if the edge is the first of a word."""
    to_leaf: Bool[Array, " E"]
    """True if the edge completes a word."""
    depth: Int[Array, " E"]
    """Tokens matched after the edge."""
    height: Int[Array, " C"]
    """Tokens of the constraint's longest word."""
    real: Bool[Array, " C"]
    """False in padding of the table."""

    @staticmethod
    def of(constraints: Sequence[Constraint]) -> Tries:
        """Tables for a list of constraints."""
        edges, nodes = [], 0
        for owner, constraint in enumerate(constraints):
            root, nodes, targets = nodes, nodes + 1, {}
            for word in constraint.words:
                node = root
                for depth, token in enumerate(word, start=1):
                    if (node, token) not in targets:
                        targets[node, token] = nodes
                        edges.append((node, token, nodes, owner, node == root, depth))
                        nodes += 1
                    node = targets[node, token]
        inner = {edge[0] for edge in edges}
        size = bucket(len(edges), SMALLEST_TABLE)
        columns = [np.array(column) for column in zip(*edges, strict=True)]

        def table(values: np.ndarray, fill: int) -> np.ndarray:
            return np.pad(values, (0, size - len(values)), constant_values=fill)

        count = bucket(len(constraints), SMALLEST_TABLE)
        height = np.ones(count, np.int32)
        height[: len(constraints)] = [max(map(len, c.words)) for c in constraints]
        leaves = np.array([target not in inner for target in columns[2]])
        tables: dict[str, Any] = {
            "source": table(columns[0].astype(np.int32), -2),
            "token": table(columns[1].astype(np.int32), -1),
            "target": table(columns[2].astype(np.int32), NO_NODE),
            "owner": table(columns[3].astype(np.int32), 0),
            "from_root": table(columns[4], False),
            "to_leaf": table(leaves, False),
            "depth": table(columns[5].astype(np.int32), 0),
            "height": height,
            "real": np.arange(count) < len(constraints),
        }
        return Tries(**tables)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ConstraintProgress:
    """Progress of each beam in the list of constraints."""

    met: Bool[Array, "*rows C"]
    """Completed constraints; True in padding of the table."""
    turn: Int[Array, "*rows C"]
    """Order in which open constraints are tried."""
    node: Int[Array, " *rows"]
    """The node reached in the constraint in progress, or `NO_NODE`."""
    owner: Int[Array, " *rows"]
    """The constraint in progress."""
    depth: Int[Array, " *rows"]
    """Tokens matched in it."""

    @staticmethod
    def start(tries: Tries, *rows: int) -> ConstraintProgress:
        count = tries.real.shape[0]
        return ConstraintProgress(
            met=jnp.broadcast_to(~tries.real, (*rows, count)),
            turn=jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), (*rows, count)),
            node=jnp.full(rows, NO_NODE, jnp.int32),
            owner=jnp.zeros(rows, jnp.int32),
            depth=jnp.zeros(rows, jnp.int32),
        )

    @property
    def in_progress(self) -> Bool[Array, " *rows"]:
        """True while a beam is within a constraint."""
        return self.node != NO_NODE

    @property
    def complete(self) -> Bool[Array, " *rows"]:
        return self.met.all(axis=-1)

    def edges(self, tries: Tries) -> Bool[Array, "*rows E"]:
        """Edges that would advance each beam."""
        continues = _beside(self.node, tries.source) == self.node[..., None]
        is_met = jnp.take(self.met, tries.owner, axis=-1)
        starts = _beside(self.node, tries.from_root) & ~is_met
        return jnp.where(self.in_progress[..., None], continues, starts)

    def queue(self, tries: Tries) -> Int[Array, "*rows E"]:
        """The turn of each edge's constraint."""
        return jnp.take(self.turn, tries.owner, axis=-1)

    def bank(self, tries: Tries) -> Int[Array, " *rows"]:
        """The bank of each beam: h for each completed constraint, and h less the missing tokens for
        the one in progress, where h is the height of the tallest constraint."""
        longest = jnp.max(jnp.where(tries.real, tries.height, 0))
        missing = jnp.take(tries.height, self.owner) - self.depth
        partial = jnp.where(self.in_progress, longest - missing, 0)
        real = _beside(self.owner, tries.real)
        return jnp.sum(self.met & real, axis=-1) * longest + partial

    def take_edge(self, tries: Tries, edge: Int[Array, " *rows"]) -> ConstraintProgress:
        """Progress after each beam takes an edge, one of its `edges`."""
        owner, leaf = tries.owner[edge], tries.to_leaf[edge]
        mine = jax.nn.one_hot(owner, self.met.shape[-1], dtype=bool)
        return ConstraintProgress(
            met=self.met | (mine & leaf[..., None]),
            turn=self.turn,
            node=jnp.where(leaf, NO_NODE, tries.target[edge]),
            owner=owner,
            depth=tries.depth[edge],
        )

    def add(self, tries: Tries, token: Int[Array, " *rows"]) -> ConstraintProgress:
        """Progress after one more token of each beam."""
        fits = self.edges(tries) & (_beside(token, tries.token) == token[..., None])
        last = jnp.iinfo(jnp.int32).max
        edge = jnp.argmin(jnp.where(fits, self.queue(tries), last), axis=-1)
        advanced = self.take_edge(tries, edge)
        # A constraint that is not continued goes to the end of the queue.
        mine = jax.nn.one_hot(self.owner, self.met.shape[-1], dtype=bool)
        back = jnp.max(self.turn, axis=-1, keepdims=True) + 1
        interrupted = self.in_progress[..., None] & mine
        reset = dataclasses.replace(
            self,
            turn=jnp.where(interrupted, back, self.turn),
            node=jnp.full_like(self.node, NO_NODE),
        )
        moves = fits.any(axis=-1) & ~self.complete
        otherwise = jax.tree.map(lambda a, b: _where(self.complete, a, b), self, reset)
        return jax.tree.map(lambda a, b: _where(moves, a, b), advanced, otherwise)


def _beside(rows: Array, table: Array) -> Array:
    """A table that broadcasts against rows: its own axes are the last ones."""
    return jnp.expand_dims(table, tuple(range(rows.ndim)))


def _where(condition: Array, a: Array, b: Array) -> Array:
    return jnp.where(condition.reshape(*condition.shape, *(1,) * (a.ndim - condition.ndim)), a, b)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstrainedState(BeamState):
    """State of constrained beam search."""

    progress: ConstraintProgress
    """Progress of every running beam in its constraints, [B, N, ...]."""
    pool_is_final: Bool[Array, " B"]
    """True if no running beam can enter the pool any more; none of them is returned then."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NextBeams:
    """M continuations of a row's beams."""

    value: Float[Array, "B M"]
    """Sums of log-probabilities."""
    beam: Int[Array, "B M"]
    """The beam that is continued."""
    token: Int[Array, "B M"]
    progress: ConstraintProgress
    """Progress after the token, [B, M, ...]."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ConstrainedBeamSearch(BeamStrategy[ConstrainedState]):
    """Beam search for sequences that contain given phrases."""

    tries: Tries
    """Tries of the phrases."""

    def initial_state(
        self, inputs: PrefillInputs, cache: Cache, new_token_bucket: int
    ) -> ConstrainedState:
        return ConstrainedState(
            **self.initial_fields(inputs, cache, new_token_bucket, jnp.arange(self.num_beams) == 0),
            progress=self.prompt_progress(inputs),
            pool_is_final=jnp.zeros((inputs.mask.shape[0],), bool),
        )

    def prompt_progress(self, inputs: PrefillInputs) -> ConstraintProgress:
        """Progress that the prompt makes, [B, N, ...]: a phrase in it counts as fulfilled."""
        batch = inputs.sequences.shape[0]

        def add(
            progress: ConstraintProgress, column: tuple[Array, Array]
        ) -> tuple[ConstraintProgress, None]:
            token, real = column
            new = progress.add(self.tries, token)
            is_real = jax.tree.map(lambda x: real.reshape(-1, *(1,) * (x.ndim - 1)), new)
            return jax.tree.map(jnp.where, is_real, new, progress), None

        columns = jnp.asarray(inputs.sequences).T, jnp.asarray(inputs.mask).T
        progress, _ = jax.lax.scan(add, ConstraintProgress.start(self.tries, batch), columns)
        return jax.tree.map(lambda x: jnp.repeat(x[:, None], self.num_beams, axis=1), progress)

    def choose(
        self,
        state: ConstrainedState,
        logits: Float[Array, "BN V"],
        unconditional: Float[Array, "BN V"] | None,
        settings: DecodeSettings,
    ) -> ConstrainedState:
        scores = beam_scores(state, state.running, logits, unconditional, settings)
        # As in transformers, output_scores of constrained beams include the beams' sums.
        total = scores.reshape(*state.running.scores.shape, -1) + state.running.scores[..., None]
        sums = total.reshape(logits.shape)
        state = record_step(state, logits, sums, settings)
        # A constraint may leave only forbidden tokens, if `forced_eos_token_id` ends a sequence
        # before it is fulfilled. They are chosen then, as in transformers.
        total = jnp.maximum(total, FORBIDDEN)
        candidates = best_candidates(total, state, settings)
        # Only sequences that fulfil all constraints enter the pool.
        complete = take_per_row(state.progress.complete, candidates.beam)
        complete &= ~state.pool_is_final[:, None]
        enters = (candidates.finishes & complete)[:, : self.num_beams]
        finished, final = self.extend_pool(
            state, state.running, state.finished, candidates, enters, settings
        )
        value = jnp.where(candidates.finishes, -jnp.inf, candidates.value)
        running = dataclasses.replace(candidates, value=value).next_beams(self.num_beams)
        best = NextBeams(*running, progress=state.progress)
        best = self.merge_by_bank(state, total, best)
        reason = beam_reasons(best.token, state, settings)
        running = state.running.extend(best.beam, best.token, best.value, state, reason)
        final |= state.pool_is_final
        state = advance(
            state,
            running,
            best.beam,
            finished=finished,
            progress=best.progress,
            pool_is_final=final,
        )
        return end_rows(state, final, settings)

    def merge_by_bank(
        self, state: ConstrainedState, total: Float[Array, "B N V"], best: NextBeams
    ) -> NextBeams:
        """The next beams, from the best continuations and those that advance a constraint.

        Args:
            total: sums of log-probabilities, for each beam and next token.
            best: the best continuations that do not end; their `progress` is not read.
        """
        (batch, beams, _), tries = total.shape, self.tries
        progress = jax.tree.map(lambda x: take_per_row(x, best.beam), state.progress)
        best = dataclasses.replace(best, progress=progress.add(tries, best.token))

        # One candidate for each beam and edge of the tries.
        edges = tries.token.shape[0]
        flat = (batch, beams * edges)
        edge = jnp.broadcast_to(jnp.arange(edges), (batch, beams, edges))
        token = jnp.broadcast_to(tries.token, edge.shape)
        is_candidate = self.new_edges(state, best, edge, token, total.shape[2])
        spread = jax.tree.map(
            lambda x: jnp.broadcast_to(x[:, :, None], (*x.shape[:2], edges, *x.shape[2:])).reshape(
                *flat, *x.shape[2:]
            ),
            state.progress,
        )
        beam = jnp.broadcast_to(jnp.arange(beams)[:, None], (beams, edges)).reshape(-1)
        forced = NextBeams(
            value=jnp.take_along_axis(total, jnp.maximum(token, 0), axis=2).reshape(flat),
            beam=jnp.broadcast_to(beam, flat),
            token=token.reshape(flat),
            progress=spread.take_edge(tries, edge.reshape(flat)),
        )
        candidates = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), best, forced)
        valid = jnp.concatenate(
            [jnp.ones((batch, beams), bool), is_candidate.reshape(flat)], axis=1
        )
        order = order_by_bank(candidates.progress.bank(tries), candidates.value, valid)[:, :beams]
        # Without a candidate of the constraints the best continuations stay in their own order.
        own_order = jnp.broadcast_to(jnp.arange(beams), order.shape)
        order = jnp.where(is_candidate.any(axis=(1, 2))[:, None], order, own_order)
        return jax.tree.map(lambda x: take_per_row(x, order), candidates)

    def new_edges(
        self,
        state: ConstrainedState,
        best: NextBeams,
        edge: Int[Array, "B N E"],
        token: Int[Array, "B N E"],
        vocab_size: int,
    ) -> Bool[Array, "B N E"]:
        """True at edges that advance a beam to a new sequence, which neither an earlier edge, an
        equal earlier beam nor the best continuations propose."""
        batch, beams, edges = edge.shape
        advances = state.progress.edges(self.tries) & ~state.progress.complete[..., None]
        rank = state.progress.queue(self.tries) * edges + edge
        never = jnp.iinfo(jnp.int32).max
        rows = jnp.arange(batch)[:, None, None], jnp.arange(beams)[:, None]
        first = jnp.full((batch, beams, vocab_size), never, jnp.int32)
        first = first.at[*rows, token].min(jnp.where(advances, rank, never))
        advances &= first[*rows, token] == rank
        sequences = state.running.sequences
        are_equal = (sequences[:, :, None] == sequences[:, None]).all(axis=-1)
        advances &= (jnp.argmax(are_equal, axis=-1) == jnp.arange(beams)[None])[..., None]
        continued = take_per_row(are_equal.swapaxes(1, 2), best.beam).swapaxes(1, 2)[..., None, :]
        in_best = continued & (token[..., None] == best.token[:, None, None, :])
        return advances & ~in_best.any(axis=-1)

    def ranked(self, state: ConstrainedState) -> Hypotheses:
        """Finished and running sequences, best first.

        Running ones count if they fulfil all constraints; the others only if fewer than
        `num_return_sequences` do.
        """
        complete = state.progress.complete
        too_few = jnp.sum(complete, axis=1, keepdims=True) < self.num_return_sequences
        is_returned = (complete | too_few) & ~state.pool_is_final[:, None]
        length = state.cur_len - state.start_len
        scores = length_normalized(state.running.scores, length, self.length_penalty)
        every = state.finished.join(dataclasses.replace(state.running, scores=scores))
        # Sequences of forbidden tokens are below the empty places of the pool, but come first.
        in_pool = state.finished.scores > WORST
        is_candidate = jnp.concatenate([in_pool, is_returned], axis=1)
        order = jnp.where(is_candidate, jnp.maximum(every.scores, FORBIDDEN), -jnp.inf)
        return every.take(largest(order, self.num_beams)[1])


def order_by_bank(
    bank: Int[Array, "B M"], score: Float[Array, "B M"], valid: Bool[Array, "B M"]
) -> Int[Array, "B M"]:
    """Indices of candidates in the order of choice: the best of each bank, the highest bank first,
    then the second best of each bank, and so on.

    >>> import jax.numpy as jnp
    >>> bank = jnp.array([[0, 0, 1, 1]])
    >>> order_by_bank(bank, jnp.array([[-1.0, -2.0, -5.0, -4.0]]), bank >= 0).tolist()
    [[3, 0, 2, 1]]
    """
    key = jnp.where(valid, bank.astype(jnp.float32) * BANK_WEIGHT + score, -jnp.inf)
    order = jnp.argsort(key, axis=1, descending=True, stable=True)
    banks, places = take_per_row(bank, order), jnp.arange(bank.shape[1])[None]
    starts = jnp.concatenate([jnp.ones_like(banks[:, :1], bool), banks[:, 1:] != banks[:, :-1]], 1)
    run = jax.lax.cummax(jnp.where(starts, places, 0), axis=1)
    turn = jnp.where(take_per_row(valid, order), places - run, bank.shape[1])
    return take_per_row(order, jnp.argsort(turn, axis=1, stable=True))
