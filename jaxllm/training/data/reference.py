"""Log-probabilities of preference data under the reference model, computed once before training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float32

from jaxllm.models.model import Model
from jaxllm.parallel.placement import put_batch
from jaxllm.parallel.sharding import constrain, use_mesh
from jaxllm.training.data.batches import Batches, EvalBatches
from jaxllm.training.dpo import pair_logps
from jaxllm.training.losses import Batch


def reference_logps(
    model: Model[Any],
    epoch: EvalBatches,
    mesh: Mesh | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Float32[np.ndarray, "N 2"]:
    """Log-probabilities of all pairs under a model without dropout, in the order of the examples;
    of a stream, in the order of the rows.

    Args:
        model: the reference: the model before training. With LoRA, the base model.
        epoch: every pair once, such as those of `Batches.in_order`.
        mesh: devices of the model; None: one device.
        progress: called as ``progress(done, total)`` after every batch.
    """
    total = epoch.examples.total
    result = np.zeros((total, 2), np.float32)
    several = mesh if mesh is not None and mesh.size > 1 else None
    done = 0
    for part in epoch.parts():
        places = part.examples.places
        for members, batch in zip(part.members, part, strict=True):
            with use_mesh(several):
                logps = _pair_logps(model, batch if mesh is None else put_batch(batch, mesh))
            numbers = members if places is None else places[members, 0]
            result[numbers] = np.asarray(logps)[: len(members)]
            done += len(members)
            progress(done, total)
    return result


@jax.jit
def _pair_logps(model: Model[Any], batch: Batch) -> Float[Array, "B 2"]:
    # Replicated, so that every process has the rows of all.
    return constrain(pair_logps(model, batch)[0])


def add_reference(batches: Batches, model: Model[Any], batch_size: int = 8) -> Batches:
    """The batches with `reference_logps`, computed with the model before training.

    Args:
        batches: of format "preference", on one process.
        model: the reference; with LoRA, the base model.
        batch_size: pairs per batch of this computation.
    """
    logps = reference_logps(model, batches.in_order(batch_size))
    return batches.with_examples(batches.examples.with_reference(logps))
