"""Activation functions under the names that config.json gives them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxllm.errors import ConfigError


def gelu_new(x: jax.Array) -> jax.Array:
    """GELU by tanh, as GPT-2 and T5 v1.1 were trained with (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """GELU by erf. `jax.nn.gelu` alone is the tanh one."""
    return jax.nn.gelu(x, approximate=False)


def quick_gelu(x: jax.Array) -> jax.Array:
    return x * jax.nn.sigmoid(1.702 * x)


def relu2(x: jax.Array) -> jax.Array:
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "gelu_fast": gelu_new,
    "gelu_pytorch_tanh": gelu_new,
    "quick_gelu": quick_gelu,
    "relu": jax.nn.relu,
    "relu2": relu2,
    "relu6": jax.nn.relu6,
    "leaky_relu": jax.nn.leaky_relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "mish": jax.nn.mish,
    "tanh": jnp.tanh,
    "linear": lambda x: x,
}


def activation(name: str, *, where: str) -> Callable[[jax.Array], jax.Array]:
    """The function of that name; `where` names the config field in the error.

    >>> activation("silu", where="hidden_act") is jax.nn.silu
    True
    """
    if name not in ACTIVATIONS:
        known = ", ".join(sorted(ACTIVATIONS))
        raise ConfigError(f"{where}: unknown activation {name!r}; known: {known}")
    return ACTIVATIONS[name]
