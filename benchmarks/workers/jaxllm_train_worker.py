"""jaxllm's training step as a peer: `python jaxllm_train_worker.py FOLDER`."""

import sys
from pathlib import Path

import jax
import numpy as np

import jaxllm
from jaxllm.training import (
    OptimizerConfig,
    TrainState,
    loss_for,
    make_optimizer,
    make_train_step,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Training, serve

RATES = ("attn_pdrop", "embd_pdrop", "resid_pdrop")
optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-5, weight_decay=0.01, clip_norm=None))
runs = {}


def start(dropout: bool):
    """A state and a step of its own for a model with, or without, dropout."""
    rates = {} if dropout else dict.fromkeys(RATES, 0.0)
    model, _ = jaxllm.load(sys.argv[1], config=rates)
    state = TrainState.create(model, optimizer)
    return state, make_train_step(optimizer, loss_for(model))


def run(workload: Training) -> object:
    if workload.dropout not in runs:
        runs.clear()
        runs[workload.dropout] = start(workload.dropout)
    state, step = runs[workload.dropout]
    ids = workload.ids(50257).astype(np.int32)
    batch = {"input_ids": ids, "attention_mask": np.ones_like(ids), "labels": ids}
    state, metrics = step(state, batch)
    runs[workload.dropout] = state, step
    return float(metrics["loss"])


serve({"peer": "jaxllm", "version": f"jax {jax.__version__}"}, run, Training)
