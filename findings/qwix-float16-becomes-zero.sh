#!/usr/bin/env bash
# qwix 0.1.8 quantizes float16 weights to int8 as zeros.
#
# The scale of a tensor or channel is its largest value divided by 127.5. A very small scale is
# replaced by 1, to avoid a division by 0, and the limit is the square root of the smallest normal
# number of the dtype. In float32 and bfloat16 that is 1e-19. In float16 it is 0.0078, so where no
# value reaches 0.996, all of them are divided by 1, and those below 0.5 become 0. The weights of
# linear layers usually are below it, and many checkpoints are published in float16. The quantized
# layer then gives zeros, without an error or a warning. Weights that are cast to float32 first are
# quantized right.
#
# Seen on 2026-11-30 with qwix 0.1.8, flax 0.12.8 and jax 0.10.2, Python 3.11:
#   float32: relative error of the weights 0.009, largest output of the quantized layer 1.3
#   bfloat16: relative error of the weights 0.010, largest output of the quantized layer 1.3
#   float16: relative error of the weights 1.000, largest output of the quantized layer 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install qwix==0.1.8 flax==0.12.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
import qwix
from flax import nnx

weights = 0.05 * jax.random.normal(jax.random.key(0), (64, 32))
inputs = jax.random.normal(jax.random.key(1), (8, 64))
provider = qwix.PtqProvider([qwix.QuantizationRule(weight_qtype=jnp.int8)])
errors, outputs = {}, {}
for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
    name = jnp.dtype(dtype).name
    restored = qwix.dequantize(qwix.quantize(weights.astype(dtype), jnp.int8))
    difference = jnp.linalg.norm(restored.astype(jnp.float32) - weights)
    errors[name] = float(difference / jnp.linalg.norm(weights))
    layer = nnx.Linear(64, 32, use_bias=False, dtype=dtype, param_dtype=dtype, rngs=nnx.Rngs(0))
    layer.kernel[...] = weights.astype(dtype)
    quantized = qwix.quantize_model(layer, provider, inputs.astype(dtype))
    outputs[name] = float(jnp.abs(quantized(inputs.astype(dtype))).max())
    print(
        f"{name}: relative error of the weights {errors[name]:.3f},"
        f" largest output of the quantized layer {outputs[name]:.1f}"
    )
assert errors["float16"] == 1.0 and outputs["float16"] == 0.0, (errors, outputs)
for name in ("float32", "bfloat16"):
    assert errors[name] < 0.02 and outputs[name] > 0.5, (name, errors, outputs)
PYTHON
