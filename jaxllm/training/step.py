"""One optimizer step: gradients of the summed loss over micro-batches, then optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from jaxllm.common.errors import InputError
from jaxllm.models.input_checks import IGNORED
from jaxllm.training.losses import Batch, Loss, LossSums
from jaxllm.training.state import Params, TrainState, global_norm

Metrics = dict[str, Array]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def make_train_step(
    optimizer: optax.GradientTransformation,
    loss: Loss,
    *,
    accumulation: int = 1,
    ema_decay: float | None = None,
    schedule: optax.Schedule | None = None,
) -> Step:
    """A compiled ``step(state, batch) -> (state, metrics)``; the state's buffers are given away.

    The gradient is that of the mean over all labels of the batch, however it is cut into
    micro-batches. A batch whose loss or gradient is not finite changes nothing but the counters.

    Args:
        optimizer: the one that the state was created with. If it takes extra arguments, it must
            let unknown ones pass, as optax asks (`measured` is one: `optimizers.clip_by_norm`).
        loss: such as `loss_for(model)` gives; a batch is a dict of arrays [B, ...].
        accumulation: micro-batches, one after the other; it divides B.
        ema_decay: of the moving average, for a state that keeps one.
        schedule: only to report `lr`; it counts optimizer steps.

    Returns:
        A function. Its metrics are float32 scalars on the device: `loss` and `accuracy` (means),
        `tokens` (labels counted), `real_tokens` (read by the model, pads left out), `grad_norm`
        (before clipping), `skipped` (0 or 1), `skipped_in_a_row`, and `lr`.
    """
    if accumulation < 1:
        raise InputError(f"accumulation: expected 1 or more, found {accumulation}")

    optimize = optax.with_extra_args_support(optimizer).update

    def update(
        trained: tuple, frozen: Params, structure, batch: dict[str, Array]
    ) -> tuple[tuple, Metrics]:
        step, params, opt_state, key, ema, skipped, in_a_row = trained
        keys = jax.random.split(jax.random.fold_in(key, step), accumulation)
        read = real_tokens(structure.model({**params, **frozen}), batch)

        def summed(params: Params, part: dict[str, Array], key: Array):
            sums = loss(structure.model({**params, **frozen}), part, key)
            return sums.loss, sums

        gradient = jax.grad(summed, has_aux=True)
        if accumulation == 1:
            grads, sums = gradient(params, batch, keys[0])
        else:
            grads, sums = accumulate(gradient, params, batch, keys)
        count = jnp.maximum(sums.count, 1.0)
        norm = global_norm(grads) / count
        good = jnp.isfinite(norm) & jnp.isfinite(sums.loss)

        def better(grads, params, opt_state, ema):
            mean = jax.tree.map(lambda g: g * (1 / count), grads)
            updates, opt_state = optimize(mean, opt_state, params, measured=(mean, norm))
            params = optax.apply_updates(params, updates)
            if ema is not None and ema_decay is not None:
                ema = optax.incremental_update(params, ema, 1 - ema_decay)
            return params, opt_state, ema

        # A branch, not a selection afterwards, for which XLA would copy what it updates in place.
        params, opt_state, ema = jax.lax.cond(
            good, better, lambda grads, *same: same, grads, params, opt_state, ema
        )
        bad = (~good).astype(jnp.int32)
        metrics = {
            "loss": sums.loss / count,
            "accuracy": sums.correct / count,
            "tokens": sums.count,
            "grad_norm": norm,
            "skipped": bad,
            "skipped_in_a_row": (in_a_row + 1) * bad,
        }
        if read is not None:
            metrics["real_tokens"] = read
        if schedule is not None:
            metrics["lr"] = jnp.asarray(schedule(step - skipped))
        trained = (
            step + 1,
            params,
            opt_state,
            key,
            ema,
            skipped + bad,
            metrics["skipped_in_a_row"],
        )
        return trained, {name: x.astype(jnp.float32) for name, x in metrics.items()}

    compiled = jax.jit(update, static_argnums=2, donate_argnums=0)

    def run(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        if (state.ema is None) != (ema_decay is None):
            raise InputError("ema_decay: a state keeps a moving average if and only if it is given")
        check_batch(batch, accumulation)
        trained = tuple(getattr(state, name) for name in TRAINED)
        trained, metrics = compiled(trained, state.frozen, state.structure, dict(batch))
        return state.replace(**dict(zip(TRAINED, trained, strict=True))), metrics

    return run


TRAINED = ("step", "params", "opt_state", "key", "ema", "skipped", "skipped_in_a_row")
"""The fields that a step gives away and gets back; the frozen parameters stay where they are."""


def accumulate(
    gradient: Callable[..., tuple[Params, LossSums]],
    params: Params,
    batch: dict[str, Array],
    keys: Array,
) -> tuple[Params, LossSums]:
    """Sums of gradients and of what the loss counts, over micro-batches in a scan.

    Row r goes to micro-batch r % A: rows that are spread over devices then need not move.
    """
    parts = len(keys)
    micro = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def body(carry, xs):
        return jax.tree.map(jnp.add, carry, gradient(params, *xs)), None

    zero = (jax.tree.map(jnp.zeros_like, params), LossSums.zero())
    return jax.lax.scan(body, zero, (micro, keys))[0]


def real_tokens(model: Any, batch: Batch) -> Array | None:
    """Tokens of a batch that are no pads, the decoder's included, as `flops.count_tokens` counts.

    It is part of the step, so that processes need not add up their numbers. None: the batch has
    neither masks nor ids.
    """
    counted = ("segment_ids", "attention_mask", "input_ids")
    name = next((name for name in counted if batch.get(name) is not None), None)
    if name is None:
        return None
    ones = name == "input_ids"
    count = jnp.asarray(jnp.size(batch[name]) if ones else jnp.count_nonzero(batch[name]))
    if model.is_encoder_decoder:
        target = batch.get("decoder_segment_ids")
        count += jnp.count_nonzero(batch["labels"] != IGNORED if target is None else target)
    return count


def check_batch(batch: Batch, accumulation: int) -> None:
    """Every array has the same number of rows, and the micro-batches divide it."""
    rows = {name: np.shape(x)[0] if np.ndim(x) else None for name, x in batch.items()}
    sizes: set[Any] = set(rows.values())
    if len(sizes) != 1 or None in sizes:
        raise InputError(f"batch: expected one number of rows, found {rows}")
    (size,) = sizes
    if size % accumulation:
        raise InputError(f"batch: {size} rows cannot be cut into {accumulation} equal parts")
