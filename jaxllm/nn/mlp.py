"""Feed-forward layers, and activation functions by their config.json names.

`down` is passed in ready-made, so that T5 can keep it in float32.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.nn.linear import Linear, declare_axes, dropout, split_key
from jaxllm.nn.platform.products import before_product


class MLP(nnx.Module):
    """Feed-forward layer ``down(act(up(x)))``: GPT-2 and T5 v1.0."""

    def __init__(
        self, up: Linear, down: Linear, act: Callable[[Array], Array], *, dropout_rate: float = 0.0
    ):
        declare_axes("mlp", up=up, down=down)
        self.up, self.down, self.act, self.dropout_rate = up, down, act, dropout_rate

    def __call__(
        self, x: Float[Array, "B T D"], *, key: jax.Array | None = None
    ) -> Float[Array, "B T D"]:
        key, up_key, down_key = split_key(key, 3)
        y = dropout(self.act(self.up(x, up_key)), self.dropout_rate, key)
        return self.down(before_product(y), down_key)


class GatedMLP(nnx.Module):
    """Gated feed-forward layer ``down(act(gate(x)) * up(x))``: SwiGLU in Llama, gated GELU in
    T5 v1.1 (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(
        self,
        gate: Linear,
        up: Linear,
        down: Linear,
        act: Callable[[Array], Array],
        *,
        dropout_rate: float = 0.0,
    ):
        declare_axes("mlp", gate=gate, up=up, down=down)
        self.gate, self.up, self.down = gate, up, down
        self.act, self.dropout_rate = act, dropout_rate

    def __call__(
        self, x: Float[Array, "B T D"], *, key: jax.Array | None = None
    ) -> Float[Array, "B T D"]:
        key, gate_key, up_key, down_key = split_key(key, 4)
        gate, up = self.gate(x, gate_key, self), self.up(x, up_key, self)
        y = dropout(self.act(gate) * up, self.dropout_rate, key)
        return self.down(before_product(y), down_key)


# By transformers' names: all except "prelu" and "xielu", which have weights.
FUNCTIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),  # by erf
    "gelu_10": lambda x: jnp.clip(jax.nn.gelu(x, approximate=False), -10, 10),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),  # by tanh (Hendrycks & Gimpel 2016)
    "hardswish": jax.nn.hard_swish,
    # Laplace activation, a bounded approximation of relu2 (Ma et al. 2022, arXiv:2209.10655).
    "laplace": lambda x: 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
    "leaky_relu": jax.nn.leaky_relu,
    "linear": lambda x: x,
    "mish": jax.nn.mish,
    "quick_gelu": lambda x: x * jax.nn.sigmoid(1.702 * x),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
    "relu6": jax.nn.relu6,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrtsoftplus": lambda x: jnp.sqrt(jax.nn.softplus(x)),
    "tanh": jnp.tanh,
}
OTHER_NAMES = {
    "gelu_python": "gelu",
    "gelu_accurate": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_python_tanh": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "swish": "silu",
}


@dataclasses.dataclass(frozen=True)
class Activation:
    """Activation function by its name in `FUNCTIONS`, so that a model, which has one, can be
    pickled; functions of `jax.nn` are jitted objects, which pickle refuses."""

    name: str

    def __call__(self, x: Float[Array, ...]) -> Float[Array, ...]:
        return FUNCTIONS[self.name](x)


ACTIVATIONS: dict[str, Activation] = {
    **{name: Activation(name) for name in FUNCTIONS},
    **{other: Activation(name) for other, name in OTHER_NAMES.items()},
}
"""Activations by their names in config.json."""


def activation(name: str, *, where: str) -> Activation:
    """Looks up an activation function by name; `where` is the config field, for the error.

    >>> float(activation("relu", where="hidden_act")(jnp.float32(-1.0)))
    0.0
    """
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"{where}: unknown activation {quoted(name)}; known: {known}")
    return ACTIVATIONS[name]
