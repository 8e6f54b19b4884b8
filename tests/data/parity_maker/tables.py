"""Values of functions, without a model: activations and T5's relative-position buckets."""

from __future__ import annotations

import numpy as np
import torch
from transformers.activations import ACT2FN
from transformers.models.t5.modeling_t5 import T5Attention

from parity_maker.inputs import Inputs

ACTIVATIONS = (
    "gelu",
    "gelu_10",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_pytorch_tanh",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
BUCKETS = ((32, 128), (13, 19), (8, 20), (10, 64), (64, 256), (6, 3))


def tables() -> dict[str, tuple[Inputs, Inputs]]:
    """Activations on a grid, and relative-position buckets of memory - query positions."""
    grid = np.concatenate([np.linspace(-12, 12, 97), [-1e4, 1e4, 1e-6]]).astype(np.float32)
    out = {
        f"act_{name}": ({"x": grid}, {"y": ACT2FN[name](torch.from_numpy(grid)).numpy()})
        for name in ACTIVATIONS
    }
    distance = np.arange(-400, 401)
    for count, far in BUCKETS:
        for both, side in ((True, "bidirectional"), (False, "causal")):
            buckets = T5Attention._relative_position_bucket(
                torch.from_numpy(distance), bidirectional=both, num_buckets=count, max_distance=far
            )
            out[f"buckets_{count}_{far}_{side}"] = (
                {"relative_position": distance},
                {"bucket": buckets.numpy()},
            )
    return out
