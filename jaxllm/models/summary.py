"""Summary of a model in a few lines: its `repr`, in notebooks and in error messages."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from jaxllm.models.weights import parameters

BLOCK = re.compile(r"(.+?\.)(\d+)\.(.+)")
"""Path of a parameter in a list of blocks: list, index, name in the block."""

Shapes = tuple[tuple[str, tuple[int, ...], str], ...]
"""Name, shape and dtype of each parameter of a module."""


def summary(model: Any) -> str:
    """Class, number of parameters and dtypes, then a line per module; equal blocks share a line.

    >>> from jaxllm.models.gpt2 import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(n_layer=3, n_embd=8, n_head=2, vocab_size=50, n_positions=20)
    >>> print(summary(GPT2LMHeadModel(config, rngs=None)))
    GPT2LMHeadModel: 3,192 parameters, float32
      backbone.embed                  400  weight [50, 8]
      backbone.positions              160  weight [20, 8]
      backbone.stack.blocks.0-2  3 x  872  attn (k, o, q, v), attn_norm, mlp (down, up), mlp_norm
      backbone.stack.norm              16  bias [8], weight [8]
    """
    leaves = parameters(model)
    name = type(model).__name__
    if not all(hasattr(leaf, "shape") for leaf in leaves.values()):
        kinds = sorted({type(leaf).__name__ for leaf in leaves.values()})
        return f"{name}: a tree of {len(leaves)} leaves of type {', '.join(kinds)}"
    dtypes = dict.fromkeys(str(leaf.dtype) for leaf in leaves.values())
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    lines = [(path, *_count(shapes, n), _contents(shapes)) for path, n, shapes in _modules(leaves)]
    path_width, times_width, count_width = (
        max((len(line[i]) for line in lines), default=0) for i in range(3)
    )
    return "\n".join(
        [
            f"{name}: {total:,} parameters, {', '.join(dtypes)}",
            *(
                f"  {path:{path_width}}  {times:>{times_width}}{count:>{count_width}}  {contents}"
                for path, times, count, contents in lines
            ),
        ]
    )


def _modules(leaves: dict[str, Any]) -> Iterator[tuple[str, int, Shapes]]:
    """Path, number of equal blocks and parameters of each module; a block counts as one module."""
    modules: dict[tuple[str, int | None], list[tuple[str, tuple[int, ...], str]]] = {}
    for path, leaf in leaves.items():
        block = BLOCK.fullmatch(path)
        if block is None:
            module, _, name = path.rpartition(".")
            key = (module, None)
        else:
            key, name = (block[1], int(block[2])), block[3]
        modules.setdefault(key, []).append((name, tuple(leaf.shape), str(leaf.dtype)))
    first = 0
    items = [(*key, tuple(shapes)) for key, shapes in modules.items()]
    for position, (path, index, shapes) in enumerate(items):
        if index is None:
            yield path, 1, shapes
            continue
        if position == 0 or items[position - 1][::2] != (path, shapes):
            first = index
        if items[position + 1 : position + 2] and items[position + 1][::2] == (path, shapes):
            continue
        label = f"{path}{first}" if first == index else f"{path}{first}-{index}"
        yield label, index - first + 1, shapes


def _count(shapes: Shapes, blocks: int) -> tuple[str, str]:
    count = sum(math.prod(shape) for _, shape, _ in shapes)
    return f"{blocks} x  " if blocks > 1 else "", f"{count:,}"


def _contents(shapes: Shapes) -> str:
    """Layers of a block, or the parameters of a single layer with their shapes."""
    if all("." not in name for name, _, _ in shapes):
        return ", ".join(f"{name} {list(shape)}" for name, shape, _ in shapes)
    layers: dict[str, dict[str, None]] = {}
    for name, _, _ in shapes:
        layer, *inner, _ = name.split(".")
        layers.setdefault(layer, {}).update(dict.fromkeys(inner[:1]))
    return ", ".join(f"{layer} ({', '.join(x)})" if x else layer for layer, x in layers.items())
