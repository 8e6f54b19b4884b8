"""Matrix products of float and quantized weights, with the kernels of a CPU for few rows.

The kernels are those of the optional package `jaxllm_cpu_kernels` (folder cpu_kernels/), called
through XLA. ``JAXLLM_CPU_KERNELS=0`` in the environment leaves them out.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int4, Int8, Integer, Shaped

from jaxllm.common.precision import precision_of
from jaxllm.parallel.sharding import context_mesh, row_shards

T = TypeVar("T")

MAX_ROWS = 64
"""Rows of x up to which a product is a kernel's; XLA is as fast for more; docs/performance.md."""

INT4_GROUP = 32
"""Entries of a row of int4 that share a multiplier."""


@functools.cache
def kernels_registered() -> bool:
    """True if the package is installed; its kernels are then known to XLA."""
    if os.environ.get("JAXLLM_CPU_KERNELS") == "0":
        return False
    try:
        package = importlib.import_module("jaxllm_cpu_kernels")
    except ModuleNotFoundError:
        return False
    for name, handler in package.handlers().items():
        jax.ffi.register_ffi_target(name, handler, platform="cpu")
    return True


def at_most(size: int, limit: int) -> bool:
    """True if a size of a shape is known and at most `limit`; `jax.export` may leave it open."""
    return isinstance(size, int) and size <= limit


def kernel_usable(*arrays: Array) -> bool:
    """True if a kernel can take these float arrays: float32, of known sizes, and not sharded."""
    fit = all(x.dtype == jnp.float32 and is_fully_known(x.shape) for x in arrays)
    return fit and context_mesh() is None and kernels_registered()


def is_fully_known(shape: tuple[int, ...]) -> bool:
    """False if `jax.export` leaves a size of the shape open."""
    return all(isinstance(size, int) for size in shape)


def kernel_product(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """``x W^T`` in float32."""
    return _call_kernel("jaxllm_linear", (len(x), len(w)), x, w)


@jax.custom_vjp
def kernel_int8_product(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """``x W^T`` of a matrix ``W[o] = scale[o] * values[o]``, in float32. The kernel converts the
    values as it reads them."""
    return _call_kernel("jaxllm_linear_int8", (len(x), len(values)), x, values, scale)


@jax.custom_vjp
def kernel_int4_product(
    x: Float[Array, "B I"],
    groups: Int4[Array, "G O 32"],
    multipliers: Int8[Array, "G O"],
    scale: Float[Array, " O"],
) -> Float[Array, "B O"]:
    """``x W^T`` of an `Int4Matrix` in groups of `INT4_GROUP`, in float32. The kernel unpacks a few
    rows at a time."""
    return _call_kernel("jaxllm_linear_int4", (len(x), len(scale)), x, groups, multipliers, scale)


def kernel_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "BK S H"],
    v: Float[Array, "BK S H"],
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """Eager attention in float32; reads only the slots that a query sees, and those between."""
    biases = () if bias is None else (bias,)
    return _call_kernel(
        "jaxllm_attention", q.shape, q, k, v, visible, *biases, scale=np.float32(scale)
    )


def _call_kernel(name: str, shape: tuple[int, ...], *arrays: Array, **numbers: np.float32) -> Array:
    arrays = varying(arrays, arrays)
    out = jax.ShapeDtypeStruct(shape, jnp.float32)
    y = jax.ffi.ffi_call(name, out, vmap_method="sequential")(*arrays, **numbers)
    return varying(y, arrays)


def varying(tree: T, like: object) -> T:
    """The arrays of a tree, varying over each axis of the caller's `jax.shard_map` over which an
    array of `like` varies. A loop or kernel of the package takes arrays that vary alike."""
    own = [jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(like)]
    axes = frozenset[str]().union(*own)

    def one(x: Array) -> Array:
        missing = axes - jax.typeof(x).manual_axis_type.varying
        return jax.lax.pcast(x, (*missing,), to="varying") if missing else x

    return jax.tree.map(one, tree)


TRANSPOSED = (((1,), (1,)), ((), ()))
"""Dimension numbers of ``x W^T``."""
SUBLANES = 8
"""Rows of a TPU's vector register. A product of one row would become a sum on the vector unit."""


def apply_to_rows(
    product: Callable[..., Array], x: Shaped[Array, "B I"], *weights: Array | None
) -> Float[Array, "B ..."]:
    """``product(x, *weights)``. On a TPU, if a device has one row, it is beside rows of zeros."""
    if x.shape[0] not in (1, row_shards(context_mesh())):
        return product(x, *weights)
    # PERF(tpu): XLA multiplies one row on the vector unit, which takes three times as long as eight
    # rows, and six times as long with quantized weights; docs/decisions/tpu-decode-step.md.
    padded = functools.partial(beside_zeros, product)
    return jax.lax.platform_dependent(x, *weights, tpu=padded, default=product)


def beside_zeros(
    product: Callable[..., Array], x: Shaped[Array, "B I"], *weights: Array | None
) -> Float[Array, "B ..."]:
    """``product(x, *weights)`` of 8 rows for each row of x, of which 7 are zeros."""
    rows = jnp.pad(x[:, None], ((0, 0), (0, SUBLANES - 1), (0, 0)))
    y = product(rows.reshape(-1, x.shape[1]), *weights)
    return y.reshape(x.shape[0], SUBLANES, *y.shape[1:])[:, 0]


FEW_COLUMNS = 16
"""Most columns of x for which `before_product` has an effect: those of decode steps."""
MAX_INNER_WIDTH = 4096
"""Most features that a TPU computes within the product that reads them."""


def before_product(x: Float[Array, "*rest F"]) -> Float[Array, "*rest F"]:
    """x, which is about to be multiplied. On a TPU, more than `MAX_INNER_WIDTH` features of a few
    columns are computed before the product that reads them."""
    if x.ndim != 3 or not at_most(x.shape[1], FEW_COLUMNS) or x.shape[2] <= MAX_INNER_WIDTH:
        return x
    # PERF(tpu): XLA computes the features of few rows, themselves a product, within the product
    # that reads them, which takes up to twice as long; docs/decisions/tpu-decode-step.md.
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(x, tpu=barrier, default=lambda x: x)


def layer_by_layer(x: Float[Array, "*rest F"], products: T) -> tuple[Float[Array, "*rest F"], T]:
    """Returns both; on a GPU the products that later layers compute of x come after `products`."""
    # PERF(gpu): XLA would join the products of all layers into one, with a copy of their weights,
    # and compile a kernel for each layer's part of it; docs/decisions/gpu-programs.md.
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent((x, products), cuda=barrier, default=lambda both: both)


def times_transposed(x: Float[Array, "*rest I"], w: Float[Array, "O I"]) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T``."""
    # PERF(cpu): x is flattened to a matrix; with a 3-axis x gradients take 1.5 times as long;
    # benchmarks/train.py.
    rows = x.reshape(-1, x.shape[-1])
    few = at_most(rows.shape[0], MAX_ROWS) and kernel_usable(x, w)
    y = few_times_transposed(rows, w) if few else in_xla(rows, w)
    return y.reshape(*x.shape[:-1], w.shape[0])


def in_xla(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """`times_transposed` of a matrix x with XLA's product."""

    def product(x: Array, w: Array) -> Array:
        return jax.lax.dot_general(x, w, TRANSPOSED, precision=precision_of(x, w))

    return apply_to_rows(product, x, w)


@jax.custom_jvp
def few_times_transposed(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """`times_transposed` of a few rows, with a kernel on a CPU."""

    # PERF(cpu): XLA's product takes 1.2 to 1.6 times as long; docs/decisions/cpu-kernels.md.
    return jax.lax.platform_dependent(x, w, cpu=kernel_product, default=in_xla)


@few_times_transposed.defjvp
def _few_times_transposed_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return jax.jvp(in_xla, primals, tangents)


@jax.custom_jvp
def plus_bias(y: Float[Array, "*rest O"], bias: Float[Array, " O"]) -> Float[Array, "*rest O"]:
    """``y + bias`` in one dtype."""
    return y + jnp.expand_dims(bias, tuple(range(y.ndim - 1)))


@plus_bias.defjvp
def _plus_bias_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    of_y, of_bias = tangents
    # PERF(tpu): its gradient, a sum over tokens, is a product too. On the vector unit the sum takes
    # twice as long as the product with the weights; docs/decisions/tpu-training-step.md.
    by_product = functools.partial(rows_by_product, shape=of_y.shape)
    broadcast = functools.partial(jnp.broadcast_to, shape=of_y.shape)
    return plus_bias(*primals), of_y + jax.lax.platform_dependent(
        of_bias, tpu=by_product, default=broadcast
    )


def rows_by_product(x: Float[Array, " O"], *, shape: tuple[int, ...]) -> Float[Array, "*rest O"]:
    """``jnp.broadcast_to(x, shape)``, whose gradient is a product with ones."""
    first = jnp.pad(x[None], ((0, SUBLANES - 1), (0, 0)))
    ones = jnp.ones((*shape[:-1], SUBLANES), x.dtype)
    exact = None if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(ones, first, precision=exact)


MAX_INT8_ROWS = 64
"""Rows up to which a CPU multiplies int8 by int8; a float32 copy of the weights pays for more."""


def times_int8_transposed(
    x: Float[Array, "*rest I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T`` of a matrix ``W[o] = scale[o] * values[o]``, in x's dtype."""
    # PERF(cpu): a product of int8 by int8 is 1.5 to 2.5 times as fast as one of float32, while a
    # float32 copy of the values takes longer than the product saves. TPU and GPU convert int8
    # within the product, so that int8 is what they read; docs/decisions/quantized-products.md.
    rows = x.reshape(-1, x.shape[-1])
    on_cpu = times_converted
    if at_most(rows.shape[0], MAX_INT8_ROWS):
        on_cpu = kernel_int8_product if kernel_usable(rows, scale) else times_as_int8
    default = functools.partial(apply_to_rows, times_converted)
    y = jax.lax.platform_dependent(rows, values, scale, cpu=on_cpu, default=default)
    return y.reshape(*x.shape[:-1], len(values))


def times_converted(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """`times_int8_transposed` with the values converted to x's dtype."""
    y = jax.lax.dot_general(
        x,
        values.astype(x.dtype),
        TRANSPOSED,
        precision=precision_of(x),
        preferred_element_type=jnp.float32,
    )
    return (y * scale[None]).astype(x.dtype)


@jax.custom_vjp
def times_as_int8(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """`times_int8_transposed` with x in 16 bits, as two rows of int8 for each of its own.

    A row of x is rounded to multiples of its largest entry / 32512, ``unit * (256 * high + low)``.
    A single row of int8 (8 bits of x) would take as long: products of one row are slow.
    """
    unit = jnp.max(jnp.abs(x), axis=1, keepdims=True).astype(jnp.float32) / (127 * 256)
    fixed = jnp.round(x.astype(jnp.float32) / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
    high = (fixed + 128) >> 8
    both = jnp.concatenate([high, fixed - 256 * high]).astype(jnp.int8)
    y = jax.lax.dot_general(both, values, TRANSPOSED, preferred_element_type=jnp.int32)
    upper, lower = jnp.split(y.astype(jnp.float32), 2)
    return ((256 * upper + lower) * unit * scale[None]).astype(x.dtype)


def _int8_gradients(
    kept: tuple[Array, Array], gradient: Float[Array, "B O"]
) -> tuple[Float[Array, "B I"], None, Float[Array, " O"]]:
    # Rounding has no gradient: that of the product with the values is taken. Integers have none.
    values, scale = kept
    scaled = gradient.astype(scale.dtype) * scale[None]
    of_x = jnp.matmul(scaled, values.astype(scaled.dtype), precision=precision_of(scaled))
    return of_x.astype(gradient.dtype), None, jnp.zeros_like(scale)


times_as_int8.defvjp(
    lambda x, values, scale: (times_as_int8(x, values, scale), (values, scale)), _int8_gradients
)
kernel_int8_product.defvjp(
    lambda x, values, scale: (kernel_int8_product(x, values, scale), (values, scale)),
    _int8_gradients,
)


def times_int4_transposed(
    x: Float[Array, "*rest I"],
    groups: Int4[Array, "G O S"],
    multipliers: Int8[Array, "G O"],
    scale: Float[Array, " O"],
) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T`` of a matrix in groups (`Int4Matrix`), in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])

    def as_one_matrix(rows: Array, groups: Array, multipliers: Array, scale: Array) -> Array:
        return times_int8_transposed(rows, as_int8(groups, multipliers), scale)

    # TPU and GPU read int4 in the product of each group, and then scale the groups' sums. For more
    # rows the sums would take more memory than a copy of the weights.
    in_groups = sum_of_groups if at_most(rows.shape[0], groups.shape[2] // 2) else as_one_matrix
    # PERF(cpu): a kernel reads int4; XLA's product of int8 by int8 is the fastest that it has;
    # docs/decisions/quantized-products.md.
    on_cpu = as_one_matrix
    few = at_most(rows.shape[0], MAX_ROWS) and groups.shape[2] == INT4_GROUP
    if few and kernel_usable(rows, scale):
        on_cpu = kernel_int4_product
    default = functools.partial(apply_to_rows, in_groups)
    y = jax.lax.platform_dependent(rows, groups, multipliers, scale, cpu=on_cpu, default=default)
    return y.reshape(*x.shape[:-1], groups.shape[1])


def _int4_gradients(
    kept: tuple[Array, Array, Array], gradient: Float[Array, "B O"]
) -> tuple[Float[Array, "B I"], None, None, Float[Array, " O"]]:
    groups, multipliers, scale = kept
    of_x, _, of_scale = _int8_gradients((as_int8(groups, multipliers), scale), gradient)
    return of_x, None, None, of_scale


kernel_int4_product.defvjp(
    lambda x, groups, multipliers, scale: (
        kernel_int4_product(x, groups, multipliers, scale),
        (groups, multipliers, scale),
    ),
    _int4_gradients,
)


def sum_of_groups(
    x: Float[Array, "B I"],
    groups: Int4[Array, "G O S"],
    multipliers: Int8[Array, "G O"],
    scale: Float[Array, " O"],
) -> Float[Array, "B O"]:
    """`times_int4_transposed` by the products of each group."""
    count, _, size = groups.shape
    y = group_products(x.reshape(-1, count, size), groups)
    return (jnp.sum(y * multipliers[:, None].astype(y.dtype), axis=0) * scale[None]).astype(x.dtype)


def times_blocks_transposed(
    x: Float[Array, "*rest I"],
    groups: Integer[Array, "G O S"],
    scales: Float[Array, "G O"],
    offsets: Float[Array, "G O"] | None,
) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T`` of a matrix in blocks (`BlockMatrix`), in x's dtype."""
    _, outputs, size = groups.shape
    rows = x.reshape(-1, x.shape[-1])

    def as_one_matrix(rows: Array, groups: Array, scales: Array, offsets: Array | None) -> Array:
        return times_transposed(rows, dequantized_blocks(groups, scales, offsets).astype(x.dtype))

    # PERF(cpu): products of single groups are many times slower than a float32 copy;
    # docs/decisions/quantized-products.md.
    in_groups = sum_of_blocks if at_most(rows.shape[0], size // 2) else as_one_matrix
    default = functools.partial(apply_to_rows, in_groups)
    y = jax.lax.platform_dependent(
        rows, groups, scales, offsets, cpu=as_one_matrix, default=default
    )
    return y.reshape(*x.shape[:-1], outputs)


def sum_of_blocks(
    x: Float[Array, "B I"],
    groups: Integer[Array, "G O S"],
    scales: Float[Array, "G O"],
    offsets: Float[Array, "G O"] | None,
) -> Float[Array, "B O"]:
    """`times_blocks_transposed` by the products of each group."""
    count, _, size = groups.shape
    parts = x.reshape(-1, count, size)
    y = group_products(parts, groups) * scales[:, None].astype(jnp.float32)
    if offsets is not None:
        sums = jnp.sum(parts.astype(jnp.float32), axis=2)
        y = y + sums.T[..., None] * offsets[:, None].astype(jnp.float32)
    return jnp.sum(y, axis=0).astype(x.dtype)


def group_products(
    parts: Float[Array, "B G S"], groups: Integer[Array, "G O S"]
) -> Float[Array, "G B O"]:
    """Products of each group of entries, float32."""
    return jax.lax.dot_general(
        parts,
        groups.astype(parts.dtype),
        (((2,), (2,)), ((1,), (0,))),
        precision=precision_of(parts),
        preferred_element_type=jnp.float32,
    )


def dequantized_blocks(
    groups: Integer[Array, "G O S"],
    scales: Float[Array, "G O"],
    offsets: Float[Array, "G O"] | None,
) -> Float[Array, "O I"]:
    """The matrix of ``scales * groups + offsets`` in float32."""
    values = groups.astype(jnp.float32) * scales[..., None].astype(jnp.float32)
    if offsets is not None:
        values = values + offsets[..., None].astype(jnp.float32)
    return values.transpose(1, 0, 2).reshape(groups.shape[1], -1)


def as_int8(groups: Int4[Array, "G O S"], multipliers: Int8[Array, "G O"]) -> Int8[Array, "O I"]:
    """The matrix of ``multipliers * groups``, which are at most 120."""
    products = groups.astype(jnp.int8) * multipliers[..., None]
    return products.transpose(1, 0, 2).reshape(groups.shape[1], -1)


MEAN_PARTS = 32
"""Most parts in which a GPU sums a single row."""
MIN_PARTED_ROW = 1024
"""Fewest entries of a single row that a GPU sums in parts."""


def over_rms(x: Float[Array, "*rest D"], eps: float) -> Float[Array, "*rest D"]:
    """``x / sqrt(mean(x^2) + eps)`` of float32 rows."""

    def by_mean(x: Array) -> Array:
        return x * jax.lax.rsqrt(mean_of_rows(x * x) + eps)

    if x.ndim != 3 or x.shape[1] != 1:
        return by_mean(x)
    tuned = {"tpu": functools.partial(over_rms_within_products, eps=eps)}
    if at_most(x.shape[0], 1):
        tuned["cuda"] = functools.partial(over_rms_in_parts, eps=eps)
    return jax.lax.platform_dependent(x, default=by_mean, **tuned)


def over_rms_within_products(x: Float[Array, "B 1 D"], *, eps: float) -> Float[Array, "B 1 D"]:
    """`over_rms`, which XLA computes inside each of the products that read it."""
    # PERF(tpu): behind a barrier 1/D is an array, so that `rsqrt` is not one of each row alone,
    # which XLA keeps out of the products. That is a further operation, which costs as much as a
    # small product; docs/decisions/tpu-decode-step.md.
    part = jax.lax.optimization_barrier(jnp.full((1, 1, x.shape[-1]), 1 / x.shape[-1], jnp.float32))
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) * part + eps)


def over_rms_in_parts(x: Float[Array, "1 1 D"], *, eps: float) -> Float[Array, "1 1 D"]:
    """`over_rms` of a single row by `mean_in_parts`."""
    return x * jax.lax.rsqrt(mean_in_parts(x * x) + eps)


def mean_of_rows(x: Float[Array, "*rest D"]) -> Float[Array, "*rest 1"]:
    """The mean of each row."""
    return jnp.mean(x, axis=-1, keepdims=True)


def mean_in_parts(x: Float[Array, "*rest D"]) -> Float[Array, "*rest 1"]:
    """`mean_of_rows` by the sums of up to `MEAN_PARTS` equal parts of a wide row."""
    # PERF(gpu): XLA sums a single wide row in a kernel of its own, of several blocks of threads.
    # Sums of parts are in the kernel of the residual sum before them, and the additions of these
    # sums are in the kernel that reads the mean. The barrier keeps XLA from making one sum of both;
    # docs/decisions/gpu-programs.md.
    width = x.shape[-1]
    if width < MIN_PARTED_ROW:
        return mean_of_rows(x)
    parts = math.gcd(width, MEAN_PARTS)
    sums = jnp.sum(x.reshape(*x.shape[:-1], parts, -1), axis=-1)
    split = jnp.split(jax.lax.optimization_barrier(sums), parts, axis=-1)
    return functools.reduce(jnp.add, split) / width


def standardized(x: Float[Array, "*rest D"], eps: float) -> Float[Array, "*rest D"]:
    """``(x - mean(x)) / sqrt(variance(x) + eps)`` of float32 rows."""

    def in_two_passes(x: Array) -> Array:
        x = x - mean_of_rows(x)
        return x * jax.lax.rsqrt(mean_of_rows(x * x) + eps)

    one_row = x.ndim == 3 and x.shape[1] == 1 and at_most(x.shape[0], 1)
    if x.ndim != 3 or (x.shape[1] == 1 and not one_row):
        return in_two_passes(x)
    # PERF(gpu): XLA makes one kernel of the passes over several rows, but three of those over one.
    # In one pass they are no kernel of their own; docs/decisions/gpu-programs.md.
    platform, mean = ("cuda", mean_in_parts) if one_row else ("tpu", mean_of_rows)
    one_pass = functools.partial(standardized_in_one_pass, eps=eps, mean=mean)
    return jax.lax.platform_dependent(x, default=in_two_passes, **{platform: one_pass})


def standardized_in_one_pass(
    x: Float[Array, "B T D"],
    *,
    eps: float,
    mean: Callable[[Array], Array] = mean_of_rows,
) -> Float[Array, "B T D"]:
    """`standardized` with the variance E(x^2) - E(x)^2, as in Flax; its error is that of float32
    times E(x^2)."""
    # PERF(tpu): the second of two passes waits for the first, and in the backward pass again. Both
    # sums of one pass are part of the product before it; docs/decisions/tpu-training-step.md.
    center, squares = (mean(y) for y in (x, jnp.square(x)))
    variance = jnp.maximum(squares - jnp.square(center), 0)
    return (x - center) * jax.lax.rsqrt(variance + eps)
