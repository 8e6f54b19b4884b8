"""What a strategy of generation needs from a model.

Two calls do the work. `start` allocates the cache (an encoder-decoder encodes here, and
projects its cross keys and values, once). `decode` runs new columns on top of the cache. Strategies
know nothing of models beyond this; models know nothing of strategies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import Branches
from jaxllm.cache.kv_cache import Cache
from jaxllm.models.outputs import DecodeOutput
from jaxllm.nn.blocks import StackOutput
from jaxllm.parallel.sharding import constrain


class Decoder(Protocol):
    """A model that generates. Arrays only: checks of ids and lengths happen before.

    An encoder-decoder also has `encode`, whose output `start` takes as `encoder_states`.
    """

    config: Any
    is_encoder_decoder: bool

    @property
    def depth(self) -> int:
        """Layers of the decoder."""
        ...

    @property
    def ties_embedding(self) -> bool:
        """The head is the embedding, turned round."""
        ...

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer reads of the tokens; but for positions and token types."""
        ...

    def logits(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        """The head: float32 logits of hidden states."""
        ...

    def start(self, batch: int, capacity: int, **encoder_inputs: Any) -> Cache:
        """A cache of `capacity` columns, with the encoder's part filled in."""
        ...

    def decode(
        self,
        tokens: Int[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
        cache: Cache,
        *,
        fresh: bool = False,
        at: Int[Array, " B"] | None = None,
        branches: Branches | None = None,
        output_hidden_states: bool = False,
        output_attentions: bool = False,
        **prompt_inputs: Any,
    ) -> DecodeOutput:
        """Logits of each new column, or of column `at` of each row only, and the cache.

        The new columns follow each other, or with `branches` stand side by side.
        """
        ...

    def early_exit(self, layers: int) -> Decoder:
        """This model with the first layers of its decoder only; the parameters are shared."""
        ...


def decoded(
    out: StackOutput, logits: Callable[[Array], Array], cache: Cache, at: Int[Array, " B"] | None
) -> DecodeOutput:
    """The output of `decode` from that of the decoder's stack."""
    found = logits(out.x if at is None else take_column(out.x, at))
    # Computed in parts, then brought together, since choosing a token looks at all of them; said in
    # two steps, or the compiler may bring the head's weights together instead.
    found = constrain(constrain(found, "rows", None, "vocab"), "rows")
    return DecodeOutput(
        logits=found,
        cache=cache.replace(layers=out.layers),
        last_hidden_state=out.x,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        cross_attentions=out.cross_attentions,
    )


def take_column(x: Float[Array, "B T D"], at: Int[Array, " B"]) -> Float[Array, "B 1 D"]:
    """Column at[b] of row b."""
    return jnp.take_along_axis(x, at[:, None, None], axis=1)


def last_column(x: Int[Array, "B T"], at: Int[Array, " B"] | None) -> Int[Array, " B"]:
    if at is None:
        return x[:, -1]
    return jnp.take_along_axis(x, at[:, None], axis=1)[:, 0]
