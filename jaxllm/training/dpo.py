"""Direct preference optimisation (DPO): a loss of pairs of answers, without a reward model.

Rafailov et al. 2023, arXiv:2305.18290. A pair's reference log-probabilities are data: they are
computed once, before training (`training.data.add_reference`), so that no second model is in
memory.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxllm.common.errors import ConfigError, InputError, UnsupportedError
from jaxllm.models.decoder_only import CausalLM, with_rope_per_row
from jaxllm.models.encoder_decoder import EncoderDecoderLM
from jaxllm.models.input_checks import IGNORED
from jaxllm.models.losses import token_losses
from jaxllm.models.model import Model
from jaxllm.training.losses import (
    MAX_LOGITS,
    Batch,
    LossSums,
    causal_inputs_and_labels,
    chunked_row_losses,
    columns_within,
    seq2seq_inputs_and_labels,
)

REFERENCE = "reference_logps"
"""Name of the reference's log-probabilities in a batch."""
MARGINS, ACCURACIES = "rewards/margins", "rewards/accuracies"
METRICS = (
    *("rewards/chosen", "rewards/rejected", MARGINS, ACCURACIES),
    *("logps/chosen", "logps/rejected"),
)
"""Names of the metrics, as in TRL."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Settings of direct preference optimisation.

    Args:
        beta: weight of the divergence from the reference model; smaller values let the model move
            farther away from it.
        label_smoothing: assumed share of pairs that are labelled the wrong way round, 0 to 0.5
            (conservative DPO; Mitchell 2023). Only with `sigmoid`.
        loss_type: sigmoid (equation 7 of the paper), or ipo (Azar et al. 2023, arXiv:2310.12036,
            equation 17, with mean log-probabilities per token, as in TRL).
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: Literal["sigmoid", "ipo"] = "sigmoid"

    def __post_init__(self):
        if not 0 < self.beta < math.inf:
            raise ConfigError(f"beta: expected more than 0, found {self.beta}")
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(f"label_smoothing: expected 0 to 0.5, found {self.label_smoothing}")
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ConfigError(f"label_smoothing: has no effect with loss_type {self.loss_type!r}")


def pair_losses(
    chosen: Float[Array, " B"], rejected: Float[Array, " B"], config: DPOConfig
) -> Float[Array, " B"]:
    """Losses of pairs, from the log-ratios of model and reference for both answers.

    >>> ratio = jnp.zeros(1)
    >>> pair_losses(ratio, ratio, DPOConfig()).tolist()  # ln 2: no preference yet
    [0.6931471824645996]
    """
    margin = chosen - rejected
    if config.loss_type == "ipo":
        return jnp.square(margin - 1 / (2 * config.beta))
    scaled, smoothing = config.beta * margin, config.label_smoothing
    return -(1 - smoothing) * jax.nn.log_sigmoid(scaled) - smoothing * jax.nn.log_sigmoid(-scaled)


def pair_logps(
    model: Model[Any], batch: Batch, key: Array | None = None, max_logits: int = MAX_LOGITS
) -> tuple[Float[Array, "B 2"], Float[Array, "B 2"]]:
    """Log-probabilities of the answers of each pair, and their numbers of tokens.

    Args:
        model: a causal language model or a T5.
        batch: arrays [B, 2, T] by model argument name, chosen before rejected; see `collate_pairs`.
        key: PRNG key that turns dropout on.
        max_logits: most logits that a device holds at once; beyond that, columns are computed in
            chunks.

    Raises:
        InputError: the model has no answers.
    """
    arrays = {name: jnp.asarray(x) for name, x in batch.items() if name != REFERENCE}
    flat = {name: x.reshape(-1, *x.shape[2:]) for name, x in arrays.items()}
    if isinstance(model, EncoderDecoderLM):
        inputs, labels = seq2seq_inputs_and_labels(model, flat)
    elif isinstance(model, CausalLM):
        inputs, labels = causal_inputs_and_labels(flat)
    else:
        raise InputError(f"{type(model).__name__}: DPO needs a language model")
    x, head_key, _ = with_rope_per_row(model).head_inputs(**inputs, dropout_key=key)
    rows, length = labels.shape
    columns = columns_within(max_logits, (rows, length), model.config.vocab_size)
    if columns >= length:
        losses = token_losses(model.head(x, head_key), labels)[0].sum(axis=-1)
    else:
        losses = chunked_row_losses(columns, model.head, x, labels, head_key)
    counts = (labels != IGNORED).sum(axis=-1, dtype=jnp.float32)
    return -losses.reshape(-1, 2), counts.reshape(-1, 2)


@dataclasses.dataclass(frozen=True)
class DPOLoss:
    """DPO loss of a language model, summed over pairs.

    A batch has arrays [B, 2, T] (chosen, rejected) and `reference_logps` [B, 2]. A pair is counted
    if both answers have labels. `correct` is the number of pairs whose chosen answer has the larger
    reward, beta (log p - log p_reference); `extra` has the sums of `METRICS`.
    """

    config: DPOConfig = dataclasses.field(default_factory=DPOConfig)
    max_logits: int = MAX_LOGITS

    def __call__(self, model: Model[Any], batch: Batch, key: Array | None = None) -> LossSums:
        if REFERENCE not in batch:
            raise InputError(
                f"{REFERENCE}: missing in the batch; `training.data.add_reference` computes it"
            )
        if model.config.aux_loss is not None:
            raise UnsupportedError(
                "output_router_logits: DPO adds no loss of routers; load the model with "
                'config={"output_router_logits": False}'
            )
        logps, counts = pair_logps(model, batch, key, self.max_logits)
        counted = counts.min(axis=1) > 0
        ratios = logps - jnp.asarray(batch[REFERENCE])
        rewards = self.config.beta * ratios
        scores = ratios / jnp.maximum(counts, 1) if self.config.loss_type == "ipo" else ratios
        margins = rewards[:, 0] - rewards[:, 1]
        correct = (margins > 0).astype(jnp.float32)

        def total(values: Float[Array, " B"]) -> Float[Array, ""]:
            return jnp.where(counted, values, 0.0).sum()

        sums = (*rewards.T, margins, correct, *logps.T)
        return LossSums(
            loss=total(pair_losses(scores[:, 0], scores[:, 1], self.config)),
            count=counted.sum(dtype=jnp.float32),
            correct=total(correct),
            extra=dict(zip(METRICS, map(total, sums), strict=True)),
        )
