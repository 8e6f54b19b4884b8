"""Linear and embedding layers, norms and dropout.

Weights are [out, in], the layout that a decode step reads fastest. Statistics of norms are always
in float32, as in TF and HF: RMSNorm casts the result back before it multiplies by the weight,
LayerNorm after. Dropout is a pure function: applied with a key (training), skipped with None
(inference).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.common.errors import InputError, quoted
from jaxllm.common.precision import precision_of
from jaxllm.nn.platform.products import over_rms, plus_bias, standardized, times_transposed
from jaxllm.nn.platform.training import random_uint16
from jaxllm.parallel.sharding import (
    DATA,
    FSDP,
    ROWS,
    all_gather_fsdp,
    constrain_gradient,
    context_mesh,
    fsdp_axis,
    logical_axes,
    row_shards,
)


def normal(
    rngs: nnx.Rngs | None, shape: tuple[int, ...], std: float, dtype: DTypeLike
) -> nnx.Param[jax.Array]:
    """A parameter drawn from N(0, std^2) in float32, then cast: all dtypes get the same draw.

    Zeros if `rngs` is None: a loader needs shapes only, and random draws are slow to trace.
    """
    if rngs is None:
        return nnx.Param(jnp.zeros(shape, dtype))
    return nnx.Param((jax.random.normal(rngs.params(), shape) * std).astype(dtype))


class Linear(nnx.Module):
    """Linear layer ``y = x W^T + b``, computed in `dtype` for any parameter dtype.

    The dropout key of a call, and the module that has the layer, are used only by the subclass
    `LoraLinear`.
    """

    axes: tuple[str | None, ...]
    """Logical axes of the weight (`jaxllm.parallel.sharding`), which the layer that has this one
    sets; (): the weight is replicated, or XLA chooses how to compute with its shards."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = False,
        std: float = 0.02,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.weight = normal(rngs, (out_features, in_features), std, param_dtype)
        self.bias = nnx.Param(jnp.zeros((out_features,), param_dtype)) if use_bias else None
        self.dtype, self.axes = jnp.dtype(dtype), ()

    def __call__(
        self,
        x: Float[Array, "... I"],
        key: jax.Array | None = None,
        parent: nnx.Module | None = None,
    ) -> Float[Array, "... O"]:
        y = self.product(x.astype(self.dtype))
        return kept(y if self.bias is None else plus_bias(y, self.bias[...].astype(self.dtype)))

    def product(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """``x W^T`` in the layer's dtype."""
        return product(x, self.weight[...].astype(self.dtype), self.axes)

    def with_arrays(self, weight: Array, bias: Array | None) -> Linear:
        """A plain layer with these arrays, or their shapes; its dtype and axes are this one's."""
        has_bias, dtype = bias is not None, weight.dtype
        layer = Linear(1, 1, use_bias=has_bias, dtype=self.dtype, param_dtype=dtype, rngs=None)
        layer.axes, layer.weight = self.axes, nnx.Param(weight)
        layer.bias = None if bias is None else nnx.Param(bias)
        return layer


class LinearPart(nnx.Module):
    """Linear layer whose weights are rows of the weights of another layer of the same module.

    Such layers of one module, which get the same input, are one product: XLA drops the others.
    """

    def __init__(self, whole: str, start: int, stop: int, shards: int, dtype: DTypeLike):
        """Args:
        whole: name of the layer that has the weights.
        start, stop: the rows of this part, in each shard.
        shards: number of equal shards of the rows, each with its rows of all parts.
        dtype: dtype of the layer.
        """
        self.whole, self.start, self.stop, self.shards = whole, start, stop, shards
        self.dtype = jnp.dtype(dtype)

    def __call__(
        self, x: Float[Array, "... I"], key: jax.Array | None, parent: nnx.Module
    ) -> Float[Array, "... O"]:
        return self.of(getattr(parent, self.whole)(x), axis=-1)

    def of(self, rows: Array, axis: int = 0) -> Array:
        """This part of an array that has an entry for each row of the weights along an axis."""
        rows = jnp.moveaxis(rows, axis, -1)
        rows = rows.reshape(*rows.shape[:-1], self.shards, -1)[..., self.start : self.stop]
        return jnp.moveaxis(rows.reshape(*rows.shape[:-2], -1), -1, axis)


KEPT = "kept"
"""Name of the arrays that `remat="dots"` keeps for the backward pass."""


def kept(y: Float[Array, "... O"]) -> Float[Array, "... O"]:
    """y, the result of a linear layer, which `remat="dots"` keeps for the backward pass."""
    return checkpoint_name(y, KEPT)


def product(
    x: Float[Array, "... I"], w: Float[Array, "O I"], axes: tuple[str | None, ...]
) -> Float[Array, "... O"]:
    """``x W^T``; on a mesh with fsdp a product of many tokens gathers W first.

    Args:
        axes: logical axes of the weight.
    """
    axis = fsdp_axis(w.shape, axes)
    many = x.ndim == 3 and x.shape[1] != 1 and x.shape[0] % row_shards(context_mesh()) == 0
    return times_gathered(x, w, axis) if many and axis is not None else times_transposed(x, w)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def times_gathered(
    x: Float[Array, "B T I"], w: Float[Array, "O I"], axis: int
) -> Float[Array, "B T O"]:
    """``x W^T`` of a weight whose fsdp shards along `axis` are all-gathered first (FSDP).

    The backward pass gathers them again, and reduces the gradient into shards. XLA's own ways with
    such a product, loops over the shards, take several times as long.
    """

    def local(x: Float[Array, "b T I"], w: Float[Array, "o i"]) -> Array:
        return times_transposed(x, jax.lax.all_gather(w, FSDP, axis=axis, tiled=True))

    return by_rows(local, (x,), (w,), axis, sums=False)


def _times_gathered_backward(
    axis: int,
    kept: tuple[Float[Array, "B T I"], Float[Array, "O I"]],
    gradient: Float[Array, "B T O"],
) -> tuple[Float[Array, "B T I"], Float[Array, "O I"]]:

    def of_x(gradient: Float[Array, "b T O"], w: Float[Array, "o i"]) -> Array:
        whole = jax.lax.all_gather(w, FSDP, axis=axis, tiled=True)
        return jnp.matmul(gradient, whole, precision=precision_of(gradient, whole))

    def of_w(x: Float[Array, "b T I"], gradient: Float[Array, "b T O"]) -> Array:
        rows, others = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        product = jnp.matmul(rows.T, others, precision=precision_of(rows, others))
        return jax.lax.platform_dependent(product, cpu=added_in_float32, default=added)

    def added(product: Float[Array, "O I"]) -> Float[Array, "o i"]:
        return jax.lax.psum_scatter(
            jax.lax.psum(product, DATA), FSDP, scatter_dimension=axis, tiled=True
        )

    def added_in_float32(product: Float[Array, "O I"]) -> Float[Array, "o i"]:
        # On a CPU, XLA adds 16-bit floats in float32 anyway, but cannot rewrite this sum itself.
        return added(product.astype(jnp.float32)).astype(product.dtype)

    # The barrier keeps XLA from using the gathered weights of the forward pass, which it would have
    # to keep until now.
    (x, w), gradient = jax.lax.optimization_barrier((kept, gradient))
    return (
        by_rows(of_x, (gradient,), (w,), axis, sums=False),
        by_rows(of_w, (x, gradient), (), axis, sums=True),
    )


times_gathered.defvjp(
    lambda x, w, axis: (times_gathered(x, w, axis), (x, w)), _times_gathered_backward
)


def by_rows(
    function: Callable[..., Array],
    rows: tuple[Array, ...],
    weights: tuple[Array, ...],
    axis: int,
    *,
    sums: bool,
) -> Array:
    """The function of each device's rows and fsdp shards of weights; `tensor` is left to XLA.

    Args:
        axis: the dimension of a weight that is sharded over fsdp.
        sums: the result is the shards of a weight, not rows.
    """
    mesh = context_mesh()
    assert mesh is not None
    shard = PartitionSpec(*(FSDP if i == axis else None for i in range(2)))
    run = jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(*[PartitionSpec(ROWS)] * len(rows), *[shard] * len(weights)),
        out_specs=shard if sums else PartitionSpec(ROWS),
        axis_names={*ROWS},
        check_vma=False,
    )
    return jax.jit(run)(*rows, *weights)  # an axis that is left to XLA needs jit


def declare_axes(name: str, **layers: Linear) -> None:
    """Sets the axes of layers that belong to one called `name`, such as "attn"."""
    for own, layer in layers.items():
        layer.axes = logical_axes(f"{name}.{own}.weight")


class Embedding(nnx.Module):
    """Token embedding; `attend` applies its matrix as LM head (tied embedding).

    With a `scale`, which is rounded to the compute dtype, embeddings are multiplied by it (Gemma).
    Lookups of token `padding_id` have no gradient, as with torch's padding_idx: Marian's start
    token, which is its pad token, stays as it is.
    """

    def __init__(
        self,
        rows: int,
        features: int,
        *,
        std: float = 0.02,
        scale: float | None = None,
        padding_id: int | None = None,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
        rngs: nnx.Rngs | None,
    ):
        self.weight = normal(rngs, (rows, features), std, param_dtype)
        self.dtype, self.scale, self.padding_id = jnp.dtype(dtype), scale, padding_id

    @property
    def features(self) -> int:
        """Width of an embedding."""
        return self.weight.shape[1]

    def __call__(self, ids: Int[Array, ...]) -> Float[Array, "... D"]:
        table = self.weight[...]
        # All-gather the fsdp shards first, as for every weight matrix.
        if fsdp_axis(table.shape, ("vocab", "embed")) is not None:
            table = table.astype(self.dtype)
        x = self.rows(all_gather_fsdp(table, "vocab", "embed"), ids)
        if self.padding_id is not None:
            x = jnp.where((ids == self.padding_id)[..., None], jax.lax.stop_gradient(x), x)
        # Its gradient goes from shards of rows to shards of features (all-to-all), which the
        # table's gradient has: otherwise each device sums a whole table.
        x = constrain_gradient(x, "copies", None, "embed") if x.ndim == 3 else x
        return self.scaled(x)

    def scaled(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return x if self.scale is None else x * jnp.asarray(self.scale, self.dtype)

    def rows(self, table: Float[Array, "V D"], ids: Int[Array, ...]) -> Float[Array, "... D"]:
        # Ids are checked on the host. Without `clip` a bad traced id would give a vector of NaN.
        return jnp.take(table, ids, axis=0, mode="clip").astype(self.dtype)

    def from_ids_or_embeds(
        self, ids: Int[Array, ...] | None, embeds: Float[Array, "... D"] | None
    ) -> Float[Array, "... D"]:
        """`embeds` if given, else the embeddings of `ids`; in this layer's dtype."""
        if embeds is not None:
            return jnp.asarray(embeds, self.dtype)
        assert ids is not None
        return self(ids)

    def attend(self, x: Float[Array, "... D"]) -> Float[Array, "... V"]:
        return times_transposed(x.astype(self.dtype), self.weight[...].astype(self.dtype))


class RMSNorm(nnx.Module):
    """RMSNorm ``x / rms(x) * weight``: no mean, no bias (Zhang & Sennrich 2019, arXiv:1910.07467).

    With `unit_offset` it is ``x / rms(x) * (1 + weight)``, in float32 to the end (Gemma).

    >>> norm = RMSNorm(4, eps=0.0, dtype=jnp.float32, param_dtype=jnp.float32)
    >>> norm(jnp.array([1.0, -1.0, 1.0, -1.0])).tolist()
    [1.0, -1.0, 1.0, -1.0]
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        unit_offset: bool = False,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
    ):
        start = jnp.zeros if unit_offset else jnp.ones
        self.weight = nnx.Param(start((features,), param_dtype))
        self.eps, self.unit_offset, self.dtype = eps, unit_offset, jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = over_rms(x.astype(jnp.float32), self.eps)
        weight = jnp.expand_dims(self.weight[...], tuple(range(x.ndim - 1)))
        if self.unit_offset:
            return (y * (1 + weight.astype(jnp.float32))).astype(self.dtype)
        return y.astype(self.dtype) * weight.astype(self.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm ``(x - mean) / std * weight + bias`` (Ba et al. 2016, arXiv:1607.06450).

    Without `affine` it has neither weight nor bias.
    """

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        affine: bool = True,
        dtype: DTypeLike,
        param_dtype: DTypeLike,
    ):
        self.weight = nnx.Param(jnp.ones((features,), param_dtype)) if affine else None
        self.bias = nnx.Param(jnp.zeros((features,), param_dtype)) if affine else None
        self.eps, self.dtype = eps, jnp.dtype(dtype)

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        y = standardized(x.astype(jnp.float32), self.eps)
        if self.weight is not None and self.bias is not None:
            first = tuple(range(x.ndim - 1))
            weight, bias = (p[...].astype(jnp.float32) for p in (self.weight, self.bias))
            y = y * jnp.expand_dims(weight, first) + jnp.expand_dims(bias, first)
        return y.astype(self.dtype)


LEVELS = 1 << 16


def dropout(x: Float[Array, ...], rate: float, key: Array | None) -> Float[Array, ...]:
    """Inverted dropout (Srivastava et al. 2014): zeroes elements with probability `rate`, scales
    the rest. `rate` is rounded to a multiple of 1/65536, and the scale matches the rounded rate."""
    dropped = round(rate * LEVELS)
    if key is None or dropped == 0:
        return x
    if dropped == LEVELS:
        return jnp.zeros_like(x)
    kept = jnp.where(dropout_mask(key, dropped, x.shape), x * (LEVELS / (LEVELS - dropped)), 0)
    return kept.astype(x.dtype)


def dropout_mask(key: Array, dropped: int, shape: tuple[int, ...]) -> Bool[Array, ...]:
    """Dropout mask: False with probability `dropped` / 65536."""
    return random_uint16(key, shape) >= dropped


def split_key(key: Array | None, n: int) -> tuple[Array | None, ...]:
    """Splits a key into n independent ones; None gives n times None.

    Raises:
        InputError: it is no key.
    """
    if key is None:
        return (None,) * n
    try:
        return tuple(jax.random.split(key, n))
    except (TypeError, ValueError):
        found = quoted(key)
        raise InputError(f"dropout_key: expected jax.random.key(...), found {found}") from None
