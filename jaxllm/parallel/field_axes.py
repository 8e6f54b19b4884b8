"""Logical axes of arrays in a pytree of dataclasses, declared in the metadata of the fields.

::

    class State:
        tokens: Array  # [B, L]: the first axis is rows by default
        logits: Array = field(metadata=axes(None, "rows"))  # [steps, B, V]
        cache: Cache  # its own fields declare theirs

A declaration applies to every array below its field, unless a nested field has its own.
`constrain_fields` shards such a tree on the mesh in use; `map_with_axes` serves all other uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from jaxllm.parallel.sharding import constrain, context_mesh, partition_spec

T = TypeVar("T")
Axes = tuple[str | None, ...]

DEFAULT: Axes = ("rows",)


def axes(*names: str | None) -> dict[str, Axes]:
    """Metadata for a dataclass field that names the leading axes of its arrays.

    In an array with fewer axes than names the leading axes are merged, and sharded as the first of
    them: keys and values are stored as ``[rows, heads, slots, size]`` or
    ``[rows * heads, slots, size]``.
    """
    return {"axes": names}


def map_with_axes(f: Callable[..., Any], tree: T, *others: Any) -> T:
    """Maps ``f(axes, array, *arrays of the other trees)`` over every array of the tree.

    >>> @jax.tree_util.register_dataclass
    ... @dataclasses.dataclass
    ... class State:
    ...     tokens: Any
    ...     logits: Any = dataclasses.field(metadata=axes(None, "rows"))
    >>> map_with_axes(lambda names, x: names, State(0, [1]))
    State(tokens=('rows',), logits=[(None, 'rows')])
    """

    def apply(path: tuple[Any, ...], x: object, *rest: Any) -> Any:
        return f(_axes_at(tree, path), x, *rest)

    return jax.tree_util.tree_map_with_path(apply, tree, *others)


def constrain_fields(tree: T, *, batch: int) -> T:
    """Shards every array by its declared axes; does nothing without a mesh in use. With fixed
    shardings the second call of a program does not compile it again.

    Args:
        batch: number of rows, for arrays in which rows and heads are merged.
    """
    if context_mesh() is None:
        return tree

    def shard(names: Axes, x: object) -> Any:
        array_axes, rows = _axes_of(x, names, batch)
        return constrain(x, *array_axes, batch=rows)

    return map_with_axes(shard, tree)


def field_shardings(tree: T, mesh: Mesh | AbstractMesh, *, batch: int) -> T:
    """The shardings that `constrain_fields` gives the arrays, or shapes, of a tree."""

    def sharding(names: Axes, x: Any) -> NamedSharding:
        array_axes, rows = _axes_of(x, names, batch)
        return NamedSharding(mesh, partition_spec(x.shape, array_axes, mesh, rows))

    return map_with_axes(sharding, tree)


def _axes_of(x: Any, names: Axes, batch: int) -> tuple[Axes, int | None]:
    """Axes of an array that may have merged leading axes, and then the number of rows."""
    merged = max(len(names) - x.ndim, 0)
    return ((names[0], *names[1 + merged :]), batch) if merged else (names, None)


def _axes_at(tree: Any, path: tuple[Any, ...]) -> Axes:
    """The innermost axes declared on the path to a leaf."""
    names = DEFAULT
    for key in path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            if dataclasses.is_dataclass(tree):
                fields = {field.name: field for field in dataclasses.fields(tree)}
                names = fields[key.name].metadata.get("axes", names)
            tree = getattr(tree, key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            tree = tree[key.idx]
        elif isinstance(key, jax.tree_util.DictKey) or isinstance(tree, tuple):
            tree = tree[key.key]  # such a tuple is a list of processors or stopping criteria
        else:
            break
    return names
