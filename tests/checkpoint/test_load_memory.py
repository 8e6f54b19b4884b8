"""Peak memory of loading: the model and its largest tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import unflatten_dict
from flax_bytes import packed
from memory_model import CONFIG, MB

from jaxllm.checkpoint.safetensors import write_safetensors
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters

# VmHWM belongs to this process alone; getrusage's figure begins with its parent's.
MEASURE = """
import re, sys
import jax, jax.numpy as jnp
import jaxllm
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
jnp.ones((1000, 1000)).block_until_ready()
before = peak()
model, _ = jaxllm.load(sys.argv[1])
jax.block_until_ready(jax.tree.leaves(model))
print(before, peak(), sum(x.nbytes for x in jax.tree.leaves(model)))
"""


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """A checkpoint of 66 million parameters in the given dtype, of torch or of a Flax class."""

    def make(dtype, is_flax: bool = False) -> Path:
        folder = tmp_path_factory.mktemp("model")
        spec = model_spec(CONFIG)
        shapes = parameters(nnx.eval_shape(lambda: spec.make(spec.config, rngs=nnx.Rngs(0))))
        tensors = {
            e.tensor: np.full(shapes[e.parameters[0]].shape, 0.01, dtype)
            for e in spec.table.for_model(shapes)
        }
        if is_flax:
            (folder / "flax_model.msgpack").write_bytes(packed(flax_tree(tensors)))
        else:
            write_safetensors(folder / "model.safetensors", tensors)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        return folder

    return make


def flax_tree(tensors: dict[str, np.ndarray]) -> dict:
    """The tensors of a Llama with Flax's names and layout."""
    flat = {}
    for name, x in tensors.items():
        *path, leaf = name.split(".")
        if x.ndim == 2:
            leaf = "embedding" if path[-1] == "embed_tokens" else "kernel"
        flat[*path, leaf] = np.ascontiguousarray(x.T) if leaf == "kernel" else x
    return unflatten_dict(flat)


@pytest.mark.ci
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_flax", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_peak_memory(write, dtype, is_flax):
    """Twice the file holds the model; the largest tensor is converted before there are others.

    Converting it takes its mapped pages and its values in both precisions.
    """
    folder = write(dtype, is_flax)
    name = "flax_model.msgpack" if is_flax else "model.safetensors"
    file = (folder / name).stat().st_size
    run = [sys.executable, "-c", MEASURE, str(folder)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    before, peak, model = map(int, done.stdout.split())
    assert 200 * MB < model < 2 * file + MB
    print(f"file {file // MB} MB, model {model // MB} MB, peak {(peak - before) // MB} MB")
    largest = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert peak - before < model + largest + 20 * MB
