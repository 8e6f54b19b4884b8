"""Compiled training step: gradients of the summed loss over micro-batches, then optax."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from jaxllm.common.errors import InputError
from jaxllm.common.hardware import default_device
from jaxllm.models.input_checks import IGNORED
from jaxllm.models.model import Model
from jaxllm.nn.platform.training import updated_if
from jaxllm.parallel.placement import wait_on_cpu_mesh
from jaxllm.parallel.sharding import context_mesh, tree_shardings
from jaxllm.training.losses import Batch, Loss, LossSums
from jaxllm.training.state import Params, TrainState, global_norm

Metrics = dict[str, Array]
TPU_OPTIONS = {
    "xla_enable_async_all_gather": True,
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    # By the sparse cores of the chips that have them (v5p, v6e).
    "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
    "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
}
"""Options of XLA for a training step on a TPU: weights are gathered and gradients reduced while
products run; docs/decisions/tpu-training-step.md."""
WINDOWS = {
    kind: {"xla_tpu_scoped_vmem_limit_kib": 2**16}
    for kind in ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
}
"""Products read larger windows of their arrays on the chips with 128 MiB of vector memory, of which
this is half."""


def make_train_step(
    optimizer: optax.GradientTransformation,
    loss: Loss,
    *,
    accumulation: int = 1,
    ema_decay: float | None = None,
    schedule: optax.Schedule | None = None,
    device: Any = None,
) -> Step:
    """Makes a compiled ``step(state, batch) -> (state, metrics)`` that donates the state's buffers.

    The gradient is that of the mean loss over all labels of the batch, independent of the split
    into micro-batches. A batch whose loss or gradient is not finite changes only the counters.

    Args:
        optimizer: the optimizer with which the state was created. If it takes extra arguments, its
            `update` gets `measured=(gradients, norm)` and must accept unknown ones, as optax
            requires (see `optimizers.clip_by_norm`).
        loss: for example `loss_for(model)`; a batch is a dict of arrays [B, ...].
        accumulation: number of micro-batches, computed sequentially; must divide B.
        ema_decay: decay of the moving average, for a state that keeps one.
        schedule: learning rate by optimizer step, only to report `lr`.
        device: one of the devices, whose kind chooses XLA's options; None: JAX's first one.

    Returns:
        A `Step`; its metrics are float32 scalars on the device: `loss` and `accuracy` (means),
        `tokens` (counted labels), `real_tokens` (inputs without padding), `grad_norm` (before
        clipping), `skipped` (0 or 1), `skipped_in_a_row`, `lr`, and the means of
        `LossSums.extra`.
    """
    if accumulation < 1:
        raise InputError(f"accumulation: expected 1 or more, found {accumulation}")
    update = partial(
        _update,
        optimize=optax.with_extra_args_support(optimizer).update,
        loss=loss,
        accumulation=accumulation,
        ema_decay=ema_decay,
        schedule=schedule,
    )
    device = default_device() if device is None else device
    options = None
    if device.platform == "tpu":
        options = TPU_OPTIONS | WINDOWS.get(device.device_kind, {})
    program = jax.jit(update, donate_argnums=0, compiler_options=options)
    return Step(program, accumulation, keeps_ema=ema_decay is not None)


@dataclasses.dataclass(frozen=True)
class Step:
    """A compiled ``step(state, batch) -> (state, metrics)`` that donates the state's buffers."""

    program: Any
    """`_update` under `jax.jit`: (state without frozen parameters, frozen parameters, batch)."""
    accumulation: int
    keeps_ema: bool

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        updated, metrics = self.program(*self._arguments(state, batch))
        wait_on_cpu_mesh(metrics)
        return updated.replace(frozen=state.frozen).with_card(state.card), metrics

    def trace(self, state: TrainState, batch: Batch) -> jax.stages.Traced:
        """Traces the program for a state and a batch, or for their shapes, without running it."""
        return self.program.trace(*self._arguments(state, batch))

    def _arguments(self, state: TrainState, batch: Batch) -> tuple[TrainState, Params, Batch]:
        if (state.ema is None) == self.keeps_ema:
            raise InputError("ema_decay: a state keeps a moving average if and only if it is given")
        check_batch(batch, self.accumulation)
        # The frozen parameters are not donated.
        return state.replace(frozen={}), state.frozen, dict(batch)


def _update(
    state: TrainState,
    frozen: Params,
    batch: dict[str, Array],
    *,
    optimize: Callable[..., tuple[optax.Updates, optax.OptState]],
    loss: Loss,
    accumulation: int,
    ema_decay: float | None,
    schedule: optax.Schedule | None,
) -> tuple[TrainState, Metrics]:
    """One optimizer step of a state without its frozen parameters; traced by jit."""
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), accumulation)
    structure = state.structure
    tokens_read = real_tokens(structure.model({**state.params, **frozen}), batch)

    def micro_loss(params: Params, part: Batch, key: Array) -> tuple[Array, LossSums]:
        sums = loss(structure.model({**params, **frozen}), part, key)
        return sums.loss, sums

    grads, sums = accumulate(jax.grad(micro_loss, has_aux=True), state.params, batch, keys)
    # Labels of all micro-batches; 1 where there are none, instead of 0 / 0.
    count = jnp.maximum(sums.count, 1.0)
    norm = global_norm(grads) / count
    finite = jnp.isfinite(norm) & jnp.isfinite(sums.loss)
    apply = partial(_apply, grads, count, norm, optimize=optimize, ema_decay=ema_decay)
    params, opt_state, ema = updated_if(
        finite, lambda old: apply(*old), (state.params, state.opt_state, state.ema)
    )
    skipped = (~finite).astype(jnp.int32)
    updated = state.replace(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        ema=ema,
        skipped=state.skipped + skipped,
        skipped_in_a_row=(state.skipped_in_a_row + 1) * skipped,
    )
    metrics = {
        "loss": sums.loss / count,
        "accuracy": sums.correct / count,
        "tokens": sums.count,
        "grad_norm": norm,
        "skipped": skipped,
        "skipped_in_a_row": updated.skipped_in_a_row,
        **{name: x / count for name, x in sums.extra.items()},
    }
    if tokens_read is not None:
        metrics["real_tokens"] = tokens_read
    if schedule is not None:
        metrics["lr"] = jnp.asarray(schedule(state.step - state.skipped))
    return sharded(updated), {name: x.astype(jnp.float32) for name, x in metrics.items()}


def sharded(state: TrainState) -> TrainState:
    """Shards the state on a mesh as `put_tree` does; the compiler might choose other shardings.

    That of GPUs returned every parameter and moment whole on every device.
    """
    mesh = context_mesh()
    if mesh is None:
        return state
    return jax.lax.with_sharding_constraint(state, tree_shardings(state, mesh))


def _apply(
    grads: Params,
    count: Float[Array, ""],
    norm: Float[Array, ""],
    params: Params,
    opt_state: optax.OptState,
    ema: Params | None,
    *,
    optimize: Callable[..., tuple[optax.Updates, optax.OptState]],
    ema_decay: float | None,
) -> tuple[Params, optax.OptState, Params | None]:
    """Applies summed gradients; returns parameters, optimizer state and moving average."""
    mean = jax.tree.map(lambda g: g * (1 / count), grads)
    # Optax mixes dtypes, which a caller's setting may forbid.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimize(mean, opt_state, params, measured=(mean, norm))
    new_params: Any = optax.apply_updates(params, updates)
    average: Any = ema
    if ema is not None and ema_decay is not None:
        average = optax.incremental_update(new_params, ema, 1 - ema_decay)
    return new_params, opt_state, average


def accumulate(
    gradient: Callable[..., tuple[Params, LossSums]],
    params: Params,
    batch: dict[str, Array],
    keys: Array,
) -> tuple[Params, LossSums]:
    """Sums gradients and losses over micro-batches in a scan, one per key.

    Row r goes to micro-batch r % A, so that rows stay on their device.
    """
    parts = len(keys)
    if parts == 1:
        return gradient(params, batch, keys[0])
    micro = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

    def body(
        carry: tuple[Params, LossSums], xs: tuple[dict[str, Array], Array]
    ) -> tuple[tuple[Params, LossSums], None]:
        return jax.tree.map(jnp.add, carry, gradient(params, *xs)), None

    first = jax.tree.map(lambda x: x[0], micro)
    _, sums = jax.eval_shape(gradient, params, first, keys[0])
    zero_sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
    zero = (jax.tree.map(jnp.zeros_like, params), zero_sums)
    return jax.lax.scan(body, zero, (micro, keys))[0]


def real_tokens(model: Model[Any], batch: Batch) -> Array | None:
    """Number of tokens without padding, decoder tokens included, as in `flops.TokenCounts`.

    Computed in the step, so that processes need no extra reduction. None if the batch has neither
    masks nor ids.
    """
    sources = ("segment_ids", "attention_mask", "input_ids")
    name = next((name for name in sources if batch.get(name) is not None), None)
    if name is None:
        return None
    is_ids = name == "input_ids"
    count = jnp.asarray(jnp.size(batch[name]) if is_ids else jnp.count_nonzero(batch[name]))
    if model.is_encoder_decoder:
        target = batch.get("decoder_segment_ids")
        count += jnp.count_nonzero(batch["labels"] != IGNORED if target is None else target)
    return count


def check_batch(batch: Batch, accumulation: int) -> None:
    """Checks that all arrays have the same number of rows, and that `accumulation` divides it.

    Raises:
        InputError: the arrays differ, or `accumulation` does not divide the rows.
    """
    rows = {name: np.shape(x)[0] if np.ndim(x) else None for name, x in batch.items()}
    sizes: set[Any] = set(rows.values())
    if len(sizes) != 1 or None in sizes:
        raise InputError(f"batch: expected one number of rows, found {rows}")
    (size,) = sizes
    if size % accumulation:
        raise InputError(f"batch: {size} rows cannot be split into {accumulation} equal parts")
