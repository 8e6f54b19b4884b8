"""Mixture of experts: a router sends each token to a few of many feed-forward layers.

The layer's output is the sum of the chosen experts' outputs, weighted by the router (Shazeer et al.
2017, arXiv:1701.06538). No token is dropped. Weights of all experts are stacked: [expert, out, in].
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxllm.nn.linear import normal
from jaxllm.nn.platform.experts import by_tiles, grouped_product
from jaxllm.nn.platform.products import times_transposed, varying
from jaxllm.parallel.sharding import (
    FSDP,
    TENSOR,
    all_gather_fsdp,
    context_mesh,
    logical_axes,
    parameter_path,
    partition_spec,
    shard_map_is_checked,
)

Activation = Callable[[Array], Array]


class Router(nnx.Module):
    """Linear layer whose outputs choose the experts of a token, and their weights in the sum.

    The weights are the `top_k` largest of a float32 softmax, divided by their sum if `normalized`.
    They are rounded to the compute dtype unless `keeps_float32`. A router is neither quantized nor
    adapted by LoRA.
    """

    def __init__(
        self,
        features: int,
        experts: int,
        *,
        top_k: int,
        normalized: bool,
        keeps_float32: bool,
        std: float = 0.02,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.weight = normal(rngs, (experts, features), std, param_dtype)
        self.top_k, self.normalized, self.keeps_float32 = top_k, normalized, keeps_float32
        self.dtype = jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T E"]:
        """Logits of the experts."""
        weight = all_gather_fsdp(self.weight[...].astype(self.dtype), None, "embed")
        return times_transposed(x.astype(self.dtype), weight)

    def choose(
        self, logits: Float[Array, "B T E"]
    ) -> tuple[Int[Array, "B T k"], Float[Array, "B T k"]]:
        """The experts of each token, and their weights."""
        scores = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        weights, experts = jax.lax.top_k(scores, self.top_k)
        if self.normalized:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        return experts, weights if self.keeps_float32 else weights.astype(self.dtype)


class ExpertLinear(nnx.Module):
    """The same linear layer of all experts, ``y = x W[e]^T``, without biases."""

    def __init__(
        self,
        experts: int,
        in_features: int,
        out_features: int,
        *,
        std: float = 0.02,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.weight = normal(rngs, (experts, out_features, in_features), std, param_dtype)
        self.dtype = jnp.dtype(dtype)

    @property
    def matrices(self) -> Any:
        """A pytree of arrays whose first axis is that of the experts; see `product`."""
        return self.weight[...]


class MixtureOfExperts(nnx.Module):
    """Feed-forward layer of experts ``down(act(gate(x)) * up(x))``, some of which a router chooses
    for each token.

    In training with a `jitter` j, the input is multiplied by random numbers from 1 - j to 1 + j
    (Fedus et al. 2021, arXiv:2101.03961). `platform` decides how products are computed, and no
    number.
    """

    def __init__(
        self,
        router: Router,
        gate: ExpertLinear,
        up: ExpertLinear,
        down: ExpertLinear,
        act: Activation,
        *,
        jitter: float = 0.0,
        platform: str = "cpu",
    ):
        self.router = router
        self.expert_gate, self.expert_up, self.expert_down = gate, up, down
        self.act, self.jitter, self.platform = act, jitter, platform

    @property
    def top_k(self) -> int:
        """Number of experts of a token."""
        return self.router.top_k

    def __call__(
        self, x: Float[Array, "B T D"], *, key: Array | None = None
    ) -> tuple[Float[Array, "B T D"], Float[Array, "B T E"]]:
        """The layer's output, and the router's logits."""
        if self.jitter and key is not None:
            low, high = 1 - self.jitter, 1 + self.jitter
            x = x * jax.random.uniform(key, x.shape, x.dtype, low, high)
        logits = self.router(x)
        experts, weights = self.router.choose(logits)
        x = x.astype(self.expert_gate.dtype)
        return self.run_experts(x, experts, weights), logits

    def run_experts(
        self,
        x: Float[Array, "B T D"],
        experts: Int[Array, "B T k"],
        weights: Float[Array, "B T k"],
    ) -> Float[Array, "B T D"]:
        """Sum of the outputs of each token's experts, times their weights."""
        layers = {
            name: getattr(self, name).matrices
            for name in ("expert_gate", "expert_up", "expert_down")
        }
        compute = functools.partial(weighted_sum, act=self.act, platform=self.platform)
        if context_mesh() is None:
            return compute(x, experts, weights, layers)
        return on_mesh(compute, x, experts, weights, layers)


def weighted_sum(
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    layers: dict[str, Any],
    first: int | Array = 0,
    *,
    act: Activation,
    platform: str,
) -> Float[Array, "B T D"]:
    """``sum(weights[i] * expert[experts[i]](x))`` over the experts in `layers`, which begin with
    number `first`."""
    top_k, count = experts.shape[-1], len(jax.tree.leaves(layers)[0])
    number = experts.reshape(-1) - first
    number = jnp.where((number >= 0) & (number < count), number, count)  # the last: of another part
    order = jnp.argsort(number)  # stable
    sizes = jnp.bincount(number, length=count).astype(jnp.int32)
    rows = x.reshape(-1, x.shape[-1])[order // top_k]
    are_floats = all(isinstance(layer, jax.Array) for layer in layers.values())
    layers, rows, sizes = varying((layers, rows, sizes), (layers, rows))
    y: Any
    if platform == "tpu" and are_floats and not shard_map_is_checked():
        y = by_kernel(layers, rows, sizes, act)
    else:
        y = by_tiles(ExpertFunction(act), layers, rows, sizes)
    y = y.astype(weights.dtype) * weights.reshape(-1)[order][:, None]
    y = y[jnp.argsort(order)].reshape(*experts.shape, -1)
    return jnp.sum(y.astype(jnp.float32), axis=-2).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class ExpertFunction:
    """One expert as a function of its matrices and of rows; equal functions share programs."""

    act: Activation

    def __call__(self, layers: dict[str, Any], x: Float[Array, "M D"]) -> Float[Array, "M D"]:
        y = self.act(product(x, layers["expert_gate"])) * product(x, layers["expert_up"])
        return product(y, layers["expert_down"])


def product(x: Float[Array, "M I"], matrix: Any) -> Float[Array, "M O"]:
    """``x W^T`` of a float matrix or a quantized one."""
    if isinstance(matrix, jax.Array):
        return times_transposed(x, matrix.astype(x.dtype))
    return matrix.times(x)


def by_kernel(
    layers: dict[str, Array], x: Float[Array, "M D"], sizes: Int[Array, " E"], act: Activation
) -> Float[Array, "M D"]:
    """`by_tiles` of float experts with a TPU's kernel."""

    def product(x: Array, name: str) -> Array:
        return grouped_product(x, layers[name].astype(x.dtype), sizes)

    return product(act(product(x, "expert_gate")) * product(x, "expert_up"), "expert_down")


def on_mesh(
    compute: Callable[..., Array],
    x: Float[Array, "B T D"],
    experts: Int[Array, "B T k"],
    weights: Float[Array, "B T k"],
    layers: dict[str, Any],
) -> Float[Array, "B T D"]:
    """`weighted_sum` on the mesh that is set: each device computes its experts, and its part of
    their features.

    The tokens of an fsdp group are gathered, since any of them may go to any device's experts. The
    outputs are added up and scattered to the tokens' devices.
    """
    mesh: Any = context_mesh()
    specs = shard_specs(layers, mesh)
    used = {axis for spec in jax.tree.leaves(specs, is_leaf=_is_spec) for axis in spec}
    rows = partition_spec(x.shape, ("rows",), mesh)
    scattered = FSDP in used and rows[0] is not None

    def on_device(x: Array, experts: Array, weights: Array, layers: dict[str, Any]) -> Array:
        first: int | Array = 0
        if FSDP in used:
            first = jax.lax.axis_index(FSDP) * len(jax.tree.leaves(layers)[0])
        if scattered:
            x, experts, weights = (
                jax.lax.all_gather(a, FSDP, tiled=True) for a in (x, experts, weights)
            )
        y = compute(x, experts, weights, layers, first)
        y = jax.lax.psum(y, TENSOR) if TENSOR in used else y
        if scattered:
            return jax.lax.psum_scatter(y, FSDP, tiled=True)
        return jax.lax.psum(y, FSDP) if FSDP in used else y

    run = jax.shard_map(
        on_device, mesh=mesh, in_specs=(rows, rows, rows, specs), out_specs=rows, check_vma=False
    )
    return jax.jit(run)(x, experts, weights, layers)


def _is_spec(x: object) -> bool:
    return isinstance(x, PartitionSpec)


def shard_specs(layers: dict[str, Any], mesh: Any) -> Any:
    """Specs of the experts' arrays on a mesh; an axis that does not divide some of them shards
    none."""
    leaves = jax.tree_util.tree_leaves_with_path(layers)
    axes = []
    for path, leaf in leaves:
        name = parameter_path(path)
        layer, _, part = name.partition(".")
        names = logical_axes(f"mlp.{layer}.matrix.{part}" if part else f"mlp.{layer}.weight")
        axes.append((leaf.shape, names))
    specs = [partition_spec(shape, names, mesh) for shape, names in axes]
    dropped = {
        name
        for (_, names), spec in zip(axes, specs, strict=True)
        for name, axis in zip(names, spec, strict=True)
        if name is not None and axis is None
    }
    kept = [
        partition_spec(shape, [None if name in dropped else name for name in names], mesh)
        for shape, names in axes
    ]
    return jax.tree.unflatten(jax.tree.structure(layers), kept)
