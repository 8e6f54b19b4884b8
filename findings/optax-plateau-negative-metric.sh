#!/usr/bin/env bash
# optax 0.2.8: reduce_on_plateau never reduces the rate while the metric is negative.
#
# A value counts as an improvement if it is below (1 - rtol) * best. For a best value below 0 that
# bound lies above it, so the same value, and a slightly worse one, counts as an improvement, and
# becomes the new best value. A metric that stands still, or slowly gets worse, is therefore never
# on a plateau. A loss of this kind is a negative reward or a negative score. The same metric moved
# above 0 reduces the rate as it should, and so does rtol=0 with an atol.
#
# Seen on 2026-11-30 with optax 0.2.8 and jax 0.10.2, Python 3.11 (factor 0.5, patience 3, 20
# values):
#   constant 1.0: scale 0.015625
#   constant -1.0: scale 1.0
#   from -1.0 up by 0.00005 a step: scale 1.0
#   constant -1.0 with rtol=0, atol=1e-4: scale 0.015625
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install optax==0.2.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax.numpy as jnp
from optax.contrib import reduce_on_plateau


def scale(values, **tolerance):
    """The factor of the rate after these values of the metric."""
    plateau = reduce_on_plateau(factor=0.5, patience=3, **tolerance)
    update = jnp.ones(())
    state = plateau.init(update)
    for value in values:
        _, state = plateau.update(update, state, value=value)
    return float(state.scale)


above = scale([1.0] * 20)
below = scale([-1.0] * 20)
worse = scale([-1.0 + 0.00005 * i for i in range(20)])
absolute = scale([-1.0] * 20, rtol=0.0, atol=1e-4)
print("constant 1.0: scale", above)
print("constant -1.0: scale", below)
print("from -1.0 up by 0.00005 a step: scale", worse)
print("constant -1.0 with rtol=0, atol=1e-4: scale", absolute)
assert above == absolute == 0.5**6, (above, absolute)
assert below == worse == 1.0, (below, worse)
PYTHON
