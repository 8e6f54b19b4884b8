"""Peak memory of loading in two processes: half the model each, and one tensor."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from devices import on_processes
from flax import nnx
from memory_model import CONFIG, MB

from jaxllm.checkpoint.safetensors import write_safetensors
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters

# VmHWM belongs to this process alone; getrusage's figure begins with its parent's.
MEASURE = """
import re, sys
address, index, folder, shared = sys.argv[1:]
import jax, jax.numpy as jnp
if shared == "True":
    jax.distributed.initialize(address, 2, int(index))
import jaxllm
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
mesh = jaxllm.make_mesh(tensor=2, data=1) if shared == "True" else None
if mesh is not None:
    assert mesh.is_multi_process and jax.local_device_count() == 1
jnp.ones((1000, 1000)).block_until_ready()
before = peak()
model, _ = jaxllm.load(folder, mesh=mesh)
jax.block_until_ready(jax.tree.leaves(model))
print(before, peak(), sum(x.nbytes for x in jax.tree.leaves(model)))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_each_process(tmp_path):
    spec = model_spec(CONFIG)
    shapes = parameters(nnx.eval_shape(lambda: spec.make(spec.config, rngs=None)))
    tensors = {
        e.tensor: np.full(shapes[e.parameters[0]].shape, 0.01, np.float32)
        for e in spec.table.for_model(shapes)
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))

    def measured(shared: bool) -> list[list[int]]:
        outputs = on_processes(MEASURE, tmp_path, shared, processes=2 if shared else 1, devices=1)
        return [list(map(int, output.split())) for output in outputs]

    ((before, peak, model),) = measured(False)
    largest = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    assert model > 240 * MB
    print(
        f"\nalone: {model / MB:.0f} MB of weights, {(peak - before) / MB:.0f} MB more at the peak"
    )
    assert peak - before < model + largest + 40 * MB
    for before, peak, full in measured(True):
        assert full == model
        print(f"shared by two: {(peak - before) / MB:.0f} MB more at the peak in each")
        # Half of the weights, the largest tensor's pages and its half in the making.
        assert peak - before < model / 2 + largest * 3 / 2 + 40 * MB
