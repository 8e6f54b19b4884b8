"""Greedy search and sampling: from the logits of a step to its tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.generation.sampling import choose_greedy, choose_sample
from jaxllm.generation.state import Settings, State, note_broken


def emit(state: State, logits: Float[Array, "B V"], settings: Settings) -> State:
    """Processes the logits, chooses a token for each row, writes it, and notes which rows end."""
    scores = settings.processors(state.sequences, logits, state.cur_len, mask=state.mask)
    if settings.sampling:
        keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(state.keys, state.step)
        token = choose_sample(keys, scores)
    else:
        token = choose_greedy(scores)
    token = jnp.where(state.done, settings.pad, token)

    def write(buffer, column):
        update = column[:, None]
        return jax.lax.dynamic_update_slice_in_dim(buffer, update, state.cur_len, axis=1)

    return state.replace(
        scores=_keep(state.scores, scores, state.step),
        logits=_keep(state.logits, logits, state.step),
        sequences=write(state.sequences, token),
        mask=write(state.mask, ~state.done),
        cur_len=state.cur_len + 1,
        token=token,
        done=state.done | jnp.isin(token, settings.eos),
        step=state.step + 1,
        broken_at=state.broken_at
        if settings.allow_nonfinite
        else note_broken(state, logits, scores),
    )


def _keep(record, values, step):
    """Writes this step into a record, where one is kept."""
    if record is None:
        return None
    return jax.lax.dynamic_update_slice_in_dim(record, values[None], step, axis=0)
