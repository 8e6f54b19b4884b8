#!/usr/bin/env bash
# optax 0.2.8: after one infinite gradient, the mean of MultiSteps stays NaN for good.
#
# MultiSteps collects the gradients of some small batches, and empties its sum after each step of
# the optimizer by multiplying it with 0. Of NaN that makes NaN again. So if one gradient is not
# finite, each later mean is NaN. With optax.apply_if_finite around the optimizer, which is made to
# leave out such steps, nothing is learned from then on: it leaves out all of them, up to the number
# it allows in sequence, and then it gives up and writes NaN into the parameters. Around MultiSteps,
# instead of inside it, apply_if_finite leaves out the one batch, as should_skip_update_fn does.
#
# Seen on 2026-11-30 with optax 0.2.8 and jax 0.10.2, Python 3.11 (2 batches a step, 5 steps may be
# left out, the gradient is 1 but for the third batch, where it is infinite; parameter after each
# step):
#   MultiSteps(apply_if_finite(sgd)): 0.9 0.9 0.9 0.9 0.9 0.9 nan nan
#   apply_if_finite(MultiSteps(sgd)): 0.9 0.9 0.8 0.7 0.6 0.5 0.4 0.3
#   MultiSteps(sgd, should_skip_update_fn=skip_not_finite): 0.9 0.9 0.8 0.7 0.6 0.5 0.4 0.3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install optax==0.2.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax.numpy as jnp
import optax


def train(optimizer):
    """The parameter after each second batch."""
    params, values = jnp.ones(()), []
    state = optimizer.init(params)
    for batch in range(16):
        gradient = jnp.asarray(jnp.inf if batch == 2 else 1.0)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        if batch % 2:
            values.append(round(float(params), 3))
    return values


sgd = optax.sgd(0.1)
inside = train(optax.MultiSteps(optax.apply_if_finite(sgd, 5), 2))
steps = optax.MultiSteps(sgd, 2).gradient_transformation()
around = train(optax.apply_if_finite(steps, 5))
skipped = train(optax.MultiSteps(sgd, 2, should_skip_update_fn=optax.skip_not_finite))
print("MultiSteps(apply_if_finite(sgd)):", *inside)
print("apply_if_finite(MultiSteps(sgd)):", *around)
print("MultiSteps(sgd, should_skip_update_fn=skip_not_finite):", *skipped)
assert inside[:6] == [0.9] * 6 and all(x != x for x in inside[6:]), inside
assert around == skipped == [0.9, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3], (around, skipped)
PYTHON
