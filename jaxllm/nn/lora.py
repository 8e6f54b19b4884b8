"""Linear layer with a trainable low-rank update: LoRA, rsLoRA and DoRA."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxllm.common.errors import InputError
from jaxllm.common.precision import precision_of
from jaxllm.nn.linear import Linear, dropout, kept, product
from jaxllm.parallel.sharding import part_axes


class LoraLinear(Linear):
    """Linear layer with weight ``W + s B A``, where A [r, in] and B [out, r] are trained.

    LoRA (Hu et al. 2021, arXiv:2106.09685) has ``s = alpha / r``, rsLoRA (Kalajdzievski 2023,
    arXiv:2312.03732) ``s = alpha / sqrt(r)``. With a magnitude [out] it is DoRA (Liu et al. 2024,
    arXiv:2402.09353): each row of the sum is scaled to that norm; the norm divided by is a constant
    in the gradient (their section 4.3). Dropout applies to the input of the update, in DoRA also to
    that of the rescaled base term, as in PEFT.

    `weight`, `bias` and `dtype` come from `base` and share its arrays, so their parameter paths do
    not change; the new parameters are `lora_a`, `lora_b` and `lora_magnitude`.

    Layers whose weights are one matrix in the checkpoint share an A, as in PEFT: `a` is then the
    name of the layer in the same module that has it, such as ``"q"``, and `lora_a` is None.
    """

    def __init__(
        self,
        base: Linear,
        a: Float[Array, "R I"] | str,
        b: Float[Array, "O R"],
        *,
        alpha: float,
        rslora: bool = False,
        dropout_rate: float = 0.0,
        magnitude: Float[Array, " O"] | None = None,
    ):
        self.weight = nnx.Param(base.weight[...])
        self.bias = None if base.bias is None else nnx.Param(base.bias[...])
        self.dtype, self.axes = base.dtype, base.axes
        self.lora_a, self.a_layer = (None, a) if isinstance(a, str) else (nnx.Param(a), None)
        self.lora_b = nnx.Param(b)
        self.lora_magnitude = None if magnitude is None else nnx.Param(magnitude)
        self.alpha, self.rslora, self.dropout_rate = float(alpha), rslora, dropout_rate

    @property
    def rank(self) -> int:
        return self.lora_b[...].shape[1]

    @property
    def scale(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def __call__(
        self,
        x: Float[Array, "... I"],
        key: jax.Array | None = None,
        parent: nnx.Module | None = None,
    ) -> Float[Array, "... O"]:
        y = super().__call__(x)
        x = dropout(x.astype(self.dtype), self.dropout_rate, key)
        a, b = (p.astype(self.dtype) for p in (self._a(parent), self.lora_b[...]))
        lowered = kept(product(x, a, part_axes("lora_a", self.axes)))
        change = product(lowered, b, part_axes("lora_b", self.axes)) * self.scale
        if self.lora_magnitude is None:
            return kept(y + change)
        ratio = self._ratio(kept(jax.lax.stop_gradient(row_norms(self._sum(parent)))))
        ratio = jnp.expand_dims(ratio, tuple(range(y.ndim - 1)))
        plain = kept(self.product(x))
        return y + (ratio - 1).astype(self.dtype) * plain + ratio.astype(self.dtype) * change

    def merged(self, parent: nnx.Module | None = None) -> Linear:
        """Plain Linear with the update merged in: summed in float32, cast to the weight's dtype.

        Args:
            parent: the module that has this layer; needed where another layer has the A.
        """
        weight = self._sum(parent)
        if self.lora_magnitude is not None:
            weight = self._ratio(row_norms(weight))[:, None] * weight
        bias = None if self.bias is None else self.bias[...]
        return self.with_arrays(weight.astype(self.weight[...].dtype), bias)

    def _a(self, parent: nnx.Module | None) -> Float[Array, "R I"]:
        layer: Any = self if self.a_layer is None else getattr(parent, self.a_layer, None)
        if layer is None:
            raise InputError(f"parent: give the module that has this layer and {self.a_layer!r}")
        return layer.lora_a[...]

    def _sum(self, parent: nnx.Module | None) -> Float[Array, "O I"]:
        arrays = (self.weight[...], self._a(parent), self.lora_b[...])
        w, a, b = (x.astype(jnp.float32) for x in arrays)
        return w + self.scale * jnp.matmul(b, a, precision=precision_of(b, a))

    def _ratio(self, norms: Float[Array, " O"]) -> Float[Array, " O"]:
        assert self.lora_magnitude is not None
        # A zero row has norm 0: no division by it.
        return self.lora_magnitude[...].astype(jnp.float32) / jnp.where(norms > 0, norms, 1.0)


def row_norms(weight: Float[Array, "O I"]) -> Float[Array, " O"]:
    """Euclidean norm of each row, in float32: the initial DoRA magnitudes."""
    return jnp.linalg.norm(weight.astype(jnp.float32), axis=1)
