"""Attention of a decode step in one kernel, for GPUs of compute capability 9 (H100, H200).

XLA makes three kernels of two products with a softmax between them, and two more of the writes into
the cache. This one is written in Pallas for Mosaic GPU. It compiles for an H100 and gives the right
numbers in JAX's interpreter, but has not run on a device; docs/decisions/gpu-programs.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxllm.cache.kv_cache import KV
from jaxllm.nn.platform.attention import SLOT_MULTIPLE, NewColumns
from jaxllm.parallel.sharding import context_mesh

TILE = 64
"""Cache slots that one product takes."""
QUERIES = 64
"""Rows of a product of the tensor cores. A query fills several equal ones."""
MAX_QUERIES = 8
"""Most queries of a head of the cache, for which the registers are enough."""
BUFFERS = 4
"""Tiles of the cache that are on their way or in use."""
HIDDEN = -1e30
"""Score of a slot that is not attended to; finite, so that differences of scores are."""
FLOAT32 = jnp.float32
INTERPRETER: Any = None
"""Parameters of JAX's interpreter of such kernels, in which the tests run it on a CPU."""

Sums = tuple[Float[Array, "Q H"], Float[Array, " Q"], Float[Array, " Q"]]
"""Weighted sum of values, largest score and sum of weights of each row of a product."""


def step_applies(heads: int, kv: KV, scores: Any, x: Float[Array, "B T _"], new: Any) -> bool:
    """True if the kernel computes this attention, which has few queries.

    Args:
        heads: number of the queries' heads.
        scores: the layer's `jaxllm.nn.attention.Scores`.
        x: input of the layer.
        new: `NewColumns`; None: nothing is written.
    """
    if type(kv) is not KV or kv.k.ndim != 3 or context_mesh() is not None:
        return False
    if new is not None and jnp.ndim(new[2]) > 1:
        return False
    rows, capacity, size = kv.k.shape
    of_head = math.prod(x.shape[:2]) * heads // rows
    is_half = x.dtype == kv.k.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    fits = size in (64, 128) and of_head <= MAX_QUERIES
    in_tiles = capacity >= TILE and capacity % SLOT_MULTIPLE == 0
    return is_half and fits and in_tiles and scores.softcap is None


def attend_or_step(
    attend: Callable[..., Array],
    q: Float[Array, "B T N H"],
    kv: KV,
    new: NewColumns | None,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N #T S"] | None,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], KV]:
    """``attend(q, kv, visible, bias)`` after the new columns are written, and the cache with
    them. On a GPU the kernel does both, with the gradients of `attend`."""

    def plain(*arguments: Any) -> tuple[Array, KV]:
        q, kv, visible, bias, new = arguments
        kv = kv if new is None else kv.write(*new)
        return attend(q, kv, visible, bias), kv

    # Not `custom_jvp`, in which JAX does not compile the references of the kernel.
    kernel = jax.custom_vjp(functools.partial(attend_step, scale=scale, interpreter=INTERPRETER))
    kernel.defvjp(functools.partial(jax.vjp, plain), lambda backward, of_out: backward(of_out))
    other = plain if INTERPRETER is None else kernel
    return lax.platform_dependent(q, kv, visible, bias, new, cuda=kernel, default=other)


# Compiled as a function of its own, so that JAX traces and lowers it once for all layers.
@functools.partial(jax.jit, static_argnames=("scale", "interpreter"))
def attend_step(
    q: Float[Array, "B T N H"],
    kv: KV,
    visible: Bool[Array, "B 1 #T S"],
    bias: Float[Array, "#B N #T S"] | None = None,
    new: NewColumns | None = None,
    *,
    scale: float,
    interpreter: Any = None,
) -> tuple[Float[Array, "B T N H"], KV]:
    """Attention of a few queries to the columns of a cache that are in use, and the cache.

    Args:
        new: columns to write, and the slots of the first ones. Those of a row whose first slot is
            beyond the cache are not written. A single one is attended to, visible or not.
    """
    batch, count, heads, size = q.shape
    kv_heads, capacity = kv.k.shape[0] // batch, kv.capacity
    # Rows of arrays that are copied to a core's memory have a multiple of 16 bytes.
    widths = [(0, 0), (0, -capacity % TILE)]
    shown = jnp.pad(jnp.where(visible[:, 0], 0.0, HIDDEN), [(0, 0), *widths])
    # The kernel changes references in place.
    refs = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in (kv.k, kv.v) if new is not None]
    inputs: dict[str, Any] = dict(zip("kv", refs or (kv.k, kv.v), strict=True))
    inputs |= {"q": q, "shown": shown, "tiles": tiles_in_use(shown == 0)}
    if bias is not None:
        inputs["bias"] = jnp.pad(bias.astype(FLOAT32), [(0, 0), (0, 0), *widths])
    if new is not None:
        # XLA computes what is concatenated in one kernel.
        inputs["q"] = jnp.concatenate([q, *new[:2]], axis=2)
        inputs["slot"] = slot = jnp.broadcast_to(new[2], (batch,))
        if count > 1:
            columns = slot[:, None, None] + jnp.arange(count, dtype=jnp.int32)
            seen = jnp.broadcast_to(visible[:, 0], (batch, count, capacity))
            sees = jnp.take_along_axis(seen, columns, axis=2, mode="fill", fill_value=False)
            inputs["sees_new"] = sees.astype(jnp.int32)
    kernel = StepKernel(
        count=count,
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        capacity=capacity,
        dtype=q.dtype,
        scale=scale,
        masks=shown.shape[1],
        biases=0 if bias is None else bias.shape[2],
        biased_rows=bias is not None and bias.shape[0] > 1,
        writes=new is not None,
        interpreter=interpreter,
    )
    out = kernel.run(inputs, jax.ShapeDtypeStruct(q.shape, q.dtype))
    return out, KV(*map(jax.freeze, refs)) if refs else kv


def tiles_in_use(seen: Bool[Array, "B T S"]) -> Int[Array, "B 2"]:
    """The first tile of each row with a visible slot, and the one after the last.

    >>> tiles_in_use(jnp.arange(192)[None, None] == 70).tolist()
    [[1, 2]]
    """
    seen = seen.any(axis=1)
    first = jnp.argmax(seen, axis=1) // TILE
    slots = seen.shape[1] - jnp.argmax(seen[:, ::-1], axis=1)
    stop = jnp.where(seen.any(axis=1), -(-slots // TILE), first)
    return jnp.stack([first, stop], axis=1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class StepKernel:
    """The kernel of `attend_step`: a block of threads for each row and head of the cache.

    Four warps compute, and four others copy the tiles of the cache that follow into buffers. As in
    FlashAttention (Dao et al. 2022, arXiv:2205.14135) the sums so far are scaled when a larger
    score is found. The new columns come first, and from the queries' array, so that nothing of them
    is read from the cache, to which they are written last.
    """

    count: int
    """Queries of each row, T."""
    heads: int
    kv_heads: int
    size: int
    """Size of a head, H."""
    capacity: int
    dtype: DTypeLike
    scale: float
    masks: int
    """1: all queries of a row see the same slots; else T."""
    biases: int
    """Biases of a row and head: 0, 1 or T."""
    biased_rows: bool
    """True if each row has biases of its own."""
    writes: bool
    """True if there are new columns."""
    interpreter: Any

    @property
    def group(self) -> int:
        """Heads of queries for each head of the cache, G."""
        return self.heads // self.kv_heads

    @property
    def places(self) -> list[tuple[int, int]]:
        """Query and head in its group of each part of a product's rows."""
        return [(t, g) for t in range(self.count) for g in range(self.group)]

    @property
    def span(self) -> int:
        """Rows of a product that are the same query."""
        return QUERIES // len(self.places)

    def run(self, inputs: dict[str, Any], out: jax.ShapeDtypeStruct) -> Array:
        """Runs the kernel for all rows and heads of the cache."""
        in_tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        tiles = plgpu.SMEM((BUFFERS, TILE, self.size), self.dtype, transforms=in_tiles)
        scratch = {
            "out": plgpu.SMEM((QUERIES, self.size), self.dtype),
            "q": plgpu.SMEM((self.count, self.group, self.size), self.dtype),
            "new": plgpu.SMEM((2, self.count, self.size), self.dtype),
            "k": tiles,
            "v": tiles,
            "shown": plgpu.SMEM((BUFFERS, self.masks, TILE), FLOAT32),
            "bias": plgpu.SMEM((BUFFERS, self.group, max(self.biases, 1), TILE), FLOAT32),
            "loaded": plgpu.Barrier(num_arrivals=4 if self.biases else 3, num_barriers=BUFFERS),
            "free": plgpu.Barrier(num_barriers=BUFFERS),
            "ready": plgpu.Barrier(num_arrivals=self.count * (3 if self.writes else 1)),
        }

        def body(*refs: Any) -> None:
            *of_inputs, of_out = refs
            named = dict(zip(inputs, of_inputs, strict=True))

            def on_core(**smem: Any) -> None:
                thread = lax.axis_index("thread")
                pl.when(thread == 0)(lambda: self.compute(named, of_out, smem))
                pl.when(thread == 1)(lambda: self.load(named, smem))

            pl.run_scoped(on_core, **scratch, collective_axes="thread")

        cells = out.shape[0] * self.kv_heads
        run: Any = pl.kernel(
            body,
            out_type=out,
            mesh=plgpu.Mesh(
                grid=(cells,), grid_names=("cell",), num_threads=2, thread_name="thread"
            ),
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
            interpret=False if self.interpreter is None else self.interpreter,
            name="attend_step",
        )
        return run(*inputs.values())

    def place(self, refs: dict[str, Any]) -> tuple[Array, Array, Array, Array, Array]:
        """Number of this block of threads, its row and head, and the tiles that it reads."""
        cell = lax.axis_index("cell")
        row, head = lax.div(cell, jnp.int32(self.kv_heads)), lax.rem(cell, jnp.int32(self.kv_heads))
        return cell, row, head, refs["tiles"][row, 0], refs["tiles"][row, 1]

    def start(self, tile: Array) -> Array:
        """The first slot of a tile. The last tile of a cache overlaps the one before."""
        return jnp.minimum(tile * TILE, self.capacity - TILE)

    def buffer(self, tile: Array, first: Array) -> Array:
        """Number of the buffer of a tile, if `first` is the row's first tile."""
        return lax.rem(tile - first, jnp.int32(BUFFERS))

    def row_of_bias(self, row: Array) -> Array:
        """Row of the biases that a row of queries has."""
        return row if self.biased_rows else jnp.int32(0)

    def load(self, refs: dict[str, Any], smem: dict[str, Any]) -> None:
        """Copies the tiles of keys and values, and what belongs to them, into the buffers."""
        cell, row, head, first, stop = self.place(refs)

        @pl.loop(first, stop)
        def _(tile: Array) -> None:
            i, every, slots = self.buffer(tile, first), slice(None), pl.ds(self.start(tile), TILE)

            @pl.when(tile - first >= BUFFERS)
            def _() -> None:
                plgpu.barrier_wait(smem["free"].at[i])

            parts = {"k": (cell, slots), "v": (cell, slots), "shown": (row, every, slots)}
            if self.biases:
                own = pl.ds(head * self.group, self.group)
                parts["bias"] = (self.row_of_bias(row), own, every, slots)
            for name, index in parts.items():
                source, target = refs[name].at[index], smem[name].at[i]
                plgpu.copy_gmem_to_smem(source, target, smem["loaded"].at[i])

        # Every arrival at a barrier is waited for.
        @pl.loop(jnp.maximum(first, stop - BUFFERS), stop)
        def _(tile: Array) -> None:
            plgpu.barrier_wait(smem["free"].at[self.buffer(tile, first)])

    def compute(self, refs: dict[str, Any], out_ref: Any, smem: dict[str, Any]) -> None:
        """Attends to the new columns and to all tiles, and writes the output and the columns."""
        cell, row, head, first, stop = self.place(refs)
        for t in range(self.count):
            own = pl.ds(head * self.group, self.group)
            plgpu.copy_gmem_to_smem(refs["q"].at[row, t, own], smem["q"].at[t], smem["ready"])
            for i in range(2 if self.writes else 0):
                source = refs["q"].at[row, t, self.heads + i * self.kv_heads + head]
                plgpu.copy_gmem_to_smem(source, smem["new"].at[i, t], smem["ready"])
        plgpu.barrier_wait(smem["ready"])
        q = self.by_query([smem["q"][t, g] for t, g in self.places])
        sums = self.of_new_columns(q, refs, smem)

        def step(tile: Array, sums: Sums) -> Sums:
            i = self.buffer(tile, first)
            plgpu.barrier_wait(smem["loaded"].at[i])
            sums = self.with_tile(tile, i, q, sums, refs, smem)
            plgpu.barrier_arrive(smem["free"].at[i])
            return sums

        values, _, total = lax.fori_loop(first, stop, step, sums)
        total = jnp.where(total > 0, total, 1.0)
        values = values / lax.broadcast_in_dim(total, values.shape, (0,))
        smem["out"][...] = values.astype(self.dtype)
        plgpu.commit_smem()
        for i, (t, g) in enumerate(self.places):
            target = out_ref.at[row, t, head * self.group + g]
            plgpu.copy_smem_to_gmem(smem["out"].at[i * self.span], target)
        if self.writes:
            slot = refs["slot"][row]

            @pl.when(slot < self.capacity)
            def _() -> None:
                for i, name in enumerate("kv"):
                    for t in range(self.count):
                        target = refs[name].at[cell, slot + t]
                        plgpu.copy_smem_to_gmem(smem["new"].at[i, t], target)

        plgpu.wait_smem_to_gmem(0)

    def of_new_columns(
        self, q: Float[Array, "Q H"], refs: dict[str, Any], smem: dict[str, Any]
    ) -> Sums:
        """The sums of the new columns alone; zeros without any."""
        values = self.in_layout(jnp.zeros(q.shape, FLOAT32))
        total = self.in_layout(jnp.zeros((QUERIES,), FLOAT32))
        if not self.writes:
            return values, self.in_layout(jnp.full((QUERIES,), HIDDEN)), total
        scores = [self.scores_of_new(q, t, refs, smem) for t in range(self.count)]
        largest = functools.reduce(jnp.maximum, scores)
        for t, score in enumerate(scores):
            weight = jnp.where(score > HIDDEN, jnp.exp(score - largest), 0.0)
            value = lax.broadcast_in_dim(smem["new"][1, t].astype(FLOAT32), q.shape, (1,))
            values += lax.broadcast_in_dim(weight, q.shape, (0,)) * value
            total += weight
        return values, largest, total

    def scores_of_new(
        self, q: Float[Array, "Q H"], column: int, refs: dict[str, Any], smem: dict[str, Any]
    ) -> Float[Array, " Q"]:
        """The scores of all queries and a new column."""
        _, row, head, _, _ = self.place(refs)
        key = lax.broadcast_in_dim(smem["new"][0, column].astype(FLOAT32), q.shape, (1,))
        scores = (q.astype(FLOAT32) * key).sum(axis=1) * self.scale
        number = self.in_layout(lax.broadcasted_iota(jnp.int32, (QUERIES,), 0))
        for i, (t, g) in enumerate(self.places):
            of_query = scores
            if self.biases:
                # A column that is not written has an arbitrary bias.
                slot = jnp.minimum(refs["slot"][row] + column, self.capacity - 1)
                own_head = head * self.group + g
                of_query += refs["bias"][self.row_of_bias(row), own_head, t % self.biases, slot]
            if self.count > 1:
                is_seen = jnp.full((QUERIES,), refs["sees_new"][row, t, column]) > 0
                of_query = jnp.where(is_seen, of_query, HIDDEN)
            own = (number >= i * self.span) & (number < (i + 1) * self.span)
            scores = jnp.where(own, of_query, scores)
        return scores

    def with_tile(
        self,
        tile: Array,
        i: Array,
        q: Float[Array, "Q H"],
        sums: Sums,
        refs: dict[str, Any],
        smem: dict[str, Any],
    ) -> Sums:
        """Adds the sums of a tile, which is in buffer `i`."""
        values, largest, total = sums
        scores = self.product(q, smem["k"].at[i], TILE, transposed=True) * self.scale
        if self.biases:
            scores += self.by_query([smem["bias"][i, g, t % self.biases] for t, g in self.places])
        slot = self.in_layout(lax.broadcasted_iota(jnp.int32, scores.shape, 1)) + self.start(tile)
        shown = self.by_query([smem["shown"][i, t % self.masks] for t, _ in self.places])
        seen = (shown == 0) & (slot >= tile * TILE)
        if self.writes:
            new = refs["slot"][self.place(refs)[1]]
            seen &= (slot < new) | (slot >= new + self.count)
        scores = jnp.where(seen, scores, HIDDEN)
        top = jnp.maximum(largest, scores.max(axis=1))
        weights = jnp.exp(scores - lax.broadcast_in_dim(top, scores.shape, (0,)))
        weights = jnp.where(seen, weights, 0.0)
        added = self.product(weights.astype(self.dtype), smem["v"].at[i], self.size)
        kept = jnp.exp(largest - top)
        values = values * lax.broadcast_in_dim(kept, values.shape, (0,)) + added
        return values, top, total * kept + weights.sum(axis=1)

    def product(
        self, a: Float[Array, "Q X"], b: Any, width: int, *, transposed: bool = False
    ) -> Float[Array, "Q width"]:
        """The product of registers and a buffer, float32."""
        if self.interpreter is not None:  # which has no products of registers
            return jnp.dot(a, b[...].T if transposed else b[...], preferred_element_type=FLOAT32)

        def run(sums: Any) -> Array:
            plgpu.wgmma(sums, a, plgpu.transpose_ref(b, (1, 0)) if transposed else b)
            return sums[...]

        accumulator = plgpu.ACC((QUERIES, width), FLOAT32)  # pyright: ignore[reportPrivateImportUsage]
        return pl.run_scoped(run, accumulator)

    def by_query(self, vectors: Sequence[Float[Array, " X"]]) -> Float[Array, "Q X"]:
        """Makes a matrix for products, in which all rows of a query are the query's vector."""
        shape = (QUERIES, vectors[0].shape[0])
        out = self.in_layout(jnp.zeros(shape, vectors[0].dtype))
        row = self.in_layout(lax.broadcasted_iota(jnp.int32, shape, 0))
        for i, vector in enumerate(vectors):
            vector = lax.broadcast_in_dim(vector, shape, (1,))
            out = jnp.where(row >= i * self.span, vector, out)
        return out

    def in_layout(self, x: Array) -> Array:
        """`x` in the registers in which products have their rows. The interpreter has none."""
        layout = plgpu.Layout.WGMMA if x.ndim == 2 else plgpu.Layout.WGMMA.reduce(1)
        return x if self.interpreter is not None else plgpu.layout_cast(x, layout)
