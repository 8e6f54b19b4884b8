"""Two-way tables between our parameters and Hugging Face's tensors, one per family.

Loading, export, GGUF and sharded reading all use them. A tensor or parameter that a table lacks
is an error. `{i}` stands for a layer number on both sides.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np

from jaxllm.common.errors import InputError
from jaxllm.parallel.sharding import parameter_path

if TYPE_CHECKING:
    from jaxllm.models.model import Model


A = TypeVar("A", np.ndarray, jax.Array)

JOINED = {"attn": ("qkv", ("q", "k", "v")), "mlp": ("gate_up", ("gate", "up"))}
"""Name of a sublayer -> name of its joined projections, and of their parts (`join_projections`)."""
_JOINED_PATH = re.compile(r"(?:.*\.)?(attn\.qkv|mlp\.gate_up)\..*")
EXPERT = "{e}"
"""Stands for the number of an expert in a tensor's name."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Name of one Hugging Face tensor, and paths of our parameters that it holds.

    Parameters are [out, in]. `transposed`: the tensor is [in, out] (GPT-2's Conv1D). With several
    `parameters` it is their concatenation along the output axis (GPT-2's fused q, k, v), of which
    each has as many rows, or those of `rows` (grouped-query attention). With `order` our rows are
    the tensor's rows of these numbers (BLOOM has q, k and v of each head together). With `columns`
    the tensor is a matrix of so many columns, and our parameter the vector of its rows, one after
    the other, whose elements `order` names (Cohere's norms have weights for each head).

    With ``{e}`` in its name it stands for the tensors of all experts, of which the parameter is a
    stack [expert, out, in].
    """

    parameters: tuple[str, ...]
    tensor: str
    transposed: bool = False
    rows: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    columns: int = 0

    @property
    def is_stack(self) -> bool:
        """True if it stands for several tensors, those of all experts (`tensors_of`)."""
        return EXPERT in self.tensor

    @property
    def modules(self) -> list[str]:
        """Paths of the modules whose weights are in the tensor."""
        return [path.removesuffix(".weight") for path in self.parameters]

    def tensor_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor, from that of one of its parameters."""
        if self.columns:
            return (shape[0] // self.columns, self.columns)
        rows = sum(self.rows) or shape[0] * len(self.parameters)
        whole = (rows, *shape[1:])
        return whole[::-1] if self.transposed else whole

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Splits a tensor into our parameters; the parts are [out, in] views.

        >>> entry = Entry(("norm",), "norm", order=(0, 2, 1, 3), columns=2)
        >>> entry.split(np.array([[0, 1], [2, 3]])), entry.tensor_shape((4,))
        ([array([0, 2, 1, 3])], (2, 2))
        """
        if self.columns:
            return self.parts(tensor.reshape(-1))
        return self.parts(tensor.T if self.transposed else tensor)

    def parts(self, whole: A) -> list[A]:
        """Splits an array of the tensor's rows, or of a number for each row, into our parameters'.

        >>> [len(part) for part in Entry(("q", "k"), "qk", rows=(8, 4)).parts(np.zeros(12))]
        [8, 4]
        """
        whole = whole[np.asarray(self.order)] if self.order else whole
        if len(self.parameters) == 1:
            return [whole]
        sizes = self.rows or [len(whole) // len(self.parameters)] * len(self.parameters)
        if sum(sizes) != len(whole):
            raise ValueError(f"{self.tensor}: {len(whole)} rows, expected {sum(sizes)}")
        ends = itertools.accumulate(sizes)
        return [whole[end - size : end] for size, end in zip(sizes, ends, strict=True)]

    def index(self, number: int, rows: int, index: tuple[slice, ...]) -> tuple[slice, ...]:
        """Index in the tensor, or in its rows in our `order`, of a slice of parameter `number`,
        which has `rows` rows.

        >>> entry = Entry(("q", "k", "v"), "qkv", transposed=True)
        >>> entry.index(1, 4, (slice(0, 2), slice(2, 4)))
        (slice(2, 4, None), slice(4, 6, None))
        >>> Entry(("q", "k"), "qk", rows=(8, 4)).index(1, 4, (slice(0, 2), slice(0, 3)))
        (slice(8, 10, None), slice(0, 3, None))
        """
        first, *rest = index
        start, stop, _ = first.indices(rows)
        before = sum(self.rows[:number]) if self.rows else number * rows
        whole = (slice(before + start, before + stop), *rest)
        return whole[::-1] if self.transposed else whole

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Inverse of `split`; the result is contiguous."""
        whole = self.whole(np.concatenate(arrays) if len(arrays) > 1 else arrays[0])
        whole = whole.reshape(-1, self.columns) if self.columns else whole
        return np.ascontiguousarray(whole.T if self.transposed else whole)

    def whole(self, rows: A) -> A:
        """Inverse of `parts`, for the concatenated parts.

        >>> entry = Entry(("q", "k"), "qk", order=(0, 2, 1, 3))
        >>> entry.whole(np.concatenate(entry.parts(np.arange(4)))).tolist()
        [0, 1, 2, 3]
        """
        return rows[np.argsort(self.order)] if self.order else rows

    def for_layer(self, i: str) -> Entry:
        """The entry of layer i."""
        names = tuple(o.replace("{i}", i) for o in self.parameters)
        return dataclasses.replace(self, parameters=names, tensor=self.tensor.replace("{i}", i))


@dataclasses.dataclass(frozen=True)
class Table:
    """Weight table of a family: entries for all tensors.

    `prefix`: start of the base model's tensor names in files of a model with a head; files of the
    base model alone lack it. `buffers`: regexes of tensors in old files that are not needed (masks,
    RoPE frequencies). `copies`: (regex, our path) of tensors that duplicate one of our parameters.
    `zeros`: our paths of parameters that are zero if their tensor is absent. `constants`: (regex,
    function) of tensors that follow from the config, such as tables of sinusoidal positions; the
    function makes the first rows of the tensor in float32. A file may hold them or not.
    `new_constants`: (tensor name, rows) of those that the file of a new model holds.
    """

    entries: tuple[Entry, ...]
    prefix: str = ""
    buffers: tuple[str, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    zeros: frozenset[str] = frozenset()
    constants: tuple[tuple[str, Callable[[int], np.ndarray]], ...] = ()
    new_constants: tuple[tuple[str, int], ...] = ()

    def for_model(self, paths: Iterable[str]) -> list[Entry]:
        """Entries of a model with these parameters; each parameter is in exactly one."""
        paths = dict.fromkeys(paths)
        check_not_joined(paths)
        entries = []
        for path in paths:
            entry = self._entry_of(path)
            if path == entry.parameters[0]:
                missing = [o for o in entry.parameters if o not in paths]
                if missing:
                    raise KeyError(f"{entry.tensor}: the model has {path} but not {missing}")
                entries.append(entry)
        return entries

    def _entry_of(self, path: str) -> Entry:
        layer = re.search(r"\.(\d+)\.", path)
        template = path if layer is None else path.replace(layer[0], ".{i}.", 1)
        for entry in self.entries:
            if template in entry.parameters:
                return entry if layer is None else entry.for_layer(layer[1])
        raise KeyError(f"{path}: no tensor in the table of this family")

    def with_entries(self, *entries: Entry) -> Table:
        """A table with these entries, in place of those of the same parameters or tensors."""
        parameters = {path for entry in entries for path in entry.parameters}
        tensors = {entry.tensor for entry in entries}
        kept = [
            entry
            for entry in self.entries
            if entry.tensor not in tensors and not parameters.intersection(entry.parameters)
        ]
        return dataclasses.replace(self, entries=(*kept, *entries))

    def is_buffer(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.buffers)

    def copied_from(self, name: str) -> str | None:
        """Our path of the parameter that tensor `name` duplicates; None if it is no known copy."""
        return next((path for pattern, path in self.copies if re.fullmatch(pattern, name)), None)

    def copies_of(self, path: str, names: Iterable[str]) -> Iterator[str]:
        """Those of the tensors that duplicate our parameter `path`."""
        patterns = [pattern for pattern, ours in self.copies if ours == path]
        return (name for name in names if any(re.fullmatch(p, name) for p in patterns))

    def constant(self, name: str) -> Callable[[int], np.ndarray] | None:
        """The function that makes rows of tensor `name`; None if it is no known constant."""
        return next((make for pattern, make in self.constants if re.fullmatch(pattern, name)), None)


def tensors_of(name: str, count: int) -> Iterator[str]:
    """Names of the tensors of `count` experts.

    >>> list(tensors_of("experts.{e}.up.weight", 2))
    ['experts.0.up.weight', 'experts.1.up.weight']
    """
    return (name.replace(EXPERT, str(number)) for number in range(count))


def same(path: str, tensor: str) -> Iterator[Entry]:
    yield Entry((path,), tensor)


def linear(
    paths: str | tuple[str, ...],
    tensor: str,
    *,
    transposed: bool = False,
    bias: bool = True,
    rows: tuple[int, ...] = (),
    order: tuple[int, ...] = (),
) -> Iterator[Entry]:
    """Entries for the weight and bias of a Linear, or of several fused in one tensor, each with
    its `rows`; `order` as in `Entry`."""
    paths = (paths,) if isinstance(paths, str) else paths
    weights = tuple(f"{path}.weight" for path in paths)
    yield Entry(weights, f"{tensor}.weight", transposed, rows, order)
    if bias:
        biases = tuple(f"{path}.bias" for path in paths)
        yield Entry(biases, f"{tensor}.bias", rows=rows, order=order)


def projections(attention: str, tensors: str, *, rotated: tuple[int, ...] = ()) -> Iterator[Entry]:
    """Entries for the four projections of an attention layer, whose tensors are called `q_proj`,
    `k_proj`, `v_proj` and `out_proj`. `rotated`: order of the rows of q and k (`Entry`)."""
    for ours, theirs in (("q", "q_proj"), ("k", "k_proj"), ("v", "v_proj"), ("o", "out_proj")):
        order = rotated if ours in "qk" else ()
        yield from linear(f"{attention}.{ours}", f"{tensors}.{theirs}", order=order)


def attention_and_mlp(layer: str, hf: str, attention: Mapping[str, str]) -> Iterator[Entry]:
    """Entries of a layer with fairseq's names, as in BART, OPT and XGLM.

    Args:
        layer, hf: path and name of layer {i}.
        attention: our name of each attention sublayer -> its name in the file.
    """
    for ours, theirs in attention.items():
        yield from projections(f"{layer}.{ours}", f"{hf}.{theirs}")
        yield from norm(f"{layer}.{ours}_norm", f"{hf}.{theirs}_layer_norm", bias=True)
    yield from linear(f"{layer}.mlp.up", f"{hf}.fc1")
    yield from linear(f"{layer}.mlp.down", f"{hf}.fc2")
    yield from norm(f"{layer}.mlp_norm", f"{hf}.final_layer_norm", bias=True)


def norm(path: str, tensor: str, *, bias: bool = False) -> Iterator[Entry]:
    yield Entry((f"{path}.weight",), f"{tensor}.weight")
    if bias:
        yield Entry((f"{path}.bias",), f"{tensor}.bias")


def parameters(model: Model[Any]) -> dict[str, jax.Array]:
    """All parameters of a model by path."""
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {parameter_path(path): leaf for path, leaf in leaves}


def is_joined(path: str) -> bool:
    """True for a parameter of joined projections."""
    return _JOINED_PATH.fullmatch(path) is not None


def check_not_joined(paths: Iterable[str]) -> None:
    """Raises InputError if one of the parameters is one of joined projections."""
    if any(map(is_joined, paths)):
        raise InputError(
            "the model's projections are joined for inference; call split_projections, which gives "
            "the layers their usual names"
        )


def is_quantized(model: Model[Any]) -> bool:
    """True if the model has quantized weights (`models/quantize.py`)."""
    return any(".matrix." in path for path in parameters(model))


def with_parameters(model: Model[Any], changed: Mapping[str, jax.Array]):
    """A copy of the model with some parameters replaced; the rest is shared."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(model)
    unknown = changed.keys() - {parameter_path(path) for path, _ in leaves}
    if unknown:
        raise KeyError(f"{', '.join(sorted(unknown))}: the model has no such parameter")
    values = [changed.get(parameter_path(path), leaf) for path, leaf in leaves]
    made = jax.tree_util.tree_unflatten(treedef, values)
    return made if model.card is None else made.with_card(model.card)
