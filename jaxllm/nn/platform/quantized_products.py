"""Matrix products with quantized weights: int8, int4 in groups, blocks of GGUF files."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int4, Int8, Integer

from jaxllm.nn import cpu_kernels
from jaxllm.nn.platform.products import TRANSPOSED, times_transposed

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
    if len(rows) <= MAX_INT8_ROWS:
        on_cpu = times_int8_in_kernel if cpu_kernels.usable(rows, scale) else times_as_int8
    y = jax.lax.platform_dependent(rows, values, scale, cpu=on_cpu, default=times_converted)
    return y.reshape(*x.shape[:-1], len(values))


def times_converted(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """`times_int8_transposed` with the values converted to x's dtype."""
    y = jax.lax.dot_general(
        x, values.astype(x.dtype), TRANSPOSED, preferred_element_type=jnp.float32
    )
    return (y * scale).astype(x.dtype)


@jax.custom_vjp
def times_as_int8(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """`times_int8_transposed` with x in 16 bits, as two rows of int8 for each of its own.

    A row of x is rounded to multiples of its largest entry / 32512, ``unit * (256 * high + low)``.
    A single row of int8 (8 bits of x) would take as long: products of one row are slow.
    """
    unit = jnp.max(jnp.abs(x), axis=1, keepdims=True).astype(jnp.float32) / (127 * 256)
    fixed = jnp.round(x / jnp.where(unit > 0, unit, 1)).astype(jnp.int32)
    high = (fixed + 128) >> 8
    both = jnp.concatenate([high, fixed - 256 * high]).astype(jnp.int8)
    y = jax.lax.dot_general(both, values, TRANSPOSED, preferred_element_type=jnp.int32)
    upper, lower = jnp.split(y.astype(jnp.float32), 2)
    return ((256 * upper + lower) * unit * scale).astype(x.dtype)


@jax.custom_vjp
def times_int8_in_kernel(
    x: Float[Array, "B I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "B O"]:
    """`times_int8_transposed` with a kernel, which converts the values as it reads them."""
    return cpu_kernels.int8_product(x, values, scale)


def _int8_gradients(
    kept: tuple[Array, Array], gradient: Float[Array, "B O"]
) -> tuple[Float[Array, "B I"], None, Float[Array, " O"]]:
    # Rounding has no gradient: that of the product with the values is taken. Integers have none.
    values, scale = kept
    of_x = (gradient * scale) @ values.astype(gradient.dtype)
    return of_x.astype(gradient.dtype), None, jnp.zeros_like(scale)


times_as_int8.defvjp(
    lambda x, values, scale: (times_as_int8(x, values, scale), (values, scale)), _int8_gradients
)
times_int8_in_kernel.defvjp(
    lambda x, values, scale: (times_int8_in_kernel(x, values, scale), (values, scale)),
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
    in_groups = sum_of_groups if len(rows) <= groups.shape[2] // 2 else as_one_matrix
    # PERF(cpu): a kernel reads int4; XLA's product of int8 by int8 is the fastest that it has;
    # docs/decisions/quantized-products.md.
    on_cpu = as_one_matrix
    few = len(rows) <= cpu_kernels.MAX_ROWS and groups.shape[2] == cpu_kernels.INT4_GROUP
    if few and cpu_kernels.usable(rows, scale):
        on_cpu = times_int4_in_kernel
    y = jax.lax.platform_dependent(rows, groups, multipliers, scale, cpu=on_cpu, default=in_groups)
    return y.reshape(*x.shape[:-1], groups.shape[1])


@jax.custom_vjp
def times_int4_in_kernel(
    x: Float[Array, "B I"],
    groups: Int4[Array, "G O S"],
    multipliers: Int8[Array, "G O"],
    scale: Float[Array, " O"],
) -> Float[Array, "B O"]:
    """`times_int4_transposed` with a kernel, which unpacks a few rows at a time."""
    return cpu_kernels.int4_product(x, groups, multipliers, scale)


def _int4_gradients(
    kept: tuple[Array, Array, Array], gradient: Float[Array, "B O"]
) -> tuple[Float[Array, "B I"], None, None, Float[Array, " O"]]:
    groups, multipliers, scale = kept
    of_x, _, of_scale = _int8_gradients((as_int8(groups, multipliers), scale), gradient)
    return of_x, None, None, of_scale


times_int4_in_kernel.defvjp(
    lambda x, groups, multipliers, scale: (
        times_int4_in_kernel(x, groups, multipliers, scale),
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
    return (jnp.sum(y * multipliers[:, None], axis=0) * scale).astype(x.dtype)


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
    in_groups = sum_of_blocks if len(rows) <= size // 2 else as_one_matrix
    y = jax.lax.platform_dependent(
        rows, groups, scales, offsets, cpu=as_one_matrix, default=in_groups
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
    y = group_products(parts, groups) * scales[:, None]
    if offsets is not None:
        sums = jnp.sum(parts.astype(jnp.float32), axis=2)
        y = y + sums.T[..., None] * offsets[:, None]
    return jnp.sum(y, axis=0).astype(x.dtype)


def group_products(
    parts: Float[Array, "B G S"], groups: Integer[Array, "G O S"]
) -> Float[Array, "G B O"]:
    """Products of each group of entries, float32."""
    return jax.lax.dot_general(
        parts,
        groups.astype(parts.dtype),
        (((2,), (2,)), ((1,), (0,))),
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
