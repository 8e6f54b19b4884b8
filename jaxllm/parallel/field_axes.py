"""Logical axes of the arrays in a pytree of dataclasses, declared where the fields are.

::

    class State:
        tokens: Array  # [B, L]: rows lead by default
        logits: Array = field(metadata=axes(None, "rows"))  # [steps, B, V]
        cache: Cache  # its own fields declare theirs

A declaration holds for every array below its field, unless a field further down has its own.
`constrain_fields` shards such a tree on the mesh in use; `map_with_axes` is for all other uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jaxllm.parallel.sharding import constrain, context_mesh

T = TypeVar("T")
Axes = tuple[str | None, ...]

DEFAULT: Axes = ("rows",)


def axes(*names: str | None) -> dict[str, Axes]:
    """The metadata of a dataclass field that declares the axes of its arrays, first ones first.

    Arrays with fewer axes than names have the leading ones merged, and merged axes count as the
    first: keys and values are stored as ``[rows, heads, slots, size]`` or
    ``[rows * heads, slots, size]``.
    """
    return {"axes": names}


def map_with_axes(f: Callable[..., Any], tree: T, *others: Any) -> T:
    """``f(axes, array, *arrays of the other trees)`` for every array of the tree.

    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass
    ... class State:
    ...     tokens: Any
    ...     logits: Any = dataclasses.field(metadata=axes(None, "rows"))
    >>> map_with_axes(lambda names, x: names, State(0, [1]))
    State(tokens=('rows',), logits=[(None, 'rows')])
    """

    def one(path: tuple, x: Any, *rest: Any) -> Any:
        return f(_axes_at(tree, path), x, *rest)

    return jax.tree_util.tree_map_with_path(one, tree, *others)


def constrain_fields(tree: T, *, batch: int) -> T:
    """Shards every array by its declared axes, so that one program serves the first call and the
    next. Without a mesh in use it does nothing.

    Args:
        batch: rows, for arrays in which rows and heads are merged.
    """
    if context_mesh() is None:
        return tree

    def one(names: Axes, x: Any) -> Any:
        merged = max(len(names) - x.ndim, 0)
        if not merged:
            return constrain(x, *names)
        return constrain(x, names[0], *names[1 + merged :], batch=batch)

    return map_with_axes(one, tree)


def _axes_at(tree: Any, path: tuple) -> Axes:
    """The innermost declaration on the way to a leaf."""
    names = DEFAULT
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            if dataclasses.is_dataclass(tree):
                fields = {field.name: field for field in dataclasses.fields(tree)}
                names = fields[key.name].metadata.get("axes", names)
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jax.tree_util.DictKey):
            tree = tree[key.key]
        else:
            break
    return names
