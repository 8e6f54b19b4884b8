#!/usr/bin/env bash
# jax 0.10.2: jax.random.categorical never draws the rare tokens of bfloat16 or float16 logits.
#
# It adds noise of the logits' dtype to the logits and takes the largest. In bfloat16 this noise has
# 128 different values from -4.5 to 4.9, so a token whose logit is 10 below the best one never
# comes, however many are drawn, and the best ones come far too often. With a vocabulary of 50000
# tokens whose probabilities fall like 1/rank, a third of all draws should be tokens behind rank
# 1000, and there are none. With mode="high" it is the other way round: the best tokens come far too
# rarely. Logits that are cast to float32 first are drawn right, so the rounding of the logits is
# not the cause.
#
# Seen on 2026-11-30 with jax 0.10.2, Python 3.11 (1000 draws of 50000 tokens, on a CPU):
#   expected: 0.26 of the draws in the first 10 tokens, 0.34 behind the first 1000
#   float32: 0.27 in the first 10, 0.35 behind the first 1000
#   bfloat16: 0.69 in the first 10, 0.00 behind the first 1000
#   bfloat16 cast to float32: 0.26 in the first 10, 0.35 behind the first 1000
#   float16: 0.50 in the first 10, 0.00 behind the first 1000
#   bfloat16 with mode="high": 0.02 in the first 10, 0.89 behind the first 1000
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
from functools import partial

import jax
import jax.numpy as jnp

probabilities = 1 / jnp.arange(1.0, 50001.0)
probabilities /= probabilities.sum()
logits = jnp.log(probabilities)
keys = jax.random.split(jax.random.key(0), 1000)


@partial(jax.jit, static_argnums=1)
def draw(logits, mode):
    one = lambda key: jax.random.categorical(key, logits, mode=mode)
    return jax.lax.map(one, keys, batch_size=16)


def shares(name, logits, mode=None):
    tokens = draw(logits, mode)
    first, behind = float((tokens < 10).mean()), float((tokens >= 1000).mean())
    print(f"{name}: {first:.2f} in the first 10, {behind:.2f} behind the first 1000")
    return first, behind


expected = float(probabilities[:10].sum()), float(probabilities[1000:].sum())
print(
    f"expected: {expected[0]:.2f} of the draws in the first 10 tokens,"
    f" {expected[1]:.2f} behind the first 1000"
)
bfloat16, float16 = logits.astype(jnp.bfloat16), logits.astype(jnp.float16)
wide = shares("float32", logits)
narrow = shares("bfloat16", bfloat16)
cast = shares("bfloat16 cast to float32", bfloat16.astype(jnp.float32))
half = shares("float16", float16)
high = shares('bfloat16 with mode="high"', bfloat16, "high")
for found in (wide, cast):
    assert all(abs(x - y) < 0.05 for x, y in zip(found, expected)), (found, expected)
assert narrow[0] > 0.6 and narrow[1] == 0, narrow
assert half[0] > 0.35 and half[1] < 0.01, half
assert high[0] < 0.15, high
noise = jax.random.gumbel(jax.random.key(0), (1000000,), jnp.bfloat16)
assert len(jnp.unique(noise)) == 128 and -4.5 < noise.min() and noise.max() < 4.9, noise
PYTHON
