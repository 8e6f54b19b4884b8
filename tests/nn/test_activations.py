"""Activations against the reference's values on a grid."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
from parity_data import load_case

from jaxllm.common.errors import ConfigError
from jaxllm.nn.mlp import ACTIVATIONS, activation

TABLES = load_case("tables").calls
STORED = [name.removeprefix("act_") for name in TABLES if name.startswith("act_")]


@pytest.mark.in_ci("gelu", "gelu_fast")
@pytest.mark.parametrize("name", STORED)
def test_stored_values(name):
    call = TABLES[f"act_{name}"]
    actual = activation(name, where="hidden_act")(jnp.asarray(call.inputs["x"]))
    np.testing.assert_allclose(actual, call.outputs["y"], rtol=2e-5, atol=1e-6)


@pytest.mark.ci
def test_the_others_by_their_formulas():
    x = np.linspace(-6, 6, 49).astype(np.float32)
    erf = np.vectorize(math.erf)
    formulas = {
        "gelu_accurate": x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "gelu_python_tanh": x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        "hardswish": x * np.clip(x + 3, 0, 6) / 6,
        "laplace": 0.5 * (1 + erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
        "sqrtsoftplus": np.sqrt(np.log1p(np.exp(x))),
    }
    assert formulas.keys() | set(STORED) == ACTIVATIONS.keys()
    for name, expected in formulas.items():
        np.testing.assert_allclose(ACTIVATIONS[name](jnp.asarray(x)), expected, atol=2e-6)


@pytest.mark.in_ci("gelu", "gelu_new", "laplace")
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_keeps_the_dtype(name):
    assert ACTIVATIONS[name](jnp.ones(3, jnp.bfloat16)).dtype == jnp.bfloat16


def test_unknown_names_the_field():
    with pytest.raises(ConfigError, match="feed_forward_proj: unknown activation 'prelu'; known:"):
        activation("prelu", where="feed_forward_proj")
