"""The models as Flax is going to have modules: pytrees without a graph."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT, SUPPORT

SCRIPT = """
import jax, numpy as np
from flax import config
import jaxllm
from parity_data import load_case
from parity_runs import distances, forward, model_of

assert not config.nnx_graph_mode and not config.nnx_graph_updates
jax.config.update("jax_default_matmul_precision", "highest")
for name in ("llama_bias", "t5_v11"):
    calls, model = load_case(name).calls, model_of(name)
    found = distances(calls["plain"], forward(model, calls["plain"]), 2.0)
    assert max(found.values()) < 1e-4, (name, found)
    if name != "llama_bias":
        continue
    loss, grads = jax.jit(jax.value_and_grad(lambda m: m(**calls["labels"].inputs).loss))(model)
    np.testing.assert_allclose(loss, calls["labels"].outputs["loss"], atol=1e-5)
    better = jax.tree.map(lambda x, g: x - 0.01 * g, model, grads)
    assert better(**calls["labels"].inputs).loss < loss
inputs = dict(calls["generate"].inputs)
out = jaxllm.generate(
    model, **inputs | {"max_new_tokens": int(inputs["max_new_tokens"])}, eos_token_id=None
)
np.testing.assert_array_equal(out.sequences, calls["generate"].outputs["sequences"])
print("as expected")
"""


@pytest.mark.ci
def test_without_the_graph():
    """The other mode, Flax's default of today, is the one that all other tests run in."""
    environment = os.environ | {
        "NNX_GRAPH_MODE": "false",
        "NNX_GRAPH_UPDATES": "false",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.stdout == "as expected\n", done.stderr[-2000:]
