"""Constraints: phrases that a sequence must contain, as an automaton in arrays for compiled loops.

Each constraint is a trie of one word (a phrase), or of several of which one suffices (a
disjunction). Progress through a list of constraints follows transformers' ConstraintListState
(4.56): one constraint is in progress at a time; a token that does not continue it moves it to the
end of the queue, and is not tried as the start of a phrase.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.settings.field_checks import BadValueError, words

SMALLEST_TABLE = 8
"""Smallest bucket of edges and of constraints."""
NO_NODE = -1
"""Value of `ConstraintProgress.node` while no constraint is in progress."""


@dataclasses.dataclass(frozen=True, init=False)
class PhrasalConstraint:
    """Requires the tokens of one phrase, in order and without gaps.

    >>> PhrasalConstraint([5, 6]).words
    ((5, 6),)
    """

    words: tuple[tuple[int, ...], ...]

    def __init__(self, token_ids: Sequence[int]):
        object.__setattr__(self, "words", _words("PhrasalConstraint", [token_ids]))


@dataclasses.dataclass(frozen=True, init=False)
class DisjunctiveConstraint:
    """Requires one of several phrases, none of which may be a prefix of another.

    >>> DisjunctiveConstraint([[5], [6, 7]]).words
    ((5,), (6, 7))
    """

    words: tuple[tuple[int, ...], ...]

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]):
        alternatives = _words("DisjunctiveConstraint", nested_token_ids)
        for word in alternatives:
            if any(other is not word and other[: len(word)] == word for other in alternatives):
                raise InputError(
                    f"DisjunctiveConstraint: {list(word)} begins another of its words, which "
                    "could then never be completed; drop one of the two"
                )
        object.__setattr__(self, "words", alternatives)


Constraint = PhrasalConstraint | DisjunctiveConstraint


def _words(owner: str, value: object) -> tuple[tuple[int, ...], ...]:
    try:
        return words(value)
    except BadValueError as bad:
        raise InputError(f"{owner}: must hold {bad}, but holds {quoted(value)}") from None


def force_words(value: object) -> tuple[Constraint, ...]:
    """Constraints of `force_words_ids`; for an item that is a list of phrases one of them suffices.

    >>> force_words([[5, 6], [[7], [8, 9]]])[1].words
    ((7,), (8, 9))
    """
    if isinstance(value, str) or not isinstance(value, Iterable) or not list(value):
        raise InputError(
            "`force_words_ids` must be a non-empty list of lists of token ids, but is "
            f"{quoted(value)}"
        )
    return tuple(_forced(item) for item in value)


def _forced(item: Any) -> Constraint:
    nested = isinstance(item, Sequence) and item and isinstance(item[0], Sequence | np.ndarray)
    try:
        return DisjunctiveConstraint(item) if nested else PhrasalConstraint(item)
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
        continues = tries.source == self.node[..., None]
        starts = tries.from_root & ~jnp.take(self.met, tries.owner, axis=-1)
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
        return jnp.sum(self.met & tries.real, axis=-1) * longest + partial

    def take_edge(self, tries: Tries, edge: Int[Array, " *rows"]) -> ConstraintProgress:
        """Progress after each beam takes an edge, one of its `edges`."""
        owner, leaf = tries.owner[edge], tries.to_leaf[edge]
        mine = jnp.arange(self.met.shape[-1]) == owner[..., None]
        return ConstraintProgress(
            met=self.met | (mine & leaf[..., None]),
            turn=self.turn,
            node=jnp.where(leaf, NO_NODE, tries.target[edge]),
            owner=owner,
            depth=tries.depth[edge],
        )

    def add(self, tries: Tries, token: Int[Array, " *rows"]) -> ConstraintProgress:
        """Progress after one more token of each beam."""
        fits = self.edges(tries) & (tries.token == token[..., None])
        last = jnp.iinfo(jnp.int32).max
        edge = jnp.argmin(jnp.where(fits, self.queue(tries), last), axis=-1)
        advanced = self.take_edge(tries, edge)
        # A constraint that is not continued goes to the end of the queue.
        mine = jnp.arange(self.met.shape[-1]) == self.owner[..., None]
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


def _where(condition: Array, a: Array, b: Array) -> Array:
    return jnp.where(condition.reshape(*condition.shape, *(1,) * (a.ndim - condition.ndim)), a, b)
