#!/usr/bin/env bash
# optax 0.2.8: prodigy and dadapt_adamw make NaN of the parameters if the rate warms up from 0.
#
# Both find the rate themselves, and advise a schedule with a warmup as a factor of it. They divide
# by a sum of the gradients so far, each multiplied with the schedule's value. If the first value is
# 0, that is 0 / 0, and the NaN stays in the estimate of the rate. A warmup that starts at 0 is
# usual, and with Adam it only makes the first step an empty one. Here the parameters of prodigy are
# NaN after the first step, those of dadapt_adamw after the second. A warmup from a small number, or
# prodigy's safeguard_warmup=True, avoids it.
#
# Seen on 2026-11-30 with optax 0.2.8 and jax 0.10.2, Python 3.11 (parameter after 1, 2 and 200
# steps towards 1.0, with a warmup of 10 steps):
#   adamw from 0.0: 0.000 0.010 1.000
#   prodigy from 0.0: nan nan nan
#   prodigy from 0.01: 0.000 0.000 1.000
#   prodigy with safeguard_warmup from 0.0: 0.000 0.000 0.999
#   dadapt_adamw from 0.0: 0.000 nan nan
#   dadapt_adamw from 0.01: 0.000 0.000 1.000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install optax==0.2.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
import optax
from optax.contrib import dadapt_adamw, prodigy


def train(name, make, start, peak=1.0):
    """Prints and returns the parameter after 1, 2 and 200 steps."""
    optimizer = make(optax.warmup_constant_schedule(start, peak, warmup_steps=10))
    params, values = jnp.zeros(()), []
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        gradient = jax.grad(lambda x: (x - 1.0) ** 2)(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(200):
        params, state = step(params, state)
        values.append(float(params))
    values = values[0], values[1], values[-1]
    print(f"{name} from {start}:", *(f"{x:.3f}" for x in values))
    return values


def learns(values):
    return all(abs(x) < 0.1 for x in values[:2]) and values[2] > 0.1


def safe_prodigy(rate):
    return prodigy(rate, safeguard_warmup=True)


assert learns(train("adamw", optax.adamw, 0.0, peak=0.1))
nan = train("prodigy", prodigy, 0.0)
assert all(x != x for x in nan), nan
assert learns(train("prodigy", prodigy, 0.01))
assert learns(train("prodigy with safeguard_warmup", safe_prodigy, 0.0))
nan = train("dadapt_adamw", dadapt_adamw, 0.0)
assert nan[0] == 0 and all(x != x for x in nan[1:]), nan
assert learns(train("dadapt_adamw", dadapt_adamw, 0.01))
PYTHON
