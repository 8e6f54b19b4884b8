"""Runs the calls of tests/data/parity on our models and compares with the reference."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from parity_data import Call, load_case

import jaxllm

NOT_FORWARD = ("generate", "grad", "rope_")


@functools.cache
def model_of(name: str) -> Any:
    return jaxllm.load(load_case(name).folder)[0]


def forward(model: Any, call: Call, **options: Any) -> Any:
    """The call with every output that the reference stored."""
    arguments = {k: int(v) if v.ndim == 0 else v for k, v in call.inputs.items()}
    return model(
        **arguments,
        output_hidden_states=any("hidden_states/" in key for key in call.outputs),
        output_attentions=any("attentions/" in key for key in call.outputs),
        **options,
    )


def distances(call: Call, out: Any, std: float) -> dict[str, float]:
    """Largest difference of each stored output at real positions, over the logits' deviation.

    Hidden states and attentions are compared on their own scale.
    """
    actual = {}
    for key, expected in call.outputs.items():
        name, *layer = key.split("/")
        result = getattr(out, name)
        result = np.asarray(result[int(layer[0])] if layer else result)
        assert result.shape == expected.shape, (key, result.shape, expected.shape)
        assert result.dtype == expected.dtype, (key, result.dtype)
        scale = std if name == "logits" else 1.0
        actual[key] = _at_real(np.abs(result - expected), real_of(call, name)).max() / scale
    return actual


def real_of(call: Call, name: str) -> np.ndarray | None:
    if name.startswith("encoder"):
        mask = call.inputs.get("attention_mask")
        return None if mask is None else mask.astype(bool)
    return call.real


def _at_real(x: np.ndarray, real: np.ndarray | None) -> np.ndarray:
    if real is not None and x.ndim == 2 and len(x) == real.size:  # router logits [B * T, E]
        return x[real.reshape(-1)]
    if real is None or x.ndim < 3 or x.shape[0] != real.shape[0]:
        return x
    if x.ndim == 4:  # attentions [B, N, T, S]
        x = np.moveaxis(x, 1, 2)
    return x[real] if x.shape[1] == real.shape[1] else x
