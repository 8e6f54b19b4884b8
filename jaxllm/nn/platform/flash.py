"""Flash attention of whole sequences, by JAX's Pallas kernels for TPUs and for GPUs and by cuDNN.

None holds scores of all queries and keys in memory (Dao et al. 2022, arXiv:2205.14135).
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import SequenceMask
from jaxllm.cache.kv_cache import KV
from jaxllm.common.errors import UnsupportedError
from jaxllm.common.hardware import own_capability
from jaxllm.common.precision import precision_of
from jaxllm.nn.linear import KEPT
from jaxllm.nn.platform.attention import in_token_order
from jaxllm.parallel.sharding import context_mesh, partition_spec, shard_map_is_checked

TILES = (512, 256, 128)
"""Queries, and keys, of a tile."""
NUM_LANES = 128
"""Width of a TPU's vector registers."""
WIDEST_HEAD = 256
"""Features of a head for which the tiles of Triton's kernel fit into a core's memory. cuDNN takes
as many from compute capability 9 on, and half as many before."""
MODULES = {
    "splash": "jax.experimental.pallas.ops.tpu.splash_attention",
    "triton": "jax.experimental.pallas.ops.gpu.attention",
    "mosaic": "jax.experimental.pallas.mosaic_gpu",
}
"""JAX's module of each kernel."""
INTERPRET = False
"""Run the kernels as JAX operations on any platform, which the tests do."""


def import_kernel(implementation: str) -> Any:
    """Imports JAX's module of a kernel. A warning that JAX will remove the module is not shown.

    Raises:
        UnsupportedError: this version of JAX does not have the module, or JAX finds no cuDNN.
    """
    if implementation == "cudnn":
        x = jax.ShapeDtypeStruct((1, TILES[-1], 1, 64), jnp.bfloat16)
        try:
            jax.eval_shape(partial(jax.nn.dot_product_attention, implementation="cudnn"), x, x, x)
        except RuntimeError as error:
            raise UnsupportedError(
                f"attn_implementation: cudnn needs cuDNN, which JAX installs with its CUDA extras "
                f"({error}); choose auto or blockwise"
            ) from error
        return jax.nn
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return importlib.import_module(MODULES[implementation])
    except ImportError as error:
        raise UnsupportedError(
            f"attn_implementation: {implementation} needs {MODULES[implementation]}, which JAX "
            f"{jax.__version__} does not have; choose auto or blockwise (on a GPU also cudnn), or "
            "install an earlier version of JAX"
        ) from error


def flash_applies(
    implementation: str, q: Float[Array, "B T N H"], mask: SequenceMask, scores: Any
) -> bool:
    """True if `attend_flash` computes this mask, for queries of this dtype and width.

    The Pallas kernels compute causal masks. They count a window in columns, and this library counts
    it in real tokens, so that a window has to cover all queries. Products of float32 are not exact
    in these kernels, and cuDNN computes in half precision only. The kernels for GPUs cap no scores.

    Args:
        scores: the layer's `jaxllm.nn.attention.Scores`.
    """
    queries, width = q.shape[1], q.shape[3]
    is_causal, is_packed = mask.query_columns is not None, mask.query_segments is not None
    sees_all = mask.window is None or mask.window >= queries
    if implementation == "cudnn":
        # Programs for a GPU that is not there are for an H100.
        widest = WIDEST_HEAD if (own_capability() or 9) >= 9 else WIDEST_HEAD // 2
        fits = (sees_all or (is_causal and not is_packed)) and (q.dtype.itemsize == 2 or INTERPRET)
        fits = fits and width % 8 == 0 and width <= widest
    else:
        fits = is_causal and sees_all and precision_of(q) is None
        fits = fits and (implementation == "splash" or width <= WIDEST_HEAD)
    caps = scores.softcap is not None and implementation != "splash"
    return fits and not caps and queries >= TILES[-1] and not shard_map_is_checked()


def attend_flash(
    implementation: str,
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    mask: SequenceMask,
    scores: Any,
) -> Float[Array, "B T N H"]:
    """Attention with the kernel for TPUs ("splash"), or one for GPUs ("triton", "cudnn").

    On a mesh each device computes its rows and heads. A query with no visible key gets zeros, as
    does a pad of a causal mask on a GPU.
    """
    B, T = q.shape[:2]
    kv = kv.dequantized()
    K = math.prod(kv.leading_shape) // B
    # The projections' order of axes; XLA drops these transpositions together with those of `KV`.
    k, v = (x.reshape(B, K, *x.shape[-2:]).transpose(0, 2, 1, 3) for x in (kv.k, kv.v))
    if mask.query_segments is None or mask.key_segments is None:
        q_ids, k_ids = jnp.ones((B, T), jnp.int32), jnp.ones((B, kv.capacity), jnp.int32)
        sees_something = jnp.cumsum(mask.keys, axis=1) > 0
    else:
        q_ids, k_ids, sees_something = mask.query_segments, mask.key_segments, mask.keys
    k_ids = jnp.where(mask.keys, k_ids, -1)
    arrays = (q, k, v, q_ids.astype(jnp.int32), k_ids.astype(jnp.int32), sees_something)
    kernels: dict[str, Callable[..., Array]] = {"splash": _splash_rows, "triton": _triton_rows}
    kernels["cudnn"] = partial(
        _cudnn_rows,
        is_causal=mask.query_columns is not None,
        is_packed=mask.query_segments is not None,
        window=mask.window,
    )
    mesh, run = context_mesh(), partial(kernels[implementation], scores=scores)
    if mesh is not None:
        axes = ("rows", None, "heads", None)
        specs = [partition_spec(x.shape, axes[: x.ndim], mesh) for x in arrays]
        run = jax.shard_map(
            run, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
        )
    return run(*arrays)


def _triton_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B T"],
    sees_something: Bool[Array, "B T"],
    *,
    scores: Any,
) -> Float[Array, "B T N H"]:
    """`attend_flash` of one device's rows and heads, with Triton's kernel."""
    triton = import_kernel("triton")
    B, T, N, H = q.shape
    missing = -T % TILES[-1]
    # These tiles fit into the memory of a core of an L4, 100 KB, and of larger GPUs. With eight
    # warps an H100 keeps them in registers; docs/decisions/gpu-programs.md.
    queries, keys = (128, 64) if H <= 128 else (64, 32)
    tiles = {"block_sizes": triton.BlockSizes(queries, *[keys] * 5), "num_warps": 8}
    # The kernel has one number for a column's query and key. Pads have one of their own.
    ids = jnp.pad(k_ids, ((0, 0), (0, missing)), constant_values=-1)
    q, k, v = (jnp.pad(x, ((0, 0), (0, missing), (0, 0), (0, 0))) for x in (q, k, v))
    groups = q.reshape(B, T + missing, k.shape[2], -1, H)

    def run(q: Float[Array, "B T K H"]) -> Float[Array, "B T K H"]:
        options = {"sm_scale": scores.scale, "causal": True, "interpret": INTERPRET}
        return triton.mha(q, k, v, ids, **tiles, **options)

    out = jax.vmap(run, in_axes=3, out_axes=3)(groups).reshape(B, T + missing, N, H)[:, :T]
    return jnp.where((q_ids == k_ids)[:, :, None, None], out, 0)


def _cudnn_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B S"],
    sees_something: Bool[Array, "B S"],
    *,
    scores: Any,
    is_causal: bool,
    is_packed: bool,
    window: int | None,
) -> Float[Array, "B T N H"]:
    """`attend_flash` of one device's rows and heads, with cuDNN.

    cuDNN takes the number of keys of a row, but no pads between them, unless the mask is an array.
    The real tokens of each row are therefore moved to its first columns. There a causal token sees
    no pads, and a window of columns is one of real tokens. Packed rows have a mask [B, 1, T, S].
    """
    T = q.shape[1]

    def pad(x: Array, value: int = 0) -> Array:
        widths = [(0, -x.shape[1] % TILES[-1] if axis == 1 else 0) for axis in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    # Some versions of cuDNN have wrong gradients with a mask if a tile is not full;
    # docs/decisions/gpu-programs.md.
    q, k, v, q_ids, k_ids = pad(q), pad(k), pad(v), pad(q_ids, -2), pad(k_ids, -1)
    is_real = k_ids >= 0
    # Gradients of pads are zeros here, whatever cuDNN writes there.
    k, v = (jnp.where(is_real[:, :, None, None], x, 0) for x in (k, v))
    options: Any = {"implementation": "xla" if INTERPRET else "cudnn", "scale": scores.scale}
    attend = partial(jax.nn.dot_product_attention, is_causal=is_causal, **options)
    if is_packed:
        mask = (q_ids[:, :, None] == k_ids[:, None, :])[:, None]
        out, sees = attend(q, k, v, mask=mask), is_real if is_causal else mask.any(axis=(1, 3))
    else:
        order = jnp.argsort(~is_real, axis=1, stable=True)
        inverse = jnp.argsort(order, axis=1)
        k, v = in_order(k, order, inverse), in_order(v, order, inverse)
        if not is_causal:  # the result of a row without keys is zeros, like its values
            counts = jnp.maximum(is_real.sum(axis=1, dtype=jnp.int32), 1)
            return attend(q, k, v, key_value_seq_lengths=counts)[:, :T]
        near = None if window is None or window >= T else (window - 1, 0)
        out = attend(in_order(q, order, inverse), k, v, local_window_size=near)
        out, sees = in_order(out, inverse, order), is_real
    return jnp.where(sees[:, :, None, None], out, 0)[:, :T]


@jax.custom_vjp
def in_order(
    x: Float[Array, "B T N H"], order: Int[Array, "B T"], inverse: Int[Array, "B T"]
) -> Float[Array, "B T N H"]:
    """Columns of each row in another order. Its gradient is the inverse, without a scatter."""
    return jax.vmap(lambda row, order: row.at[order].get(mode="promise_in_bounds"))(x, order)


in_order.defvjp(
    lambda x, order, inverse: (in_order(x, order, inverse), (order, inverse)),
    lambda kept, dy: (in_order(dy, kept[1], kept[0]), None, None),
)


def _splash_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B T"],
    sees_something: Bool[Array, "B T"],
    *,
    scores: Any,
) -> Float[Array, "B T N H"]:
    """`attend_flash` of one device's rows and heads, on a TPU."""
    q = (q.astype(jnp.float32) * scores.scale).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out = _splash_heads(q, k, v, q_ids, k_ids, scores.softcap).swapaxes(1, 2)
    out = in_token_order(out.reshape(*out.shape[:2], -1)).reshape(out.shape)
    return jnp.where(sees_something[:, :, None, None], out, 0)


def _splash_heads(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B T"],
    softcap: float | None,
) -> Float[Array, "B N T H"]:
    """The kernel over heads, padded to whole tiles."""
    splash = import_kernel("splash")
    heads, length = q.shape[1:3]
    block = next((b for b in TILES if b <= length), TILES[-1])
    missing = -length % block

    def pad(x: Array, axis: int, value: int = 0) -> Array:
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    padded = length + missing
    causal = splash.CausalMask((padded, padded))
    sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    # XLA keeps arrays of narrow heads with the sequence in the last axis, and would copy others.
    narrow = q.shape[-1] < NUM_LANES
    layout = splash.QKVLayout.SEQ_MINOR if narrow else splash.QKVLayout.HEAD_DIM_MINOR
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout)
    kernel = splash.make_splash_mha_single_device(
        mask=splash.MultiHeadMask([causal] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(sizes, block), **layouts),
        interpret=INTERPRET,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=KEPT,
    )
    ids = splash.SegmentIds(q=pad(q_ids, 1, -2), kv=pad(k_ids, 1, -1))
    out: Any = jax.vmap(kernel)(pad(q, 2), pad(k, 2), pad(v, 2), segment_ids=ids)
    return out[:, :, :length]
