#!/usr/bin/env bash
# tokamax 0.0.12: labels of -100 add nothing to the loss, but they do train the model.
#
# linear_softmax_cross_entropy_loss multiplies the logarithms of the probabilities by the label as a
# one-hot row. A label outside the vocabulary, such as the usual -100 of tokens without a target,
# has a row of zeros, so the value of the loss leaves these tokens out. The gradient is not that of
# this value. It has a formula of its own, the probabilities minus the one-hot row, which for such a
# token leaves the probabilities. Each step pushes its logits down, and so the padding and the
# prompt train the weights and what is below them. The curve of the loss does not show it.
#
# Seen on 2026-11-30 with tokamax 0.0.12 and jax 0.10.2, Python 3.11, on a CPU (tokens 3 and 4 of 4
# have the label -100; by automatic differentiation of the same value in jax their gradient is 0):
#   loss: 11.39 of four tokens, 11.39 of the two with a label
#   largest gradient of the tokens: 2.49 2.19 1.70 1.37
#   gradient of the weights: differs from that of the two tokens by up to 1.03
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install tokamax==0.0.12 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp
import tokamax


def loss(x, labels, weights):
    return tokamax.linear_softmax_cross_entropy_loss(x, labels, weights, implementation="xla")


def plain(x, labels, weights):
    """The same value in jax."""
    return -(jax.nn.one_hot(labels, weights.shape[1]) * jax.nn.log_softmax(x @ weights)).sum()


keys = jax.random.split(jax.random.key(0), 8)
x = jax.random.normal(keys[5], (4, 8))
weights = jax.random.normal(keys[6], (8, 16))
labels = jnp.array([1, 2, -100, -100])
gradient = jax.value_and_grad(loss, argnums=(0, 2))
four, (tokens, of_weights) = gradient(x, labels, weights)
two, (_, of_weights_two) = gradient(x[:2], labels[:2], weights)
largest = jnp.abs(tokens).max(axis=-1)
difference = float(jnp.abs(of_weights - of_weights_two).max())
print(f"loss: {four:.2f} of four tokens, {two:.2f} of the two with a label")
print("largest gradient of the tokens:", *(f"{value:.2f}" for value in largest))
print(f"gradient of the weights: differs from that of the two tokens by up to {difference:.2f}")
reference, (expected, _) = jax.value_and_grad(plain, argnums=(0, 2))(x, labels, weights)
assert abs(reference - four) < 1e-3 and jnp.all(expected[2:] == 0), (reference, expected)
assert abs(four - two) < 1e-3, (four, two)
assert jnp.all(largest[2:] > 1.0) and difference > 0.5, (largest, difference)
PYTHON
