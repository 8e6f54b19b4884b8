"""Classifier-free guidance: mixes conditional and unconditional log-probabilities."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import Number, float_leaf
from jaxllm.generation.processors.base import (
    CurLen,
    LogitsProcessor,
    Scores,
    logits_processor,
    store,
)


@logits_processor()
class UnbatchedClassifierFreeGuidanceLogitsProcessor(LogitsProcessor):
    """Moves log-probabilities away from those of the unconditional context.

    Computes ``u + guidance_scale * (c - u)``, with c and u the log-softmax of the conditional and
    unconditional logits. A scale of 1 leaves the scores unchanged; a larger scale favours tokens
    that the prompt makes more likely than the unconditional context does. Results match
    transformers 5.23, whose processor runs the model on the unconditional context itself; here
    ``generate()`` runs both contexts and passes the logits in. Tokens with score -inf keep it.

    Sanchez et al., "Stay on topic with classifier-free guidance", https://arxiv.org/abs/2306.17806.

    >>> import jax.numpy as jnp
    >>> c, u = jnp.log(jnp.array([[[0.5, 0.5]], [[0.8, 0.2]]]))
    >>> guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(2.0)
    >>> scores = guide(jnp.zeros((1, 4), jnp.int32), c, 2, unconditional_logits=u)
    >>> [round(float(x), 4) for x in jnp.exp(scores[0])]
    [0.3125, 1.25]
    """

    guidance_scale: Float[Array, ""]

    def __init__(self, guidance_scale: Number) -> None:
        scale = float_leaf(type(self).__name__, "guidance_scale", guidance_scale, "(-inf, inf)")
        store(self, guidance_scale=scale)

    def __call__(
        self,
        input_ids: Int[Array, "B L"],
        scores: Scores,
        cur_len: CurLen = None,
        *,
        unconditional_logits: Scores | None = None,
        **_: object,
    ) -> Scores:
        """float32 ``[B, V]``.

        Args:
            unconditional_logits: ``[B, V]``, the model's logits for the unconditional context.

        Raises:
            InputError: `unconditional_logits` is None.
        """
        if unconditional_logits is None:
            raise InputError(
                f"{type(self).__name__}: no unconditional_logits; set `guidance_scale` in "
                "generate(), which runs the model on the negative prompt as well"
            )
        scores = jnp.asarray(scores, jnp.float32)
        c = jax.nn.log_softmax(scores, axis=-1)
        u = jax.nn.log_softmax(jnp.asarray(unconditional_logits, jnp.float32), axis=-1)
        guided = jnp.where(jnp.isneginf(c), -jnp.inf, self.guidance_scale * (c - u) + u)
        # A scale of 1 returns raw logits, not log-probabilities, as in transformers.
        return jnp.where(self.guidance_scale == 1, scores, guided)
