"""Feed-forward layers. `down` is passed in ready-made, so that T5 can keep it in float32."""

from __future__ import annotations

from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.nn.dropout import dropout, split_key
from jaxllm.nn.linear import Linear


class MLP(nnx.Module):
    """Feed-forward layer ``down(act(up(x)))``: GPT-2 and T5 v1.0."""

    def __init__(
        self, up: Linear, down: Linear, act: Callable[[Array], Array], *, dropout_rate: float = 0.0
    ):
        self.up, self.down, self.act, self.dropout_rate = up, down, act, dropout_rate

    products = 1
    """Products that read its input."""

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
        self.gate, self.up, self.down = gate, up, down
        self.act, self.dropout_rate = act, dropout_rate

    products = 2
    """Products that read its input."""

    def __call__(
        self,
        x: Float[Array, "B T D"],
        up_input: Float[Array, "B T D"] | None = None,
        *,
        key: jax.Array | None = None,
    ) -> Float[Array, "B T D"]:
        """Computes x; `up` reads `up_input`, if given, which equals x."""
        key, gate_key, up_key, down_key = split_key(key, 4)
        up_input = x if up_input is None else up_input
        y = self.act(self.gate(x, gate_key)) * self.up(up_input, up_key)
        return self.down(dropout(y, self.dropout_rate, key), down_key)
