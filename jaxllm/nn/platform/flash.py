"""Flash attention of whole sequences, by JAX's Pallas kernels for TPUs and for GPUs.

Neither holds scores of all queries and keys in memory (Dao et al. 2022, arXiv:2205.14135).
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
from jaxllm.common.precision import precision_of
from jaxllm.nn.linear import KEPT
from jaxllm.nn.platform.attention import in_token_order
from jaxllm.parallel.sharding import context_mesh, partition_spec, shard_map_is_checked

TILES = (512, 256, 128)
"""Queries, and keys, of a tile."""
NUM_LANES = 128
"""Width of a TPU's vector registers."""
WIDEST_HEAD = 256
"""Features of a head for which the tiles of the kernel for GPUs fit into a core's memory."""
MODULES = {
    "splash": "jax.experimental.pallas.ops.tpu.splash_attention",
    "triton": "jax.experimental.pallas.ops.gpu.attention",
}
"""JAX's module of each kernel."""
INTERPRET = False
"""Run the kernels as JAX operations on any platform, which the tests do."""


def import_kernel(implementation: str) -> Any:
    """Imports JAX's module of a kernel. A warning that JAX will remove the module is not shown.

    Raises:
        UnsupportedError: this version of JAX does not have the module.
    """
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
    """True if `attend_flash` computes this mask: causal, and the window covers all queries.

    The kernels count a window in columns, this library in real tokens. Their products of float32
    are not exact. The one for GPUs caps no scores.

    Args:
        scores: the layer's `jaxllm.nn.attention.Scores`.
    """
    queries, width = q.shape[1], q.shape[3]
    if implementation == "triton" and (scores.softcap is not None or width > WIDEST_HEAD):
        return False
    return (
        queries >= TILES[-1]
        and precision_of(q) is None
        and mask.query_columns is not None
        and (mask.window is None or mask.window >= queries)
        and not shard_map_is_checked()
    )


def attend_flash(
    implementation: str,
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    mask: SequenceMask,
    scores: Any,
) -> Float[Array, "B T N H"]:
    """Causal attention with the kernel for TPUs ("splash") or the one for GPUs ("triton").

    On a mesh each device computes its rows and heads. A query with no visible key gets zeros, as
    does a pad on a GPU.
    """
    B, T = q.shape[:2]
    K = math.prod(kv.leading_shape) // B
    # The projections' order of axes; XLA drops these transpositions together with those of `KV`.
    k, v = (x.reshape(B, K, *x.shape[-2:]).transpose(0, 2, 1, 3) for x in (kv.k, kv.v))
    if mask.query_segments is None or mask.key_segments is None:
        q_ids, k_ids = jnp.ones((B, T), jnp.int32), jnp.ones((B, T), jnp.int32)
        sees_something = jnp.cumsum(mask.keys, axis=1) > 0
    else:
        q_ids, k_ids, sees_something = mask.query_segments, mask.key_segments, mask.keys
    k_ids = jnp.where(mask.keys, k_ids, -1)
    arrays = (q, k, v, q_ids.astype(jnp.int32), k_ids.astype(jnp.int32), sees_something)
    kernel: Callable[..., Array] = _triton_rows if implementation == "triton" else _splash_rows
    mesh, run = context_mesh(), partial(kernel, scores=scores)
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
    """`attend_flash` of one device's rows and heads, on a GPU."""
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
