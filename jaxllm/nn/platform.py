"""Platform tuning: operations whose plain form is slow on some backend.

Each function computes the same result on every backend. Code written for one of them is marked
``PERF(cpu)`` or ``PERF(tpu)``. Tuning belongs here, as a branch, not in the layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int4, Int8, Integer, UInt16, UInt32

from jaxllm.cache.kv_cache import KV
from jaxllm.nn import cpu_kernels

PREFIXES = 4
MIN_SPLIT_SLOTS = 64
MAX_SPLIT_QUERIES = 8

MAX_INT8_ROWS = 64
"""Rows up to which a CPU multiplies int8 by int8; a float32 copy of the weights pays for more."""


def times_transposed(x: Float[Array, "*rest I"], w: Float[Array, "O I"]) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T``."""
    # PERF(cpu): x is flattened to a matrix; with a 3-axis x gradients take 1.5 times as long;
    # benchmarks/train.py.
    rows = x.reshape(-1, x.shape[-1])
    few = len(rows) <= cpu_kernels.MAX_ROWS and cpu_kernels.usable(x, w)
    y = few_times_transposed(rows, w) if few else jax.lax.dot_general(rows, w, _TRANSPOSED)
    return y.reshape(*x.shape[:-1], w.shape[0])


@jax.custom_jvp
def few_times_transposed(x: Float[Array, "B I"], w: Float[Array, "O I"]) -> Float[Array, "B O"]:
    """`times_transposed` of a few rows, with a kernel on a CPU."""

    def in_xla(x: Array, w: Array) -> Array:
        return jax.lax.dot_general(x, w, _TRANSPOSED)

    # PERF(cpu): XLA's product takes 1.2 to 1.6 times as long; docs/performance.md.
    return jax.lax.platform_dependent(x, w, cpu=cpu_kernels.product, default=in_xla)


@few_times_transposed.defjvp
def _few_times_transposed_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return jax.jvp(lambda x, w: jax.lax.dot_general(x, w, _TRANSPOSED), primals, tangents)


def times_int8_transposed(
    x: Float[Array, "*rest I"], values: Int8[Array, "O I"], scale: Float[Array, " O"]
) -> Float[Array, "*rest O"]:
    """Matrix product ``x W^T`` of a matrix ``W[o] = scale[o] * values[o]``, in x's dtype."""
    # PERF(cpu): a product of int8 by int8 is 1.5 to 2.5 times as fast as one of float32, while a
    # float32 copy of the values takes longer than the product saves. TPU and GPU convert int8
    # within the product, so that int8 is what they read; docs/quantization.md.
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
        x, values.astype(x.dtype), _TRANSPOSED, preferred_element_type=jnp.float32
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
    y = jax.lax.dot_general(both, values, _TRANSPOSED, preferred_element_type=jnp.int32)
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

_TRANSPOSED = (((1,), (1,)), ((), ()))
"""Dimension numbers of ``x W^T``."""


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
    # PERF(cpu): its product of int8 by int8 is the fastest; docs/quantization.md.
    y = jax.lax.platform_dependent(
        rows, groups, multipliers, scale, cpu=as_one_matrix, default=in_groups
    )
    return y.reshape(*x.shape[:-1], groups.shape[1])


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
    # docs/quantization.md.
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


def writes_one_slot(platform: str) -> bool:
    """True if rows of different lengths are written to one cache slot of all (`RotatedCache`)."""
    # PERF(tpu): XLA keeps a cache with heads of 64 in a layout that a scatter cannot write, so it
    # would copy the whole cache before and after the loop; docs/plan.md. On a CPU a step reads only
    # the slots that are in use, which are the first ones without rotation.
    return platform == "tpu"


def random_uint16(key: Array, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Uniform random uint16 numbers, generated once even if used several times.

    Each random word gives two numbers, since random bits are most of dropout's cost. A TPU draws
    others than other platforms.
    """
    # PERF(tpu): the two numbers of a word beside each other would be 2 of 128 entries of a tile;
    # writing them took six times as long as drawing; docs/plan.md.
    return jax.lax.platform_dependent(
        key,
        tpu=functools.partial(split_in_halves, shape=shape),
        default=functools.partial(split_in_pairs, shape=shape),
    )


def split_in_pairs(key: Array, *, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Random numbers of which neighbours come from one word."""
    size = math.prod(shape)
    numbers = jax.lax.bitcast_convert_type(random_words(key, ((size + 1) // 2,)), jnp.uint16)
    return numbers.reshape(-1)[:size].reshape(shape)


def split_in_halves(key: Array, *, shape: tuple[int, ...]) -> UInt16[Array, ...]:
    """Random numbers of which the two halves of the last axis come from the same words."""
    *rest, width = shape or (1,)
    words = random_words(key, (*rest, (width + 1) // 2))
    numbers = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1)[..., :width]
    return numbers.astype(jnp.uint16).reshape(shape)


def random_words(key: Array, shape: tuple[int, ...]) -> UInt32[Array, ...]:
    # PERF(cpu): without the barrier XLA fuses their generation into every use and repeats it;
    # benchmarks/train.py.
    return jax.lax.optimization_barrier(jax.random.bits(key, shape, jnp.uint32))


def argmax_of_rows(x: Float[Array, "B V"]) -> Int[Array, " B"]:
    """Index of the largest entry of each row, int32; the first of equal ones. No entry is NaN."""

    def in_two_steps(x: Float[Array, "B V"]) -> Int[Array, " B"]:
        blocks = in_blocks(x, -jnp.inf)
        block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
        # Not a search for the value that was found: XLA may compute x again, and round differently.
        within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
        return (block * blocks.shape[2] + jnp.argmax(within, axis=-1)).astype(jnp.int32)

    def in_one_step(x: Float[Array, "B V"]) -> Int[Array, " B"]:
        return jnp.argmax(x, axis=-1).astype(jnp.int32)

    # PERF(cpu): a block, then an entry, in a third of the time of one argmax over a vocabulary;
    # benchmarks/decode.py.
    # Elsewhere one argmax is a single pass, which XLA fuses with the LM head's output.
    return jax.lax.platform_dependent(x, cpu=in_two_steps, default=in_one_step)


def in_blocks(x: Float[Array, "B V"], filler: float) -> Float[Array, "B blocks size"]:
    """Splits rows into about sqrt(V) blocks of as many entries, the last one filled up."""
    batch, width = x.shape
    size = math.isqrt(width - 1) + 1
    blocks = -(-width // size)
    x = jnp.pad(x, ((0, 0), (0, blocks * size - width)), constant_values=filler)
    return x.reshape(batch, blocks, size)


def after_gradient(x: Array, gradient: Array) -> Array:
    """Returns x; on CPU with a data dependency, so that its users run after `gradient`."""

    # PERF(cpu): XLA drops barriers before scheduling, but keeps `+ gradient * 0`, which may be NaN.
    # Otherwise all blocks are recomputed before the first is needed, and remat saves no memory;
    # benchmarks/train.py.
    def waiting(x: Array, gradient: Array) -> Array:
        # The gradient may be float32 where x is not: T5 in bfloat16.
        return x + (gradient * 0).astype(x.dtype)

    return jax.lax.platform_dependent(x, gradient, cpu=waiting, default=lambda x, gradient: x)


def attend_cache(
    attend: Callable[..., Array],
    q: Float[Array, "B T N H"],
    kv: KV,
    used_slots: Int[Array, ""] | None,
    *,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
    scale: float,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)``: eager attention with a `scale`.

    Args:
        used_slots: number of the cache's first slots that hold tokens; None: any slot may.
    """

    def everything(q: Array, kv: KV, visible: Array, bias: Array | None) -> Array:
        return attend(q, kv, visible, bias)

    splits = kv.capacity >= MIN_SPLIT_SLOTS and q.shape[1] <= MAX_SPLIT_QUERIES
    if attends_in_kernel(q, kv, bias):
        # PERF(cpu): all cores, and the visible slots only; docs/performance.md.
        on_cpu = attend_in_kernel(everything, scale)
    elif used_slots is not None and splits:
        on_cpu = functools.partial(attend_used_slots, attend, used_slots)
    else:
        return everything(q, kv, visible, bias)
    return jax.lax.platform_dependent(q, kv, visible, bias, cpu=on_cpu, default=everything)


def attends_in_kernel(q: Float[Array, "B T N H"], kv: KV, bias: Array | None) -> bool:
    """True if the CPU's kernel of attention has this form of cache."""
    arrays = (q, kv.k, kv.v, *(() if bias is None else (bias,)))
    plain = type(kv) is KV and len(kv.leading_shape) == 1
    return plain and q.shape[3] % 16 == 0 and cpu_kernels.usable(*arrays)


def attend_in_kernel(attend: Callable[..., Array], scale: float) -> Callable[..., Array]:
    """`attend` with the CPU's kernel; where it is differentiated, `attend` itself."""

    @jax.custom_jvp
    def run(q: Array, kv: KV, visible: Array, bias: Array | None) -> Array:
        return cpu_kernels.attention(q, kv.k, kv.v, visible, bias, scale)

    run.defjvp(functools.partial(jax.jvp, attend))
    return run


def attend_used_slots(
    attend: Callable[..., Array],
    used_slots: Int[Array, ""],
    q: Float[Array, "B T N H"],
    kv: KV,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N T S"] | None,
) -> Float[Array, "B T N H"]:
    """``attend(q, kv, visible, bias)`` for a cache with tokens in its first slots only."""
    size = kv.capacity
    prefixes = [size * i // PREFIXES for i in range(1, PREFIXES + 1)]

    def over(length: int):
        def run(q: Array, kv: KV, visible: Array, bias: Array | None):
            bias = None if bias is None else bias[..., :length]
            return attend(q, kv.prefix(length), visible[..., :length], bias)

        return run

    # PERF(cpu): reads only the shortest of four prefixes that covers the used slots, since reading
    # the cache is a large part of a decode step; on other backends the branch costs more than it
    # saves; benchmarks/decode.py.
    which = jnp.searchsorted(jnp.asarray(prefixes), used_slots)
    return jax.lax.switch(which, [over(p) for p in prefixes], q, kv, visible, bias)
