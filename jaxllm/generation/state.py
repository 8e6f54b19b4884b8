"""What a compiled generation carries from step to step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jaxllm.cache import Cache
from jaxllm.generation.processors import LogitsProcessorList

NEVER = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of one call, all traced: another temperature or EOS set compiles nothing."""

    processors: LogitsProcessorList
    eos: Int[Array, " E"]
    """End tokens, filled up with -1, which no token equals."""
    pad: Int[Array, ""]
    """What finished rows emit."""
    sampling: bool = dataclasses.field(metadata={"static": True})
    allow_nonfinite: bool = dataclasses.field(metadata={"static": True})
    """`remove_invalid_values`: NaN and infinite logits are mended, not reported."""
    keep_scores: bool = dataclasses.field(default=False, metadata={"static": True})
    keep_logits: bool = dataclasses.field(default=False, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Carried by the loop and donated to it, so that cache and sequences are updated in place."""

    sequences: Int[Array, "B L"]
    """Prompt and generated tokens, pad beyond `cur_len`. L is a bucket."""
    mask: Bool[Array, "B L"]
    """Which columns hold real tokens: not the prompt's padding, nor pads after a row's end."""
    cur_len: Int[Array, ""]
    """Columns in use, prompt included."""
    token: Int[Array, " B"]
    """The newest token of each row; not in the cache yet."""
    done: Bool[Array, " B"]
    """The row has ended."""
    keys: Key[Array, " B"]
    """One key a row; step t draws with fold_in(key, t), whatever the batch around the row."""
    step: Int[Array, ""]
    """New tokens so far."""
    broken_at: Int[Array, " B"]
    """The first step at which a live row had no finite logits or no token left, or -1."""
    cache: Cache
    scores: Float[Array, "N B V"] | None = None
    """Processed scores of every step (`output_scores`)."""
    logits: Float[Array, "N B V"] | None = None
    """Raw logits of every step (`output_logits`)."""

    @staticmethod
    def start(
        prompt: Int[Array, "B L"],
        mask: Bool[Array, "B L"],
        prompt_len: Int[Array, ""],
        keys: Key[Array, " B"],
        cache: Cache,
    ) -> State:
        """Before the first token. `prompt` is padded to the bucket."""
        batch = prompt.shape[0]
        return State(
            sequences=prompt,
            mask=mask,
            cur_len=prompt_len,
            token=jnp.zeros((batch,), jnp.int32),
            done=jnp.zeros((batch,), bool),
            keys=keys,
            step=jnp.zeros((), jnp.int32),
            broken_at=jnp.full((batch,), NEVER, jnp.int32),
            cache=cache,
        )

    def replace(self, **changes) -> State:
        return dataclasses.replace(self, **changes)


def note_broken(
    state: State, logits: Float[Array, "B V"], scores: Float[Array, "B V"]
) -> Int[Array, " B"]:
    """`broken_at` after a look at this step: NaN or infinite logits, or every token forbidden.

    A -inf among the logits is no fault (a head may mask); nothing but -inf is.
    """
    best = jnp.max(scores, axis=-1)
    fault = ~jnp.isfinite(jnp.max(logits, axis=-1)) | jnp.isnan(best) | (best == -jnp.inf)
    return jnp.where(fault & ~state.done & (state.broken_at == NEVER), state.step, state.broken_at)
