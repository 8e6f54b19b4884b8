"""Splash attention: JAX's Pallas kernel of flash attention for TPUs."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as splash_mask,
)
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.attention_view import SequenceMask
from jaxllm.cache.kv_cache import KV
from jaxllm.common.precision import precision_of
from jaxllm.parallel.sharding import context_mesh, partition_spec

TILES = (512, 256, 128)
"""Queries, and keys, of a tile."""
NUM_LANES = 128
"""Width of a TPU's vector registers."""
INTERPRET = False
"""Run the kernel as JAX operations on any platform, which the tests do."""


def splash_applies(q: Float[Array, "B T N H"], mask: SequenceMask) -> bool:
    """True if `attend_splash` computes this mask: causal, and the window covers all queries.

    The kernel counts a window in columns, this library in real tokens. Its products of float32 are
    not exact.
    """
    queries = q.shape[1]
    return (
        queries >= TILES[-1]
        and precision_of(q) is None
        and mask.query_columns is not None
        and (mask.window is None or mask.window >= queries)
    )


def attend_splash(
    q: Float[Array, "B T N H"], kv: KV, *, mask: SequenceMask, scores: Any
) -> Float[Array, "B T N H"]:
    """Causal attention with JAX's Pallas kernel for TPUs (splash attention).

    On a mesh each device computes its rows and heads. A query with no visible key gets zeros.

    Args:
        scores: the layer's `jaxllm.nn.attention.Scores`.
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
    mesh, run = context_mesh(), partial(_attend_rows, scores=scores)
    if mesh is not None:
        axes = ("rows", None, "heads", None)
        specs = [partition_spec(x.shape, axes[: x.ndim], mesh) for x in arrays]
        run = jax.shard_map(
            run, mesh=mesh, in_specs=tuple(specs), out_specs=specs[0], check_vma=False
        )
    return run(*arrays)


def _attend_rows(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B T"],
    sees_something: Bool[Array, "B T"],
    *,
    scores: Any,
) -> Float[Array, "B T N H"]:
    """`attend_splash` of one device's rows and heads."""
    q, k, v = (gradient_in_token_order(x) for x in (q, k, v))
    q = (q.astype(jnp.float32) * scores.scale).astype(q.dtype)
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    out = _splash_rows(q, k, v, q_ids, k_ids, scores.softcap).swapaxes(1, 2)
    return in_token_order(jnp.where(sees_something[:, :, None, None], out, 0))


def in_token_order(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Returns x, token after token in memory, as products with the projections' matrices read it.

    XLA would keep the kernel's order, and copy it for each of the products and sums that read it.
    """
    rows = x.reshape(*x.shape[:2], -1)
    return with_layout_constraint(rows, Layout((0, 1, 2))).reshape(x.shape)


@jax.custom_vjp
def gradient_in_token_order(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Returns x, whose gradient is `in_token_order`."""
    return x


gradient_in_token_order.defvjp(lambda x: (x, None), lambda _, gradient: (in_token_order(gradient),))


def _splash_rows(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    q_ids: Int[Array, "B T"],
    k_ids: Int[Array, "B T"],
    softcap: float | None,
) -> Float[Array, "B N T H"]:
    """The kernel over heads, padded to whole tiles."""
    heads, length = q.shape[1:3]
    block = next((b for b in TILES if b <= length), TILES[-1])
    missing = -length % block

    def pad(x: Array, axis: int, value: int = 0) -> Array:
        widths = [(0, missing if i == axis else 0) for i in range(x.ndim)]
        return jnp.pad(x, widths, constant_values=value)

    padded = length + missing
    causal = splash_mask.CausalMask((padded, padded))
    sizes = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    # XLA keeps arrays of narrow heads with the sequence in the last axis, and would copy others.
    narrow = q.shape[-1] < NUM_LANES
    layout = splash.QKVLayout.SEQ_MINOR if narrow else splash.QKVLayout.HEAD_DIM_MINOR
    layouts = dict.fromkeys(("q_layout", "k_layout", "v_layout"), layout)
    kernel = splash.make_splash_mha_single_device(
        mask=splash_mask.MultiHeadMask([causal] * heads),
        block_sizes=splash.BlockSizes(**dict.fromkeys(sizes, block), **layouts),
        interpret=INTERPRET,
        attn_logits_soft_cap=softcap,
    )
    ids = splash.SegmentIds(q=pad(q_ids, 1, -2), kv=pad(k_ids, 1, -1))
    out: Any = jax.vmap(kernel)(pad(q, 2), pad(k, 2), pad(v, 2), segment_ids=ids)
    return out[:, :, :length]
