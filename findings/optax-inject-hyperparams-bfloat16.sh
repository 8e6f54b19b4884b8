#!/usr/bin/env bash
# optax 0.2.8: Adam with inject_hyperparams makes NaN of bfloat16 parameters at its first step.
#
# inject_hyperparams turns the numbers of an optimizer into arrays, so that the rate can be set or
# read in its state. It gives them the widest dtype of the parameters, and where all of these are
# bfloat16, so is b2=0.999, which rounds to 1. The second moment then stays 0, and so does its bias
# correction, 1 - b2: Adam divides 0 by 0. The same optimizer without inject_hyperparams keeps b2 as
# a Python number and moves by the rate. hyperparam_dtype=jnp.float32 avoids it, and one float32
# parameter in the tree hides it.
#
# Seen on 2026-11-29 with optax 0.2.8 and jax 0.10.2, Python 3.11:
#   adam: first update -0.0100
#   inject_hyperparams(adam): b2 is 1.0, first update nan
#   the same with hyperparam_dtype float32: first update -0.0100
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install optax==0.2.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax.numpy as jnp
import optax

params = {"w": jnp.ones(4, jnp.bfloat16)}
grads = {"w": jnp.full(4, 0.1, jnp.bfloat16)}


def first_step(optimizer):
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    return float(updates["w"][0]), state


inject = optax.inject_hyperparams
plain, _ = first_step(optax.adam(learning_rate=0.01))
injected, state = first_step(inject(optax.adam)(learning_rate=0.01))
wide, _ = first_step(inject(optax.adam, hyperparam_dtype=jnp.float32)(learning_rate=0.01))
b2 = float(state.hyperparams["b2"])
print(f"adam: first update {plain:.4f}")
print(f"inject_hyperparams(adam): b2 is {b2}, first update {injected:.4f}")
print(f"the same with hyperparam_dtype float32: first update {wide:.4f}")
assert abs(plain + 0.01) < 1e-3 and abs(wide + 0.01) < 1e-3, (plain, wide)
assert b2 == 1.0 and injected != injected, (b2, injected)
PYTHON
