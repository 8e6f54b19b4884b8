"""Where drafted tokens come from: a smaller model, the model's own first layers, or the text."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.cache.kv_cache import Cache
from jaxllm.common.errors import UnsupportedError
from jaxllm.generation.processors import LogitsProcessorList
from jaxllm.generation.processors.base import History
from jaxllm.generation.processors.guidance import UnbatchedClassifierFreeGuidanceLogitsProcessor
from jaxllm.generation.processors.warpers import Filter
from jaxllm.generation.strategies.assisted.acceptance import Drafted
from jaxllm.generation.strategies.assisted.draft_loop import Choose, Drafting, Text, each_sample
from jaxllm.generation.strategies.assisted.lookup import earlier_match, following
from jaxllm.generation.strategies.guidance import beside
from jaxllm.generation.strategies.strategy import DecodeSettings, Prompt

SCORED = (Filter, UnbatchedClassifierFreeGuidanceLogitsProcessor)


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
        settings: DecodeSettings,
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
        network, (batch, width) = beside(model, self.model), prompt.mask.shape
        if prompt.past is None:
            cache = prompt.kind.of(network.init_cache(batch, capacity, **prompt.encoder))
            cache = network.decode(
                cache=cache, cache_is_empty=True, logits_column=prompt.at, **prompt.inputs
            ).cache
        else:
            # The conversation is new to the assistant.
            unread = prompt.past.cross is not None and "input_ids" not in prompt.encoder
            if unread or "token_type_ids" in prompt.inputs:
                raise UnsupportedError(
                    "assistant_model: not with past_key_values that hold no ids of the encoder's "
                    "input, which the assistant reads as well, nor beside token_type_ids; "
                    "assistant_early_exit and prompt_lookup_num_tokens go on there"
                )
            cache = prompt.kind.of(network.init_cache(batch, width, **prompt.encoder))
            read = network.decode(prompt.sequences, prompt.mask, cache, cache_is_empty=True)
            cache = read.cache.compact(capacity)
        length = each_sample(prompt.columns, batch * samples)
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
        at, found = earlier_match(history.tokens, history.size, allowed, self.ngram_size)
        limit = jnp.where(found, limit, 0)
        drafted = following(history.tokens, history.size, at, limit, settings.eos, most)
        real = jnp.arange(most) < drafted.size[:, None]
        return drafted, text.put(drafted.tokens, real), cache, own
