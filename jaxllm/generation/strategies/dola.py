"""DoLa: contrasts the last layer's distribution with that of an earlier layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, UnsupportedError, quoted, warn
from jaxllm.generation.strategies.sample import NextTokenLogits, Sample
from jaxllm.models.decoder import Decoder
from jaxllm.models.model import take_column
from jaxllm.models.outputs import DecodeOutput

RELATIVE_TOP = 0.1
"""Tokens below this share of the best one's probability are forbidden (`_relative_top_filter`)."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DoLa(Sample):
    """DoLa decoding, as in transformers 4.55.4 (`_dola_decoding`): Chuang et al., "DoLa: Decoding
    by Contrasting Layers Improves Factuality in Large Language Models", arXiv:2309.03883.

    Each step contrasts with the candidate layer whose distribution differs most from the last
    layer's. As in transformers it is one layer for the whole batch, by the mean over its rows: this
    is the only strategy in which rows depend on each other. Unlike there, finished rows do not
    count.
    """

    layers: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """Candidate layers; 0 is the embedding."""
    extra_decode_options: ClassVar = {"output_hidden_states": True}

    def next_token_logits(
        self,
        model: Decoder,
        out: DecodeOutput,
        last_column: Int[Array, " B"] | None,
        unfinished: Bool[Array, " B"],
    ) -> NextTokenLogits:
        """Logits, with differences of log-probabilities as input of the processors."""
        assert out.hidden_states is not None  # from `extra_decode_options`
        states = [out.hidden_states[i] for i in self.layers]
        widths = {x.shape[-1] for x in (*states, out.last_hidden_state)}
        if len(widths) > 1:
            raise UnsupportedError(
                f"dola_layers: the LM head reads {out.last_hidden_state.shape[-1]} features, but "
                f"inner layers have {max(widths)} (word_embed_proj_dim); use another strategy"
            )
        if last_column is not None:
            states = [take_column(x, last_column) for x in states]
        early = [model.logits(x[:, -1:])[:, 0] for x in states]  # no final norm, as in transformers
        logits = super().next_token_logits(model, out, last_column, unfinished)
        contrasted = contrast(logits.raw, farthest(logits.raw, jnp.stack(early), unfinished))
        return dataclasses.replace(logits, processor_input=contrasted)


def farthest(
    final: Float[Array, "B V"], early: Float[Array, "C B V"], unfinished: Bool[Array, " B"]
) -> Float[Array, "B V"]:
    """Logits of the early layer, of C, that diverges most from `final` over the unfinished rows.

    As in transformers the average of the two distributions is the first argument of both
    Kullback-Leibler terms, where the Jensen-Shannon divergence has it as the second.
    """
    if early.shape[0] == 1:
        return early[0]
    log_p, log_q = jax.nn.log_softmax(final)[None], jax.nn.log_softmax(early)
    average = 0.5 * (jnp.exp(log_p) + jnp.exp(log_q))
    # As kl_div(log_p, average) + kl_div(log_q, average); where the average is 0 both terms are.
    gap = 2 * jnp.log(jnp.where(average > 0, average, 1.0)) - log_p - log_q
    divergence = jnp.where(average > 0, average * gap, 0.0).mean(axis=-1)
    total = jnp.where(unfinished, divergence, 0.0).sum(axis=-1)
    return early[jnp.argmax(total)]


def contrast(final: Float[Array, "B V"], early: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """log p_final - log p_early, -inf where p_final is far below its largest value.

    >>> import jax.numpy as jnp
    >>> final, early = jnp.log(jnp.array([[[0.5, 0.46, 0.04]], [[0.8, 0.1, 0.1]]]))
    >>> [round(float(x), 4) for x in jnp.exp(contrast(final, early))[0]]
    [0.625, 4.6, 0.0]
    """
    log_p, log_q = jax.nn.log_softmax(final), jax.nn.log_softmax(early)
    floor = jnp.max(log_p, axis=-1, keepdims=True) + np.log(RELATIVE_TOP).astype(np.float32)
    return jnp.where(log_p < floor, -jnp.inf, log_p - log_q)


def layers_to_contrast(model: Decoder, dola_layers: str | Sequence[int]) -> tuple[int, ...]:
    """Candidate layers: of the lower or the higher half ("low", "high"), or those in a list that
    lie below the last layer.

    With tied embeddings "low" leaves out the first layers, which predict the input token.

    Raises:
        InputError: no layer is left.
    """
    depth = model.depth
    if dola_layers == "low":
        start = min(depth - 1, 2) if model.tied_embedding else 0
        end = depth // 2 if depth <= 40 else 20
        layers = (start,) if start == depth // 2 else tuple(range(start, end, 2))
    elif dola_layers == "high":
        layers = tuple(range(depth // 2 if depth <= 40 else depth - 20, depth, 2))
    else:
        layers = tuple(i for i in dict.fromkeys(map(int, dola_layers)) if i < depth)
        if len(layers) < len(set(dola_layers)):
            warn(
                f"`dola_layers`={tuple(dola_layers)}: the model has {depth} layers, of which only "
                f"those before the last count ({list(layers)})"
            )
    if not layers:
        raise InputError(
            f"dola_layers: {quoted(dola_layers)} leaves no layer of a model with "
            f"{depth}; give a list of "
            f"numbers from 0 to {depth - 1}"
        )
    return layers
