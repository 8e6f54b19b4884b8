"""Sums of a token loss from hidden states, with the logits of a few columns at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxllm.models.input_checks import IGNORED
from jaxllm.models.language_model import head_logits
from jaxllm.models.losses import token_losses
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.parallel.sharding import (
    all_gather_fsdp,
    constrain,
    logical_axes,
    parameter_path,
    shard_count,
)

Head = Linear | Embedding
Sums = Any
"""A pytree of float32 scalars whose field `loss` is differentiated (`losses.LossSums`)."""
SumsOf = Callable[[Float[Array, "tokens V"], Int[Array, " tokens"]], Sums]
"""Sums over some tokens, from their logits and labels."""


def columns_within(limit: int, shape: tuple[int, int], vocab_size: int) -> int:
    """Number of columns of [B, T] whose logits on one device are at most `limit`, 1 or more.

    >>> columns_within(1 << 27, (8, 1024), 50257)
    256
    """
    rows, columns = shape
    shards = shard_count((rows, columns, vocab_size), "rows", None, "vocab")
    fitting = limit * shards // (rows * vocab_size)
    # The next power of two below: most lengths are multiples of it, which then need no padding.
    return columns if fitting >= columns else 1 << max(fitting.bit_length() - 1, 0)


def chunked_sums(
    sums_of: SumsOf,
    columns: int,
    head: Head,
    x: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    key: Array | None,
) -> Sums:
    """``sums_of(head_logits(head, x, key), labels)``, added up over chunks of `columns` columns.

    The gradient of a chunk is computed with its loss, while its logits are there, so that nothing
    is computed twice (as in Liger Kernel, Hsu et al. 2024, arXiv:2410.10989). There is no
    forward-mode derivative.
    """
    return _sums(sums_of, gathered(head), _chunks_of(columns, x, labels, key))


def chunked_row_losses(
    columns: int,
    head: Head,
    x: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    key: Array | None,
) -> Float[Array, " B"]:
    """Cross-entropy summed over each row's labels, with the logits of `columns` columns at a time.

    The weight of a row in the gradient is known only after all of its columns, so the backward
    pass computes the logits a second time.
    """
    head = gathered(head)

    @jax.checkpoint
    def add(losses: Float[Array, " B"], chunk: ChunkInputs) -> tuple[Float[Array, " B"], None]:
        hidden, targets, chunk_key = chunk
        logits = head_logits(head, hidden.reshape(-1, hidden.shape[-1]), chunk_key)
        tokens, _ = token_losses(constrain(logits, "rows", "vocab"), targets.reshape(-1))
        return losses + tokens.reshape(targets.shape).sum(axis=-1), None

    zeros = constrain(jnp.zeros(x.shape[0], jnp.float32), "rows")
    return jax.lax.scan(add, zeros, _chunks_of(columns, x, labels, key))[0]


ChunkInputs = tuple[Float[Array, "B c D"], Int[Array, "B c"], Array | None]
"""Hidden states, labels and dropout key of one chunk."""
Chunks = tuple[Float[Array, "C B c D"], Int[Array, "C B c"], Array | None]
"""The same of all chunks."""


def _chunks_of(
    columns: int, x: Float[Array, "B T D"], labels: Int[Array, "B T"], key: Array | None
) -> Chunks:
    """Splits columns into chunks; the last one is filled with labels that are not counted."""
    count = math.ceil(x.shape[1] / columns)
    missing = count * columns - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, missing), (0, 0)))
    labels = jnp.pad(labels, ((0, 0), (0, missing)), constant_values=IGNORED)

    def chunks(a: Array) -> Array:
        chunked = a.reshape(a.shape[0], count, columns, *a.shape[2:]).swapaxes(0, 1)
        return constrain(chunked, None, "rows")

    keys = None if key is None else jax.random.split(key, count)
    return chunks(x), chunks(labels), keys


def _chunk_sums(sums_of: SumsOf, head: Head, x: Array, labels: Array, key: Array | None) -> Sums:
    # Tokens in one axis: with rows and columns apart a TPU copies the logits' gradients.
    logits = head_logits(head, x.reshape(-1, x.shape[-1]), key)
    return sums_of(constrain(logits, "rows", "vocab"), labels.reshape(-1))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(sums_of: SumsOf, head: Head, chunks: Chunks) -> Sums:
    def add(total: Sums, chunk: ChunkInputs) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, total, _chunk_sums(sums_of, head, *chunk)), None

    return jax.lax.scan(add, _zeros(sums_of, head, chunks), chunks)[0]


def _zeros(sums_of: SumsOf, head: Head, chunks: Chunks) -> Sums:
    first = jax.tree.map(lambda a: a[0], chunks)
    shapes = jax.eval_shape(partial(_chunk_sums, sums_of), head, *first)
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def _forward(sums_of: SumsOf, head: Head, chunks: Chunks) -> tuple[Sums, tuple[Head, Array]]:
    """The sums, and the gradients of their `loss` with respect to the head and hidden states."""

    def loss(head: Head, x: Array, labels: Array, key: Array | None) -> tuple[Array, Sums]:
        sums = _chunk_sums(sums_of, head, x, labels, key)
        return sums.loss, sums

    def add(carry: tuple[Sums, Head], chunk: ChunkInputs) -> tuple[tuple[Sums, Head], Array]:
        grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
        (head_grad, x_grad), sums = grad(head, *chunk)
        return jax.tree.map(jnp.add, carry, (sums, sharded(head_grad))), x_grad

    zeros = (_zeros(sums_of, head, chunks), sharded(jax.tree.map(jnp.zeros_like, head)))
    (sums, head_grad), x_grad = jax.lax.scan(add, zeros, chunks)
    return sums, (head_grad, x_grad)


def _backward(sums_of: SumsOf, gradients: tuple[Head, Array], cotangents: Sums) -> Any:
    head_grad, x_grad = jax.tree.map(lambda g: (g * cotangents.loss).astype(g.dtype), gradients)
    return head_grad, (x_grad, None, None)


_sums.defvjp(_forward, _backward)


def gathered(head: Head) -> Head:
    """The head with its fsdp shards all-gathered, once for all chunks."""
    return _map_parameters(all_gather_fsdp, head)


def sharded(head: Head) -> Head:
    """The head's parameters, or their gradients, in the shards of a parameter."""
    return _map_parameters(constrain, head)


def _map_parameters(function: Callable[..., Array], head: Head) -> Head:
    """``function(parameter, *logical axes)`` of each parameter."""

    def one(path: tuple[Any, ...], leaf: Array) -> Array:
        return function(leaf, *logical_axes(f"lm_head.{parameter_path(path)}"))

    return jax.tree_util.tree_map_with_path(one, head)
