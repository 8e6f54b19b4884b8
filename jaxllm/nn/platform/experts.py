"""Products of rows with the weights of the expert that each row goes to, in groups of rows.

Rows are sorted by expert. A CPU or GPU computes tiles of rows in a loop whose length depends on the
routing; a TPU has a Pallas kernel for it. Both read the weights of the experts that are used, and
no others. `jax.lax.ragged_dot` would multiply every row by the weights of all experts on a CPU, and
by default on a GPU; docs/decisions/grouped-experts.md.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxllm.common.precision import exact_products
from jaxllm.nn.platform.products import varying

W = TypeVar("W")
Expert = Callable[[W, Float[Array, "m I"]], Float[Array, "m O"]]
"""Computes rows with the weights of one expert."""

MAX_TILE = 256
"""Rows of a tile, of which there are many for each expert."""
TPU_ROWS, TPU_INPUTS, TPU_OUTPUTS = 128, 1024, 512
"""Most rows, inputs in bfloat16, and outputs of a tile of the TPU's kernel."""
SUBLANES = 16
"""The TPU's tiles of bfloat16 have a multiple of this number of rows."""


def tile_rows(rows: int, experts: int) -> int:
    """Rows of a tile: twice the mean number of an expert, so that most experts have one tile.

    >>> tile_rows(8, 128), tile_rows(512, 128), tile_rows(1 << 16, 8)
    (1, 8, 256)
    """
    mean = -(-rows // experts)
    return min(MAX_TILE, rows, 1 if mean == 1 else 1 << mean.bit_length())


def tiles_of(
    sizes: Int[Array, " E"], tile: int, count: int
) -> tuple[Int[Array, ""], Int[Array, " N"], Int[Array, " N"], Int[Array, " N"]]:
    """Tiles that cover the rows of every expert, of which none has rows of two experts.

    Args:
        sizes: number of rows of each expert; rows are sorted by expert.
        tile: rows of a tile.
        count: most tiles that there can be.

    Returns:
        The number of tiles; and of each tile its expert, its first row and the end of its rows.
    """
    tiles = -(-sizes // tile)
    last = jnp.cumsum(tiles)
    # The number of experts whose tiles have all come before; a search would be a loop.
    expert = jnp.sum(last[None] <= jnp.arange(count)[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(sizes) - 1)  # beyond the last tile
    ends = jnp.cumsum(sizes)[expert]
    within = jnp.arange(count) - (last - tiles)[expert]
    return last[-1], expert, ends - sizes[expert] + within * tile, ends


def loop_over_tiles(
    step: Callable[[Any, Array, Array, Array], Any],
    carried: Any,
    rows: int,
    sizes: Int[Array, " E"],
) -> Any:
    """``carried = step(carried, expert, first row, rows that count)`` for each tile in order."""
    tile = tile_rows(rows, len(sizes))
    most = rows // tile + min(rows, len(sizes))
    count, experts, starts, ends = tiles_of(sizes, tile, most)

    def body(number: Array, carried: Any) -> Any:
        start = starts[number]
        counts = (start + jnp.arange(tile) < ends[number])[:, None]
        return step(carried, experts[number], start, counts)

    return jax.lax.fori_loop(0, count, body, carried)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_tiles(
    expert: Expert[W], weights: W, x: Float[Array, "M I"], sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """``expert(weights[e], x[r])`` for the rows r of each expert e; zero for rows of none.

    There is no forward-mode derivative, and none of integers among the weights.

    Args:
        expert: computes rows with one expert's weights; the same function at each call.
        weights: a pytree of arrays whose first axis is that of the experts.
        x: rows sorted by expert; those after the last expert's belong to none.
        sizes: number of rows of each expert.
    """
    # A tile reaches into the rows of the next expert. Tiles are in order, so that those rows are
    # written again by their own.
    tile = tile_rows(len(x), len(sizes))
    padded = jnp.pad(x, ((0, tile), (0, 0)))
    shape = jax.eval_shape(expert, _expert_of(weights, 0), padded[:tile])

    def step(y: Array, number: Array, start: Array, counts: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        out = jnp.where(counts, expert(_expert_of(weights, number), rows), 0)
        return jax.lax.dynamic_update_slice_in_dim(y, out, start, 0)

    zeros = varying(jnp.zeros((len(padded), shape.shape[1]), shape.dtype), padded)
    return loop_over_tiles(step, zeros, len(x), sizes)[: len(x)]


def _by_tiles_forward(expert: Expert[W], *arguments: Any) -> tuple[Array, tuple[Any, ...]]:
    return by_tiles(expert, *arguments), arguments


def _by_tiles_backward(
    expert: Expert[W], kept: tuple[W, Array, Array], gradient: Float[Array, "M O"]
) -> tuple[W, Float[Array, "M I"], None]:
    weights, x, sizes = kept
    tile = tile_rows(len(x), len(sizes))
    padded, gradient = (jnp.pad(a, ((0, tile), (0, 0))) for a in (x, gradient))
    leaves, treedef = jax.tree.flatten(weights)
    floats = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def step(
        carried: tuple[Array, list[Array]], number: Array, start: Array, counts: Array
    ) -> tuple[Array, list[Array]]:
        of_x, of_weights = carried
        rows = jax.lax.dynamic_slice_in_dim(padded, start, tile)
        out = jax.lax.dynamic_slice_in_dim(gradient, start, tile)
        _, vjp = jax.vjp(expert, _expert_of(weights, number), rows)
        own, of_rows = vjp(jnp.where(counts, out, 0))
        of_x = jax.lax.dynamic_update_slice_in_dim(of_x, of_rows, start, 0)
        parts = itertools.compress(jax.tree.leaves(own), floats)
        added = [
            total.at[number].add(part.astype(jnp.float32))
            for total, part in zip(of_weights, parts, strict=True)
        ]
        return of_x, added

    # Sums over many tiles are float32, as within a product.
    sums = [jnp.zeros(leaf.shape, jnp.float32) for leaf in itertools.compress(leaves, floats)]
    zeros = varying((jnp.zeros_like(padded), sums), padded)
    of_x, of_weights = loop_over_tiles(step, zeros, len(x), sizes)
    gradients = iter(of_weights)
    of_leaves = [
        next(gradients).astype(leaf.dtype)
        if is_float
        else np.zeros(leaf.shape, jax.dtypes.float0)  # integers have none
        for leaf, is_float in zip(leaves, floats, strict=True)
    ]
    return treedef.unflatten(of_leaves), of_x[: len(x)], None


by_tiles.defvjp(_by_tiles_forward, _by_tiles_backward)


def _expert_of(weights: W, number: int | Array) -> W:
    return jax.tree.map(lambda x: x[number], weights)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    x: Float[Array, "M I"],
    w: Float[Array, "E O I"],
    sizes: Int[Array, " E"],
    interpret: bool = False,
) -> Float[Array, "M O"]:
    """``x[r] W[e]^T`` for the rows r of each expert e, with JAX's kernel for TPUs (megablox).

    The rows of no expert are not computed and get zeros. `interpret` runs the kernel as JAX
    operations on any platform, which the tests do.
    """
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

    _, outputs, inputs = w.shape

    def product(x: Array, tile: Callable[..., Any]) -> Array:
        tiles = tile(inputs, outputs)
        return gmm(x, w, sizes, x.dtype, tiles, transpose_rhs=True, interpret=interpret)

    return _on_own_rows(product, x, sizes)


def _on_own_rows(
    product: Callable[..., Array], x: Float[Array, "M I"], sizes: Int[Array, " E"]
) -> Float[Array, "M O"]:
    """A product of rows by the kernel, which takes whole tiles and does not write rows of no
    expert."""
    rows = len(x)
    tile = tpu_rows(rows)
    padded = jnp.pad(x, ((0, -rows % tile), (0, 0)))
    with exact_products(x):
        y = product(padded, functools.partial(tpu_tiles, tile, x.dtype.itemsize))[:rows]
    return jnp.where((jnp.arange(rows) < jnp.sum(sizes))[:, None], y, 0)


def _grouped_backward(
    interpret: bool, kept: tuple[Array, Array, Array], gradient: Float[Array, "M O"]
) -> tuple[Float[Array, "M I"], Float[Array, "E O I"], None]:
    from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

    x, w, sizes = kept
    _, outputs, inputs = w.shape

    def product(gradient: Array, tile: Callable[..., Any]) -> Array:
        tiles = tile(outputs, inputs)
        return gmm(gradient, w, sizes, gradient.dtype, tiles, interpret=interpret)

    of_x = _on_own_rows(product, gradient, sizes)
    tile = tpu_rows(len(x))
    rows, gradients = (jnp.pad(a, ((0, -len(a) % tile), (0, 0))) for a in (x, gradient))
    tiles = tpu_tiles(tile, x.dtype.itemsize, outputs, inputs)
    with exact_products(x):
        of_w = tgmm(gradients.T, rows, sizes, w.dtype, tiles, interpret=interpret)
    return of_x, of_w, None


grouped_product.defvjp(
    lambda x, w, sizes, interpret: (grouped_product(x, w, sizes, interpret), (x, w, sizes)),
    _grouped_backward,
)


def tpu_rows(rows: int) -> int:
    """Rows of a tile of the TPU's kernel.

    >>> tpu_rows(40), tpu_rows(1 << 14)
    (48, 128)
    """
    return min(TPU_ROWS, -(-rows // SUBLANES) * SUBLANES)


def tpu_tiles(rows: int, itemsize: int, inputs: int, outputs: int) -> tuple[int, int, int]:
    """Rows, inputs and outputs of a tile of the TPU's kernel, whose memory holds two of each.

    >>> tpu_tiles(48, 2, 2048, 768), tpu_tiles(128, 4, 192, 2048)
    ((48, 1024, 512), (128, 192, 512))
    """
    return rows, min(TPU_INPUTS * 2 // itemsize, inputs), min(TPU_OUTPUTS, outputs)
