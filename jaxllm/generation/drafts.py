"""Where drafted tokens come from: a smaller model, the model's own first layers, or the text."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache import Cache, put_columns
from jaxllm.errors import UnsupportedError
from jaxllm.generation.acceptance import Drafted
from jaxllm.generation.guidance import beside
from jaxllm.generation.lookup import earlier_match, following
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.base import History
from jaxllm.generation.processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor
from jaxllm.generation.processors.warpers import Filter
from jaxllm.generation.strategy import Prompt, Settings, faulty, unconditional
from jaxllm.models.outputs import DecodeOutput

SCORED = (Filter, UnbatchedClassifierFreeGuidanceLogitsProcessor)
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


class Draft:
    """Proposes up to `most` tokens a row. A pytree, like the strategy that it belongs to."""

    has_scores: ClassVar[bool] = True
    """Its tokens are drawn from scores, which the rule of acceptance then needs."""

    def init(self, model: Any, prompt: Prompt, capacity: int, samples: int) -> Any:
        """What it remembers of the prompt."""
        return None

    def propose(
        self,
        model: Any,
        text: Text,
        cache: Cache,
        own: Any,
        limit: Int[Array, " B"],
        choose: Choose,
        prompt_len: Int[Array, ""],
        settings: Settings,
        *,
        most: int,
        keep_scores: bool,
    ) -> tuple[Drafted, Text, Cache, Any]:
        """Drafts of at most `limit` tokens, the text with them, the model's cache, and its own.

        The cache holds each row up to its newest token, which is not in it.
        """
        raise NotImplementedError

    def keep(self, own: Any, length: Int[Array, " B"]) -> Any:
        """Forgets drafts that were not accepted; `length` columns are in the model's cache."""
        return own


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AssistantModel(Draft):
    """A model of the same vocabulary, with a cache of its own."""

    model: Any
    threshold: Float[Array, ""]
    """A row's draft ends with a token less probable than this."""

    def init(self, model, prompt, capacity, samples):
        if "inputs_embeds" in prompt.inputs or prompt.encoder.keys() & {
            "inputs_embeds",
            "encoder_states",
        }:
            raise UnsupportedError(
                "assistant_model: needs a prompt of input_ids, since embeddings and encoder "
                "outputs of one model mean nothing to another; assistant_early_exit and "
                "prompt_lookup_num_tokens take them"
            )
        network, batch = beside(model, self.model), prompt.mask.shape[0]
        cache = network.start(batch, capacity, **prompt.encoder)
        cache = network.decode(cache=cache, fresh=True, at=prompt.at, **prompt.inputs).cache
        length = jnp.full((batch * samples,), prompt.columns, jnp.int32)
        return cache.repeat(samples).replace(length=length)

    def propose(
        self, model, text, cache, own, limit, choose, prompt_len, settings, *, most, keep_scores
    ):
        drafting = Drafting(
            beside(model, self.model),
            self.threshold,
            choose,
            prompt_len,
            settings,
            most,
            keep_scores,
        )
        drafted, text, own = drafting(text, own, cache.length, limit)
        # The last token of a draft was proposed, but not read.
        length = cache.length + jnp.maximum(drafted.size, 1)
        return drafted, text, cache, own.replace(length=length)

    def keep(self, own, length):
        return own.cut(jnp.minimum(own.length, length))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyExit(Draft):
    """The first layers of the model itself, with the final norm and the head.

    Their keys and values are those of the whole model, so the drafts are written to its cache,
    where the model then writes the same again.
    """

    layers: int = dataclasses.field(metadata={"static": True})
    threshold: Float[Array, ""]

    def propose(
        self, model, text, cache, own, limit, choose, prompt_len, settings, *, most, keep_scores
    ):
        n, network = self.layers, model.early_exit(self.layers)
        first = cache.replace(
            layers=cache.layers[:n], cross=None if cache.cross is None else cache.cross[:n]
        )
        drafting = Drafting(
            network, self.threshold, choose, prompt_len, settings, most, keep_scores
        )
        drafted, text, first = drafting(text, first, cache.length, limit)
        return drafted, text, cache.replace(layers=(*first.layers, *cache.layers[n:])), None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PromptLookup(Draft):
    """What followed the row's last tokens when they occurred in it before."""

    has_scores: ClassVar[bool] = False
    ngram_size: Int[Array, ""]
    """The longest n-gram to look for."""

    def propose(
        self, model, text, cache, own, limit, choose, prompt_len, settings, *, most, keep_scores
    ):
        history = History.of(text.sequences, text.cur_len, text.mask)
        # Rules forbid tokens whatever the scores; warpers and guidance do not, and need true ones.
        rules = LogitsProcessorList(p for p in settings.processors if not isinstance(p, SCORED))
        vocabulary = model.config.vocab_size
        scores = rules(
            text.sequences,
            jnp.ones((text.sequences.shape[0], vocabulary), jnp.float32),
            text.cur_len,
            mask=text.mask,
            prompt_len=prompt_len,
        )
        allowed = scores > jnp.finfo(jnp.float32).min
        at, found = earlier_match(history.text, history.size, allowed, self.ngram_size)
        limit = jnp.where(found, limit, 0)
        drafted = following(history.text, history.size, at, limit, settings.eos, most)
        real = jnp.arange(most) < drafted.size[:, None]
        return drafted, text.put(drafted.tokens, real), cache, own


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
    settings: Settings
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
        good = state.going & (state.i >= 0) & ~faulty(logits, scores)
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
