"""transformers' Flax classes and optax as a peer in training: `flax_train_worker.py FOLDER`."""

import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import transformers
from transformers import FlaxAutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Training, serve

transformers.logging.set_verbosity_error()
model = FlaxAutoModelForCausalLM.from_pretrained(sys.argv[1], from_pt=True)
optimizer = optax.adamw(1e-5, weight_decay=0.01)
state = (model.params, optimizer.init(model.params))


@partial(jax.jit, static_argnames="dropout", donate_argnums=0)
def step(state, ids, key, *, dropout: bool):
    params, opt_state = state

    def loss_of(params):
        out = model(ids, params=params, dropout_rng=key, train=dropout)
        losses = optax.softmax_cross_entropy_with_integer_labels(out.logits[:, :-1], ids[:, 1:])
        return losses.mean()

    loss, grads = jax.value_and_grad(loss_of)(params)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def run(workload: Training) -> object:
    global state
    ids = jnp.asarray(workload.ids(model.config.vocab_size))
    state, loss = step(state, ids, jax.random.PRNGKey(0), dropout=workload.dropout)
    return float(loss)


version = f"transformers {transformers.__version__}, jax {jax.__version__}"
serve({"peer": "HF Flax", "version": version}, run, Training)
