"""Contrastive search: prefers likely tokens whose hidden state differs from the context's."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import KV, Cache, per_head, write_columns
from jaxllm.generation.strategies.beam_state import take_per_row
from jaxllm.generation.strategies.records import initial_records
from jaxllm.generation.strategies.sample import (
    SampleState,
    append,
    initial_sample_state,
    processed_scores,
    sample_result,
    with_score_buffers,
)
from jaxllm.generation.strategies.strategy import (
    RUNNING,
    DecodeSettings,
    PrefillInputs,
    Result,
    Strategy,
    unconditional,
)
from jaxllm.models.decoder import Decoder
from jaxllm.models.outputs import DecodeOutput


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ContrastiveState(SampleState):
    """State of contrastive search. The newest token is in the cache already, and the logits of the
    next one are known."""

    next_logits: Float[Array, "B V"]
    """Logits of the token to choose."""
    next_unconditional: Float[Array, "B V"] | None
    """The same for the unconditional contexts; None without guidance."""
    directions: Float[Array, "B S D"]
    """Last hidden states as unit vectors, indexed by cache slot."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BestCandidate:
    """The best candidate of each row so far."""

    score: Float[Array, " B"]
    token: Int[Array, " B"]
    out: DecodeOutput
    """The model's output for it, one column, without the cache."""
    column: tuple[KV, ...]
    """Its keys and values: `Cache.layers` of one slot."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Contrastive(Strategy[ContrastiveState]):
    """Contrastive search, as in transformers 4.55.4 (`_contrastive_search`): Su et al., "A
    Contrastive Framework for Neural Text Generation", https://arxiv.org/abs/2202.06417.

    The model runs the k best tokens in one call, as alternatives at the next position, or one by
    one (`low_memory`). A candidate's score is ``(1 - alpha) * p - alpha * s``, with s the largest
    cosine between its last hidden state and those of the context. The model's output for the chosen
    candidate is kept, so that a token costs one call of width k, or k calls.
    """

    alpha: Float[Array, ""]
    """`penalty_alpha`: weight of the similarity."""
    k: int = dataclasses.field(metadata={"static": True})
    """`top_k`: candidates for each token."""
    low_memory: bool = dataclasses.field(default=False, metadata={"static": True})
    """The model runs candidates one by one, in one slot of the cache."""
    can_continue = False

    @property
    def draws(self) -> bool:
        return False

    def cache_slots(self, new_tokens: int) -> int:
        return new_tokens if self.low_memory else new_tokens + self.k - 1

    def init(
        self,
        model: Decoder,
        inputs: PrefillInputs,
        out: DecodeOutput,
        settings: DecodeSettings,
        new_token_bucket: int,
    ) -> ContrastiveState:
        logits = out.logits[:, 0]
        state = initial_sample_state(inputs, out.cache, 1)
        state = with_score_buffers(state, logits, settings, new_token_bucket)
        # One record per new token, the last one too: it was run as a candidate before its choice.
        records = initial_records(out, 1, new_token_bucket + 1, **settings.decode_options)
        context = unit_vectors(out.last_hidden_state)
        free = out.cache.capacity - context.shape[1]
        # The first token is chosen in the loop, too: its candidates need the model.
        return ContrastiveState(
            **vars(state.replace(records=records)),
            next_logits=logits,
            next_unconditional=unconditional(out),
            directions=jnp.pad(context, ((0, 0), (0, free), (0, 0))),
        )

    def step(
        self, model: Decoder, state: ContrastiveState, settings: DecodeSettings
    ) -> ContrastiveState:
        scores = processed_scores(state, state.next_logits, state.next_unconditional, settings)
        top_scores, tokens = jax.lax.top_k(scores, self.k)
        tokens = tokens.astype(jnp.int32)
        probability = jnp.exp(top_scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True))
        probability = jnp.where(jnp.isneginf(top_scores), -jnp.inf, probability)
        choose = self.choose_one_by_one if self.low_memory else self.choose_in_parallel
        best, cache = choose(model, state, tokens, probability, settings.decode_options)

        out, slot = best.out, state.cache.length
        after = append(state, best.token, state.next_logits, scores, settings)
        if state.records is not None:
            columns = jnp.minimum(jnp.arange(cache.capacity, dtype=jnp.int32), slot)
            after = after.replace(
                records=state.records.write_branches(out, state.step + 1, columns)
            )
        return after.replace(
            next_logits=out.logits[:, 0],
            next_unconditional=unconditional(out),
            directions=write_columns(state.directions, unit_vectors(out.last_hidden_state), slot),
            cache=cache.replace(
                layers=jax.tree.map(
                    lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, slot, x.ndim - 2),
                    cache.layers,
                    best.column,
                )
            ),
        )

    def choose_in_parallel(
        self,
        model: Decoder,
        state: ContrastiveState,
        tokens: Int[Array, "B k"],
        probability: Float[Array, "B k"],
        options: dict[str, Any],
    ) -> tuple[BestCandidate, Cache]:
        """The best candidate of each row, and the cache with its next slot reserved for it."""
        context = state.cache
        out = model.decode(
            tokens,
            jnp.broadcast_to((state.reason == RUNNING)[:, None], tokens.shape),
            context,
            branches=alternatives(context, *tokens.shape),
            **options,
        )
        scores = self.candidate_scores(state, probability, out)
        best = jnp.argmax(scores, axis=-1)

        def slot_of_best(x: Shaped[Array, "*BK S H"]) -> Shaped[Array, "*BK 1 H"]:
            slot = context.length + per_head(for_all_rows(best.astype(jnp.int32), context), x)
            return jnp.take_along_axis(x, jnp.expand_dims(slot, (-2, -1)), axis=-2)

        cache = out.cache.replace(
            mask=out.cache.mask & (jnp.arange(context.capacity) <= context.length)[None],
            length=context.length + 1,
        )
        candidate = BestCandidate(
            score=take_per_row(scores, best[:, None])[:, 0],
            token=take_per_row(tokens, best[:, None])[:, 0],
            out=take_output(out.replace(cache=None), best),
            column=jax.tree.map(slot_of_best, cache.layers),
        )
        return candidate, cache

    def choose_one_by_one(
        self,
        model: Decoder,
        state: ContrastiveState,
        tokens: Int[Array, "B k"],
        probability: Float[Array, "B k"],
        options: dict[str, Any],
    ) -> tuple[BestCandidate, Cache]:
        """Same as `choose_in_parallel`, but runs the candidates one by one in one slot."""
        context, unfinished = state.cache, (state.reason == RUNNING)[:, None]

        def candidate(i: Int[Array, ""], layers: tuple[KV, ...]) -> tuple[BestCandidate, Cache]:
            token, p = (jax.lax.dynamic_slice_in_dim(x, i, 1, 1) for x in (tokens, probability))
            out = model.decode(token, unfinished, context.replace(layers=layers), **options)
            column = jax.tree.map(
                lambda x: jax.lax.dynamic_slice_in_dim(x, context.length, 1, axis=x.ndim - 2),
                out.cache.layers,
            )
            score = self.candidate_scores(state, p, out)[:, 0]
            return BestCandidate(score, token[:, 0], out.replace(cache=None), column), out.cache

        def better(
            i: Int[Array, ""], carry: tuple[BestCandidate, Cache]
        ) -> tuple[BestCandidate, Cache]:
            old, cache = carry
            new, cache = candidate(i, cache.layers)
            # As argmax: the first of equal values is kept, and NaN, which is reported, wins.
            wins = (new.score > old.score) | (jnp.isnan(new.score) & ~jnp.isnan(old.score))

            def row(a: Array, b: Array) -> Array:
                return jnp.where(wins.reshape(-1, *(1,) * (a.ndim - 1)), a, b)

            def row_and_head(a: Array, b: Array) -> Array:
                index = per_head(for_all_rows(wins, context), a)
                return jnp.where(jnp.expand_dims(index, (-2, -1)), a, b)

            columns = jax.tree.map(row_and_head, new.column, old.column)
            rest = (dataclasses.replace(new, column=None), dataclasses.replace(old, column=None))
            best = dataclasses.replace(jax.tree.map(row, *rest), column=columns)
            return best, cache

        shapes = jax.eval_shape(candidate, 0, context.layers)
        empty, cache = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        lowest = jnp.full_like(empty.score, -jnp.inf)
        start = dataclasses.replace(empty, score=lowest, token=tokens[:, 0])
        cache = dataclasses.replace(cache, layers=context.layers, cross=context.cross)
        return jax.lax.fori_loop(0, self.k, better, (start, cache))

    def candidate_scores(
        self, state: ContrastiveState, probability: Float[Array, "B n"], out: DecodeOutput
    ) -> Float[Array, "B n"]:
        """Scores of the candidates, from the model's output for them."""
        real = state.cache.mask[: probability.shape[0]]
        similarity = max_cosine(real, state.directions, unit_vectors(out.last_hidden_state))
        score = (1 - self.alpha) * probability - self.alpha * similarity
        # A forbidden token is never chosen, however low its similarity.
        return jnp.where(jnp.isneginf(probability), -jnp.inf, score)

    def finish(self, state: ContrastiveState, settings: DecodeSettings) -> Result:
        return sample_result(state)


def alternatives(cache: Cache, batch: int, k: int) -> Branches:
    """Branches for k candidates at one column: each attends to the context and itself."""
    slots = jnp.arange(cache.capacity, dtype=jnp.int32)
    own_slots = cache.length + jnp.arange(k, dtype=jnp.int32)
    seen = (slots < cache.length)[None] | (slots[None] == own_slots[:, None])
    return Branches(
        seen=jnp.broadcast_to(seen, (batch, k, cache.capacity)),
        columns=jnp.minimum(slots, cache.length),
    )


def for_all_rows(x: Shaped[Array, " B"], cache: Cache) -> Shaped[Array, " R"]:
    """Repeats values of B rows for all rows of the cache: with guidance the unconditional rows
    follow the others, and continue with the same tokens."""
    return jnp.tile(x, cache.mask.shape[0] // x.shape[0])


def take_output(out: DecodeOutput, index: Int[Array, " B"]) -> DecodeOutput:
    """Selects the output for candidate index[b], of k, of each row b."""

    def one(x: Array) -> Array:
        axis = 1 if x.ndim == 3 else 2  # [B, k, D], [B, heads, k, S]
        return take_per_row(x.swapaxes(1, axis), index[:, None]).swapaxes(1, axis)

    return jax.tree.map(one, out)


def unit_vectors(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Normalises to float32 unit vectors; zero vectors stay zero."""
    x = x.astype(jnp.float32)
    norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
    return x / jnp.where(norm > 0, norm, 1.0)


def max_cosine(
    real: Bool[Array, "B S"],
    context: Float[Array, "B S D"],
    candidates: Float[Array, "B k D"],
) -> Float[Array, "B k"]:
    """The largest cosine between each candidate and the real columns of the context.

    >>> import jax.numpy as jnp
    >>> context = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    >>> max_cosine(jnp.array([[True, False]]), context, jnp.array([[[0.6, 0.8]]])).tolist()
    [[0.6000000238418579]]
    """
    cosines = jnp.einsum("bkd,bsd->bks", candidates, context, precision=jax.lax.Precision.HIGHEST)
    return jnp.max(jnp.where(real[:, None], cosines, -jnp.inf), axis=-1)
