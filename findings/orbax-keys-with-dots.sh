#!/usr/bin/env bash
# orbax-checkpoint 0.12.8 saves two arrays of a tree in one place if a key holds a dot.
#
# An array is stored under the keys of its path, joined by dots. A key with a dot, as in the flat
# names of Hugging Face, is not escaped, so "norm" inside "model" and "model.norm" at the top have
# the same name. Saving both gives no error. Restoring gives back the complete tree, with and
# without a target, and it has one of the two arrays in both places. Which one is not determined.
# A slash, orbax's other separator, does no harm.
#
# Seen on 2026-11-29 with orbax-checkpoint 0.12.8 and jax 0.10.2, Python 3.11:
#   model/norm 1.0 and "model.norm" 2.0: restored as equal arrays
#   model/norm 1.0 and "model/norm" 2.0: restored as 1.0 and 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install orbax-checkpoint==0.12.8 jax==0.10.2
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python - <<'PYTHON'
import pathlib

import jax.numpy as jnp
import orbax.checkpoint as ocp


def restored(key, folder, with_target):
    """Both values of a tree that has norm inside of model, and another array under the key."""
    tree = {"model": {"norm": jnp.full(3, 1.0)}, key: jnp.full(3, 2.0)}
    checkpointer = ocp.StandardCheckpointer()
    path = pathlib.Path(folder).absolute()
    checkpointer.save(path, tree)
    checkpointer.wait_until_finished()
    back = checkpointer.restore(path, *([tree] if with_target else []))
    return float(back["model"]["norm"][0]), float(back[key][0])


for with_target in (False, True):
    found = restored("model.norm", f"dot{with_target}", with_target)
    assert found in [(1.0, 1.0), (2.0, 2.0)], found
print('model/norm 1.0 and "model.norm" 2.0: restored as equal arrays')
for with_target in (False, True):
    found = restored("model/norm", f"slash{with_target}", with_target)
    assert found == (1.0, 2.0), found
print('model/norm 1.0 and "model/norm" 2.0: restored as 1.0 and 2.0')
PYTHON
