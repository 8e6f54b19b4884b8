#!/usr/bin/env bash
# jax 0.10.2: jax.nn.one_hot of uint8, int8 or uint16 ids gives rows with two ones.
#
# It compares the ids with the numbers of the classes, and makes those numbers in the dtype of the
# ids. Where there are more classes than that dtype has values, they start again, so class 261 of
# uint8 ids is class 5 too. Ids of text in bytes, stored as uint8, with ByT5's vocabulary of 384,
# and token files of uint16 with a vocabulary of more than 65536, are of this kind, and all their
# ids fit into the dtype. A cross entropy by one_hot then is larger by the loss of a token that is
# not there, and trains that token. Nothing is raised, and the same ids as int32 are right.
#
# Seen on 2026-11-30 with jax 0.10.2, Python 3.11:
#   uint8 5 of 384 classes: ones at [5, 261]
#   int8 5 of 384 classes: ones at [5, 261]
#   uint16 5 of 70000 classes: ones at [5, 65541]
#   int32 5 of 384 classes: ones at [5]
#   cross entropy of equal logits for 384 classes: 5.95 with int32, 11.90 with uint8
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import jax
import jax.numpy as jnp

found = {}
for name, classes in (("uint8", 384), ("int8", 384), ("uint16", 70000), ("int32", 384)):
    row = jax.nn.one_hot(jnp.array(5, name), classes)
    found[name] = jnp.nonzero(row)[0].tolist()
    print(f"{name} 5 of {classes} classes: ones at {found[name]}")


def cross_entropy(ids):
    labels = jax.nn.one_hot(ids, 384)
    return float(-(labels * jax.nn.log_softmax(jnp.zeros(384))).sum(axis=-1).mean())


# The bytes of a text as ids of ByT5, which has three special tokens before them.
ids = jnp.frombuffer(b"A text in bytes.", jnp.uint8) + jnp.uint8(3)
right, wrong = cross_entropy(ids.astype(jnp.int32)), cross_entropy(ids)
print(
    f"cross entropy of equal logits for 384 classes: {right:.2f} with int32, {wrong:.2f} with uint8"
)
assert found["int32"] == [5], found
assert found["uint8"] == found["int8"] == [5, 261] and found["uint16"] == [5, 65541], found
assert abs(wrong - 2 * right) < 1e-3, (right, wrong)
PYTHON
