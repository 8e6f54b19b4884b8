"""Attention by blocks of queries, which never holds an array of all queries x keys."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.cache.attention_view import SequenceMask
from jaxllm.cache.kv_cache import KV

BY_PARTS = ("blockwise", "splash")
"""Implementations that take masks and biases by their parts, not as arrays."""
QUERY_BLOCK = 256
"""Queries of a block; fewer are computed by eager attention."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ColumnBias:
    """Attention bias that depends on the columns of query and key only (T5)."""

    bias: Any
    """``bias(query_columns, key_columns)`` is [#B, N, T, S]; `RelativeBias`."""
    query_columns: Int[Array, " T"] | Int[Array, "B T"]
    key_columns: Int[Array, " S"] | Int[Array, "B S"]

    def array(self) -> Float[Array, "#B N T S"]:
        return self.bias(self.query_columns, self.key_columns)


def attend_blocks(
    attend: Callable[..., Float[Array, "B b N H"]],
    q: Float[Array, "B T N H"],
    kv: KV,
    *,
    mask: SequenceMask,
    bias: ColumnBias | None,
    key: Array | None,
) -> Float[Array, "B T N H"]:
    """Attention of one block of queries after the other, on any platform.

    The backward pass computes the scores of each block anew, so that neither pass holds those of
    all queries.

    Args:
        attend: ``attend(q, kv, visible=, bias=, key=)`` of a block.
        key: dropout key, split over the blocks; None in inference.
    """
    T = q.shape[1]
    count = math.ceil(T / QUERY_BLOCK)

    def blocks(x: Array | None, axis: int) -> Array | None:
        """Splits the queries' axis into blocks, which come first."""
        if x is None:
            return None
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, count * QUERY_BLOCK - T)
        split = (*x.shape[:axis], count, QUERY_BLOCK, *x.shape[axis + 1 :])
        return jnp.moveaxis(jnp.pad(x, widths).reshape(split), axis, 0)

    queries = (
        blocks(q, 1),
        blocks(mask.query_columns, 0),
        blocks(mask.query_segments, 1),
        blocks(mask.query_index, 1),
        None if bias is None else blocks(bias.query_columns, bias.query_columns.ndim - 1),
        None if key is None else jax.random.split(key, count),
    )
    # Gradients of keys and values are summed over blocks in float32.
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), kv)

    def one(_: None, block: tuple[Any, ...]) -> tuple[None, Array]:
        q, columns, segments, index, slots, key = block
        parts = {"query_columns": columns, "query_segments": segments, "query_index": index}
        out = attend(
            q,
            jax.tree.map(differentiated_as, kv, exact),
            visible=dataclasses.replace(mask, **parts).array(),
            bias=None if bias is None else bias.bias(slots, bias.key_columns),
            key=key,
        )
        return None, out

    _, out = jax.lax.scan(jax.checkpoint(one), None, queries)
    return jnp.moveaxis(out, 0, 1).reshape(q.shape[0], -1, *q.shape[2:])[:, :T]


@jax.custom_jvp
def differentiated_as(x: Array, exact: Array) -> Array:
    """Returns x, which is ``exact.astype(x.dtype)`` and has the derivative of that.

    So a pass without gradients holds no array of `exact`.
    """
    return x


@differentiated_as.defjvp
def _differentiated_as_jvp(
    primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    return primals[0], tangents[1].astype(primals[0].dtype)
