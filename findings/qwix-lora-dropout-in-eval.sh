#!/usr/bin/env bash
# qwix 0.1.8: the dropout of a LoRA adapter stays on after model.eval().
#
# LoraProvider(dropout=...) drops inputs of the adapter in each call of the model. Flax's switches
# for that, model.eval() of nnx and an argument deterministic=True of linen, turn off the dropout of
# the model's own layers, and leave that of the adapter on. So evaluation and generation are random
# after training, and the same tokens have other logits in each call. The adapter starts as zeros,
# so a check before training shows nothing. What helps is to apply a provider with dropout=0.0 to
# the trained model: it keeps the trained adapter.
#
# Seen on 2026-11-30 with qwix 0.1.8, flax 0.12.8 and jax 0.10.2, Python 3.11 (the number of
# different outputs of 8 calls with one input, after eval()):
#   nnx: 1 of a new adapter, 5 of a trained one, 1 of a trained one with dropout=0.0 applied again
#   linen: 4 of a trained one
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
from flax import linen, nnx

inputs = jnp.ones((1, 8))


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.dense(self.dropout(x))


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, x, deterministic):
        x = linen.Dropout(0.5)(x, deterministic=deterministic)
        return linen.Dense(8)(x)


def provider(dropout):
    return qwix.LoraProvider(rank=2, alpha=2.0, dropout=dropout)


def outputs(call):
    """The number of different results of 8 calls."""
    return len({float(call(i)[0, 0]) for i in range(8)})


model = qwix.apply_lora_to_model(Layer(nnx.Rngs(0)), provider(0.5), inputs, rngs=nnx.Rngs(0))
model.set_attributes(qwix_rngs=nnx.Rngs(dropout=0))
model.eval()
new = outputs(lambda i: model(inputs))
# Training makes the adapter differ from zero. Any values will do here.
nnx.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.LoRAParam)))
model.eval()
trained = outputs(lambda i: model(inputs))
again = qwix.apply_lora_to_model(model, provider(0.0), inputs, rngs=nnx.Rngs(0))
assert all((x == 1).all() for x in jax.tree.leaves(nnx.state(again, nnx.LoRAParam)))
again.eval()
without = outputs(lambda i: again(inputs))

linen_model = qwix.apply_lora_to_model(LinenLayer(), provider(0.5))
keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
variables = linen_model.init(keys, inputs, deterministic=True)
variables = jax.tree.map(jnp.ones_like, variables)
in_linen = outputs(
    lambda i: linen_model.apply(
        variables, inputs, deterministic=True, rngs={"dropout": jax.random.key(i)}
    )
)
print(
    f"nnx: {new} of a new adapter, {trained} of a trained one,"
    f" {without} of a trained one with dropout=0.0 applied again"
)
print(f"linen: {in_linen} of a trained one")
assert new == without == 1 and trained > 1 and in_linen > 1, (new, without, trained, in_linen)
PYTHON
