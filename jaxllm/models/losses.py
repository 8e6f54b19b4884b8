"""Losses from `labels`, as in Hugging Face's models; always in float32."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import document_starts
from jaxllm.common.errors import InputError
from jaxllm.models.input_checks import IGNORED, label_ids, on_host
from jaxllm.nn.platform.training import entry_of_rows


def token_losses(
    logits: Float[Array, "*B V"], labels: Int[Array, "*B"]
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """Cross-entropy per label (0 where it is -100), and the log of the softmax denominator."""
    logits = logits.astype(jnp.float32)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    return jnp.where(labels != IGNORED, log_z - label_logits(logits, labels), 0.0), log_z


@jax.custom_jvp
def label_logits(logits: Float[Array, "*B V"], labels: Int[Array, "*B"]) -> Float[Array, "*B"]:
    """Logit of each label; 0 where the label is ignored (-100).

    The custom gradient compares indices, which fuses with the softmax's gradient. The gradient of
    the gather would be a scatter into an array the size of the logits.
    """
    labels = labels.astype(jnp.int32)  # a narrower type may not hold V
    in_vocabulary = (labels >= 0) & (labels < logits.shape[-1])
    label_logit = entry_of_rows(logits, jnp.where(in_vocabulary, labels, 0))
    return jnp.where(in_vocabulary, label_logit, 0.0)


@label_logits.defjvp
def _label_logits_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Any]):
    logits, labels = primals
    words = jnp.expand_dims(jnp.arange(logits.shape[-1]), tuple(range(labels.ndim)))
    is_label = words == labels[..., None]
    return label_logits(logits, labels), jnp.where(is_label, tangents[0], 0.0).sum(axis=-1)


def token_loss(logits: Float[Array, "B T V"], labels: Int[Array, "B T"]) -> Float[Array, ""]:
    """Mean cross-entropy over the labels that are not -100; 0 if there is none."""
    losses, _ = token_losses(logits, labels)
    return losses.sum() / jnp.maximum((labels != IGNORED).sum(dtype=losses.dtype), 1)


def next_labels(
    labels: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    attention_mask: Any = None,
) -> Int[Array, "B T"]:
    """Labels shifted left: each position predicts the next label of the same document.

    No padding predicts a row's first token, so that the padding side does not change the loss.

    >>> next_labels(jnp.array([[5, 6, 7, 8]]), jnp.array([[1, 1, 2, 2]])).tolist()
    [[6, -100, 8, -100]]
    >>> next_labels(jnp.array([[5, 6, 7, 8]]), attention_mask=jnp.array([[0, 1, 1, 1]])).tolist()
    [[-100, 7, 8, -100]]
    """
    labels = jnp.asarray(labels)
    if segments is not None:
        labels = jnp.where(document_starts(jnp.asarray(segments)), IGNORED, labels)
    if attention_mask is not None:
        real = jnp.asarray(attention_mask) != 0
        first = real & document_starts(real.astype(jnp.int32))
        labels = jnp.where(first, IGNORED, labels)
    return jnp.pad(labels[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORED)


def causal_loss(
    logits: Float[Array, "B T V"],
    labels: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    attention_mask: Any = None,
) -> Float[Array, ""]:
    """Causal LM loss: position t predicts the label at t + 1; the shift is done here."""
    return token_loss(logits, next_labels(labels, segments, attention_mask))


def load_balancing_loss(
    router_logits: Sequence[Float[Array, "N E"]], top_k: int, counted: Bool[Array, " N"]
) -> Float[Array, ""]:
    """Loss of the routers, least where all experts get as many tokens (Fedus et al. 2021,
    arXiv:2101.03961, equations 4 to 6), over all layers together as in transformers.

    Args:
        router_logits: logits of each layer's router.
        top_k: experts of a token.
        counted: False at padding.
    """
    logits = jnp.stack(router_logits).astype(jnp.float32)
    scores = jax.nn.softmax(logits, axis=-1)
    chosen = jax.nn.one_hot(jax.lax.top_k(scores, top_k)[1], scores.shape[-1]).sum(axis=-2)
    tokens = jnp.maximum(len(logits) * counted.sum(), 1)
    shares, means = (
        jnp.einsum("lne,n->e", x, counted.astype(jnp.float32)) / tokens for x in (chosen, scores)
    )
    return scores.shape[-1] * jnp.sum(shares * means)


def classification_loss(
    logits: Float[Array, "B C"], labels: Any, problem_type: str | None
) -> Float[Array, ""]:
    """Loss of regression (MSE), single-label (cross-entropy) or multi-label (binary cross-entropy).

    If `problem_type` is None it is inferred as in Hugging Face: one output means regression,
    integer labels single-label, others multi-label.
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
