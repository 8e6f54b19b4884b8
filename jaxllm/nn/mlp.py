"""Feed-forward layers, and activation functions by their config.json names.

`down` is passed in ready-made, so that T5 can keep it in float32. All activations are functions of
this module, so that a model, which refers to one, can be pickled: functions of `jax.nn` are jitted
objects, which pickle refuses.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.common.errors import ConfigError, quoted
from jaxllm.nn.linear import Linear, declare_axes, dropout, split_key


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
        return self.down(dropout(self.act(self.up(x, up_key)), self.dropout_rate, key), down_key)


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
        y = self.act(self.gate(x, gate_key)) * self.up(x, up_key)
        return self.down(dropout(y, self.dropout_rate, key), down_key)


def gelu_new(x: jax.Array) -> jax.Array:
    """GELU, tanh approximation (Hendrycks & Gimpel 2016): used by GPT-2 and T5 v1.1."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """Exact GELU (erf). The default of `jax.nn.gelu` is the tanh approximation."""
    return jax.nn.gelu(x, approximate=False)


def gelu_10(x: jax.Array) -> jax.Array:
    return jnp.clip(gelu(x), -10, 10)


def quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


def silu(x: jax.Array) -> jax.Array:
    return jax.nn.silu(x)


def relu(x: jax.Array) -> jax.Array:
    return jax.nn.relu(x)


def relu6(x: jax.Array) -> jax.Array:
    return jax.nn.relu6(x)


def leaky_relu(x: jax.Array) -> jax.Array:
    return jax.nn.leaky_relu(x)


def hard_swish(x: jax.Array) -> jax.Array:
    return jax.nn.hard_swish(x)


def mish(x: jax.Array) -> jax.Array:
    return jax.nn.mish(x)


def sigmoid(x: jax.Array) -> jax.Array:
    return jax.nn.sigmoid(x)


def tanh(x: jax.Array) -> jax.Array:
    return jnp.tanh(x)


def relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


def sqrt_softplus(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jax.nn.softplus(x))


def identity(x: jax.Array) -> jax.Array:
    return x


def laplace(x: jax.Array) -> jax.Array:
    """Laplace activation, a bounded approximation of relu2 (Ma et al. 2022, arXiv:2209.10655)."""
    return 0.5 * (1 + jax.lax.erf((x - 0.707107) / (0.282095 * math.sqrt(2))))


# All names in transformers except "prelu" and "xielu", which have weights.
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_python": gelu,
    "gelu_10": gelu_10,
    "gelu_new": gelu_new,
    "gelu_accurate": gelu_new,
    "gelu_fast": gelu_new,
    "gelu_python_tanh": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "hardswish": hard_swish,
    "laplace": laplace,
    "leaky_relu": leaky_relu,
    "linear": identity,
    "mish": mish,
    "quick_gelu": quick_gelu,
    "relu": relu,
    "relu2": relu2,
    "relu6": relu6,
    "sigmoid": sigmoid,
    "silu": silu,
    "sqrtsoftplus": sqrt_softplus,
    "swish": silu,
    "tanh": tanh,
}


def activation(name: str, *, where: str) -> Callable[[jax.Array], jax.Array]:
    """Looks up an activation function by name; `where` is the config field, for the error.

    >>> float(activation("relu", where="hidden_act")(jnp.float32(-1.0)))
    0.0
    """
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"{where}: unknown activation {quoted(name)}; known: {known}")
    return ACTIVATIONS[name]
