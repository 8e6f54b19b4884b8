"""Layers in a scan: one body is compiled for all layers of the same structure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

Inputs = TypeVar("Inputs")
Output = TypeVar("Output")
Step = Callable[[Float[Array, "B T D"], Inputs], tuple[Float[Array, "B T D"], Output]]
"""Runs one layer, given by its parameters and other inputs: (its output, what it returns)."""


def unroll_layers(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    """``x, out = step(x, layer)`` for one layer after the other: the last x, and each `out`."""
    outputs = []
    for layer in layers:
        x, out = step(x, layer)
        outputs.append(out)
    return x, outputs


def scan_layers(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    """`unroll_layers`, with a `jax.lax.scan` over neighbours of the same structure.

    The structure is that of the pytree, its static fields included: layers with and without a
    window, or with and without LoRA, are in scans of their own. Their arrays are copied into one
    array, except those that are the same object in all layers (masks, RoPE's angles).
    """
    outputs: list[Output] = []
    for _, group in itertools.groupby(layers, structure):
        same = list(group)
        # The first of T5's blocks takes bfloat16, and all give float32.
        changes_dtype = jax.eval_shape(step, x, same[0])[0].dtype != x.dtype
        x, first = unroll_layers(step, x, same[:changes_dtype])
        rest = same[changes_dtype:]
        run = _scan if len(rest) > 1 else unroll_layers
        x, others = run(step, x, rest)
        outputs += first + others
    return x, outputs


def structure(tree: object) -> Hashable:
    """Structure of a pytree, and shapes and dtypes of its leaves."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((jnp.shape(x), jnp.result_type(x)) for x in leaves)


def _scan(
    step: Step[Inputs, Output], x: Float[Array, "B T D"], layers: Sequence[Inputs]
) -> tuple[Float[Array, "B T D"], list[Output]]:
    treedef = jax.tree.structure(layers[0])
    leaves = list(zip(*map(jax.tree.leaves, layers), strict=True))
    shared = [all(x is of_layers[0] for x in of_layers) for of_layers in leaves]

    def body(x: Array, arrays: list[Array]) -> tuple[Array, Output]:
        own = iter(arrays)
        layer = [xs[0] if same else next(own) for xs, same in zip(leaves, shared, strict=True)]
        return step(x, treedef.unflatten(layer))

    stacked = [jnp.stack(xs) for xs, same in zip(leaves, shared, strict=True) if not same]
    x, outputs = jax.lax.scan(body, x, stacked)
    parts, treedef = jax.tree.flatten(outputs)
    return x, [treedef.unflatten([a[i] for a in parts]) for i in range(len(layers))]
