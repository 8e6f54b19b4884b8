"""Two-way tables between our parameters and Hugging Face's tensors, one per family.

Loading, export, GGUF and sharded reading all use them. A tensor or parameter that a table lacks
is an error. `{i}` stands for a layer number on both sides.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Hugging Face tensor (`theirs`) and the parameters that it holds (`ours`).

    Ours are [out, in]. `transposed`: theirs is [in, out] (GPT-2's Conv1D). With several in `ours`,
    theirs is their concatenation along the output axis (GPT-2's fused q, k, v).
    """

    ours: tuple[str, ...]
    theirs: str
    transposed: bool = False

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Splits a tensor into our parameters; the parts are [out, in] views."""
        whole = theirs.T if self.transposed else theirs
        return np.split(whole, len(self.ours)) if len(self.ours) > 1 else [whole]

    def index(self, number: int, rows: int, ours: tuple[slice, ...]) -> tuple[slice, ...]:
        """Index in their tensor of a slice of our parameter `number`, which has `rows` rows.

        >>> entry = Entry(("q", "k", "v"), "qkv", transposed=True)
        >>> entry.index(1, 4, (slice(0, 2), slice(2, 4)))
        (slice(2, 4, None), slice(4, 6, None))
        """
        first, *rest = ours
        start, stop, _ = first.indices(rows)
        whole = (slice(number * rows + start, number * rows + stop), *rest)
        return whole[::-1] if self.transposed else whole

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Inverse of `split`; the result is contiguous."""
        whole = np.concatenate(ours) if len(ours) > 1 else ours[0]
        return np.ascontiguousarray(whole.T if self.transposed else whole)

    def at(self, i: str) -> Entry:
        """The entry of layer i."""
        return Entry(
            tuple(o.replace("{i}", i) for o in self.ours),
            self.theirs.replace("{i}", i),
            self.transposed,
        )


@dataclasses.dataclass(frozen=True)
class Table:
    """Weight table of a family: entries for all tensors.

    `prefix`: start of the base model's tensor names in files of a model with a head; files of the
    base model alone lack it. `buffers`: regexes of tensors in old files that are not needed (masks,
    RoPE frequencies). `copies`: (regex, our path) of tensors that duplicate one of our parameters.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    buffers: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()

    def for_model(self, paths: Iterable[str]) -> list[Entry]:
        """Entries of a model with these parameters; each parameter is in exactly one."""
        wanted = dict.fromkeys(paths)
        found = []
        for path in wanted:
            entry = self._entry_of(path)
            if path == entry.ours[0]:
                missing = [o for o in entry.ours if o not in wanted]
                if missing:
                    raise KeyError(f"{entry.theirs}: the model has {path} but not {missing}")
                found.append(entry)
        return found

    def _entry_of(self, path: str) -> Entry:
        layer = re.search(r"\.(\d+)\.", path)
        template = path if layer is None else path.replace(layer[0], ".{i}.", 1)
        for entry in self.entries:
            if template in entry.ours:
                return entry if layer is None else entry.at(layer[1])
        raise KeyError(f"{path}: no tensor in the table of this family")

    def is_buffer(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def copied_from(self, name: str) -> str | None:
        """Our path of the parameter that tensor `name` duplicates; None if it is no known copy."""
        return next((ours for pattern, ours in self.copies if re.fullmatch(pattern, name)), None)


def same(ours: str, theirs: str) -> Iterator[Entry]:
    yield Entry((ours,), theirs)


def linear(
    ours: str | tuple[str, ...], theirs: str, *, transposed: bool = False, bias: bool = True
) -> Iterator[Entry]:
    """Entries for the weight and bias of a Linear, or of several fused in one tensor."""
    ours = (ours,) if isinstance(ours, str) else ours
    yield Entry(tuple(f"{o}.weight" for o in ours), f"{theirs}.weight", transposed)
    if bias:
        yield Entry(tuple(f"{o}.bias" for o in ours), f"{theirs}.bias")


def norm(ours: str, theirs: str, *, bias: bool = False) -> Iterator[Entry]:
    yield Entry((f"{ours}.weight",), f"{theirs}.weight")
    if bias:
        yield Entry((f"{ours}.bias",), f"{theirs}.bias")


def parameter_path(key_path: tuple) -> str:
    """Dotted path of a pytree leaf: ``backbone.stack.blocks.0.attn.q.weight``."""
    parts = []
    for key in key_path:
        if isinstance(key, jax.tree_util.GetAttrKey):
            parts.append(key.name)
        elif isinstance(key, jax.tree_util.SequenceKey):
            parts.append(str(key.idx))
        else:
            parts.append(str(getattr(key, "key", key)))
    return ".".join(parts[:-1] if parts[-1] == "value" else parts)


def parameters(model) -> dict[str, jax.Array]:
    """All parameters of a model by path."""
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {parameter_path(path): leaf for path, leaf in leaves}


def with_parameters(model, changed: Mapping[str, jax.Array]):
    """A copy of the model with some parameters replaced; the rest is shared."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    unknown = changed.keys() - {parameter_path(path) for path, _ in leaves}
    if unknown:
        raise KeyError(f"{', '.join(sorted(unknown))}: the model has no such parameter")
    values = [changed.get(parameter_path(path), leaf) for path, leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, values)
