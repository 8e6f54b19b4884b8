"""Drafts from a network, one token at a time, in rows of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import Cache, put_columns
from jaxllm.generation.strategies.assisted.acceptance import Drafted
from jaxllm.generation.strategies.strategy import DecodeSettings, nonfinite, unconditional
from jaxllm.models.outputs import DecodeOutput

Choose = Callable[[Float[Array, "B V"], Int[Array, " B"]], Int[Array, " B"]]
"""From processed scores, and the column that each row's token will be in, to the tokens."""


class Text(NamedTuple):
    """The tokens of each row; with drafts, they follow from column `cur_len` on."""

    sequences: Int[Array, "B L"]
    mask: Bool[Array, "B L"]
    cur_len: Int[Array, " B"]

    def put(self, tokens: Int[Array, "B T"], real: Bool[Array, "B T"], place: Any = 0) -> Text:
        """With tokens written `place` columns beyond `cur_len`."""
        at = self.cur_len + place
        return self._replace(
            sequences=put_columns(self.sequences, tokens, at), mask=put_columns(self.mask, real, at)
        )


def each_sample(columns: Int[Array, ""] | Int[Array, " B"], rows: int) -> Int[Array, " rows"]:
    """A number of columns for each sample of each row."""
    columns = jnp.asarray(columns, jnp.int32).reshape(-1)
    return jnp.repeat(columns, rows // columns.shape[0])


class DraftingState(NamedTuple):
    """Carried by the loop over the tokens of one draft."""

    i: Int[Array, ""]
    """The token to propose; -1 while the cache still lacks an earlier one."""
    going: Bool[Array, " B"]
    text: Text
    cache: Cache
    drafted: Drafted


class Drafting(NamedTuple):
    """Tokens from a network, one at a time."""

    network: Any
    threshold: Float[Array, ""]
    choose: Choose
    prompt_len: Int[Array, ""]
    settings: DecodeSettings
    most: int
    keep_scores: bool

    def __call__(
        self,
        text: Text,
        cache: Cache,
        slot: Int[Array, " B"],
        limit: Int[Array, " B"],
    ) -> tuple[Drafted, Text, Cache]:
        """Drafts of up to `limit` tokens.

        Args:
            cache: the network's, each row up to its newest token, or to one before.
            slot: where the newest token belongs.

        Returns:
            The cache with the rows' columns written, its length and positions out of date.
        """
        batch, vocabulary = limit.shape[0], self.network.config.vocab_size
        going = limit > 0
        missing = slot - cache.length
        scores = None
        if self.keep_scores:
            scores = jnp.zeros((batch, self.most, vocabulary), jnp.float32)
        start = DraftingState(
            i=jnp.where(jnp.any(going & (missing > 0)), -1, 0).astype(jnp.int32),
            going=going,
            text=text,
            cache=cache,
            drafted=Drafted(
                tokens=jnp.zeros((batch, self.most), jnp.int32),
                size=jnp.zeros((batch,), jnp.int32),
                scores=scores,
            ),
        )

        def step(state: DraftingState) -> DraftingState:
            i, text = state.i, state.text
            column = text.cur_len + i - 1
            token = jnp.take_along_axis(text.sequences, column[:, None], axis=1)
            # A row that lacks nothing waits, and writes nothing over what it has.
            reads = state.going & (i >= -missing)
            cache = state.cache.replace(length=slot + jnp.maximum(i, -missing))
            read = self.network.decode(token, reads[:, None], cache)
            return self.emit(state._replace(cache=read.cache), read, limit)

        end = lax.while_loop(lambda state: state.going.any(), step, start)
        return end.drafted, end.text, end.cache

    def emit(
        self, state: DraftingState, read: DecodeOutput, limit: Int[Array, " B"]
    ) -> DraftingState:
        """One more token for the rows that are still going."""
        text, drafted, logits = state.text, state.drafted, read.logits[:, 0]
        i = jnp.maximum(state.i, 0)
        scores = self.settings.processors(
            text.sequences,
            logits,
            text.cur_len + i,
            mask=text.mask,
            prompt_len=self.prompt_len,
            unconditional_logits=unconditional(read),
        )
        token = self.choose(scores, text.cur_len + i)
        # A draft cannot break the result: one without a finite score only ends.
        good = state.going & (state.i >= 0) & ~nonfinite(logits, scores)
        token = jnp.where(good, token, self.settings.pad)
        chance = jnp.take_along_axis(jax.nn.softmax(scores, axis=-1), token[:, None], axis=1)
        ends = jnp.isin(token, self.settings.eos) | (chance[:, 0] < self.threshold)
        ends |= i + 1 >= limit
        kept = drafted.scores
        if kept is not None:
            kept = lax.dynamic_update_slice_in_dim(kept, scores[:, None], i, axis=1)
        return DraftingState(
            i=state.i + 1,
            going=jnp.where(state.i < 0, state.going, good & ~ends),
            text=text.put(token[:, None], good[:, None], i),
            cache=state.cache,
            drafted=Drafted(
                tokens=lax.dynamic_update_slice_in_dim(drafted.tokens, token[:, None], i, axis=1),
                size=drafted.size + good.astype(jnp.int32),
                scores=kept,
            ),
        )
