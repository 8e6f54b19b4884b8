"""The losses that `labels` give, as Hugging Face's models compute them; always in float32."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.errors import InputError
from jaxllm.models.inputs import IGNORED, label_ids, on_host


def token_loss(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy over the labels that are not -100; 0 when there is none."""
    counted = labels != IGNORED
    log_probs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    safe = jnp.where(counted, labels, 0)
    picked = jnp.take_along_axis(log_probs, safe[..., None], axis=-1)[..., 0]
    return -jnp.where(counted, picked, 0.0).sum() / jnp.maximum(counted.sum(), 1)


def causal_loss(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
    """Position t predicts the label at t + 1: the shift happens here."""
    return token_loss(logits[:, :-1], labels[:, 1:])


def classification_loss(
    logits: Float[Array, "B C"], labels: Any, problem_type: str | None
) -> Float[Array, ""]:
    """Regression (MSE), one label of C (cross-entropy) or any of C (binary cross-entropy).

    Where the config names no `problem_type` it is inferred as Hugging Face does: one output means
    regression; integer labels mean single label; others multi-label.
    """
    labels = on_host("labels", labels)
    logits, outputs = logits.astype(jnp.float32), logits.shape[-1]
    if problem_type is None:
        if outputs == 1:
            problem_type = "regression"
        elif jnp.issubdtype(labels.dtype, jnp.integer):
            problem_type = "single_label_classification"
        else:
            problem_type = "multi_label_classification"
    if problem_type == "single_label_classification":
        if labels.ndim > 2 or labels.size != logits.shape[0]:
            raise InputError(f"labels: expected one a row, shape [B], found {labels.shape}")
        return token_loss(logits[:, None], label_ids(labels, outputs).reshape(-1, 1))
    if labels.size != logits.size:
        raise InputError(f"labels: expected shape {logits.shape}, found {labels.shape}")
    targets = jnp.asarray(labels, jnp.float32).reshape(logits.shape)
    if problem_type == "regression":
        return jnp.mean(jnp.square(logits - targets))
    return jnp.mean(jax.nn.softplus(logits) - targets * logits)
