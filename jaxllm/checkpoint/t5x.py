"""Reads T5X checkpoints of T5, mT5, ByT5 and umT5 under Hugging Face's names.

T5X (https://github.com/google-research/t5x) writes a folder ``checkpoint_1000`` with a msgpack file
``checkpoint``. The file has a tree of parameters, whose leaves are arrays, or say which folder
beside the file holds an array in zarr's format. Newer versions of T5X use Orbax, which writes the
same zarr arrays into a database (OCDBT) in the folder ``checkpoint_1000/state``. Only the
parameters are read, not the states of the optimizer.

Linear layers are ``[in, out]`` in T5X, and relative biases ``[heads, buckets]``: both are the
transpose of Hugging Face's. T5X's scalable_t5, of umT5, keeps the heads of attention apart, as in
``[in, heads, size]``, has a relative bias in every layer, and stacks the layers along axis 1 unless
``scan_layers`` is off.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxllm.checkpoint.flax_file import FlaxFile
from jaxllm.checkpoint.msgpack import ARRAY, SCALAR, StoredArray, flattened, read_msgpack
from jaxllm.checkpoint.source import Index, MappedFile, TensorInfo, WeightSource, find_tensor
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    MissingFileError,
    UnsupportedError,
    naming_file,
    quoted,
)
from jaxllm.models.config_checks import MAX_LAYERS

_TOP = {
    "token_embedder/embedding": "shared.weight",
    "decoder/logits_dense/kernel": "lm_head.weight",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm.weight",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm.weight",
}
_SUBLAYERS = {
    "encoder": {
        "pre_attention_layer_norm": "0.layer_norm",
        "attention": "0.SelfAttention",
        "relpos_bias": "0.SelfAttention",
        "pre_mlp_layer_norm": "1.layer_norm",
        "mlp": "1.DenseReluDense",
    },
    "decoder": {
        "pre_self_attention_layer_norm": "0.layer_norm",
        "self_attention": "0.SelfAttention",
        "relpos_bias": "0.SelfAttention",
        "pre_cross_attention_layer_norm": "1.layer_norm",
        "encoder_decoder_attention": "1.EncDecAttention",
        "pre_mlp_layer_norm": "2.layer_norm",
        "mlp": "2.DenseReluDense",
    },
}
_PARTS = {
    "scale": "weight",
    "rel_embedding": "relative_attention_bias.weight",
    **{f"{x}/kernel": f"{x[0]}.weight" for x in ("query", "key", "value", "out")},
    **{f"{x}/kernel": f"{x}.weight" for x in ("wi", "wi_0", "wi_1", "wo")},
}
# A layer of its own, the stack of all layers, or what all layers of a side share.
_LAYER = re.compile(r"(encoder|decoder)/(?:layers_(\d{1,6})/|(\1)/)?([a-z_]+)/(.+)")
_HEADS = ("query/kernel", "key/kernel", "value/kernel", "out/kernel")
_COMPRESSORS = (None, "gzip", "zstd")
_MAX_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True)
class _Leaf:
    """An array of T5X's tree."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Index], np.ndarray]
    release: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class _Tensor:
    """A tensor of Hugging Face's, in an array of T5X's tree.

    Attributes:
        path: the array's path in the tree.
        layer: number of the layer in an array that stacks all layers along axis 1.
        heads: first of the two axes of an array that are heads and their size. The tensor has
            one axis for both.
    """

    path: str
    layer: int | None
    heads: int | None
    transposed: bool


class T5XView(WeightSource):
    """A T5X checkpoint with Hugging Face's names and layout.

    Args:
        path: the msgpack file, or the folder of a checkpoint that Orbax wrote.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._leaves = _orbax_leaves(path) if path.is_dir() else _msgpack_leaves(path)
        self._tensors: dict[str, _Tensor] = {}
        for array, leaf in self._leaves.items():
            for name, tensor in _tensors(array, leaf, path):
                if name in self._tensors:
                    raise CheckpointError(
                        f"{path}: {quoted(array)} and {quoted(self._tensors[name].path)} are both "
                        f"{quoted(name)}"
                    )
                self._tensors[name] = tensor
        self._stacks: dict[str, dict[str, np.ndarray]] = {path: {} for path in self._leaves}
        self._released: dict[str, set[int]] = {path: set() for path in self._leaves}
        self._locks = {path: threading.Lock() for path in self._leaves}

    def names(self) -> list[str]:
        return list(self._tensors)

    def info(self, name: str) -> TensorInfo:
        tensor = find_tensor(self._tensors, name, self.path)
        leaf = self._leaves[tensor.path]
        shape = _merged(tensor, _without_layer(tensor, leaf.shape))
        shape = shape[::-1] if tensor.transposed else shape
        return TensorInfo(shape, leaf.dtype, math.prod(shape) * leaf.dtype.itemsize, self.path)

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        tensor = find_tensor(self._tensors, name, self.path)
        stored = _without_layer(tensor, self._leaves[tensor.path].shape)
        index = (*index, *[slice(None)] * (len(_merged(tensor, stored)) - len(index)))
        index = index[::-1] if tensor.transposed else index
        if tensor.heads is None:
            values = self._stored(tensor, index)
        else:  # the tensor has one axis for heads and their sizes: whole heads are read, and cut
            axis, size = tensor.heads, stored[tensor.heads + 1]
            start, stop, _ = index[axis].indices(stored[axis] * size)
            heads = slice(start // size, -(-max(start, stop) // size))
            before, after = index[:axis], index[axis + 1 :]
            values = self._stored(tensor, (*before, heads, slice(None), *after))
            values = values.reshape(_merged(tensor, values.shape))
            part = slice(start - heads.start * size, stop - heads.start * size)
            values = values[(*[slice(None)] * axis, part)]
        return values.T if tensor.transposed else values

    def _stored(self, tensor: _Tensor, index: Index) -> np.ndarray:
        """Reads a slice of the tensor in T5X's layout.

        A stack of layers is kept until each of its layers is released: a chunk holds all layers, so
        that reading them one by one would decompress the array once a layer.
        """
        leaf = self._leaves[tensor.path]
        if tensor.layer is None:
            return leaf.read(index)
        with self._locks[tensor.path]:
            stacks, key = self._stacks[tensor.path], repr(index)
            if key not in stacks:
                stack = leaf.read((index[0], slice(None), *index[1:]))
                stack.flags.writeable = False
                stacks[key] = stack
            return stacks[key][:, tensor.layer]

    def release_pages(self, name: str) -> None:
        tensor = find_tensor(self._tensors, name, self.path)
        leaf = self._leaves[tensor.path]
        if tensor.layer is not None:
            with self._locks[tensor.path]:
                released = self._released[tensor.path]
                released.add(tensor.layer)
                if len(released) < leaf.shape[1]:
                    return
                released.clear()
                self._stacks[tensor.path].clear()
        leaf.release()

    def close(self) -> None:
        for stacks in self._stacks.values():
            stacks.clear()
        self._leaves, self._tensors = {}, {}

    def settled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The content of config.json, completed by what the tree says about the head.

        T5X divides the logits by the square root of d_model if they come from the embedding.

        Raises:
            MissingFileError: there is no config.json.
            ConfigError: the config says something else about the head.
        """
        if not config.keys() & {"model_type", "architectures"}:
            raise MissingFileError(
                f"{self.path}: T5X writes no config.json; put the one of the Hugging Face model "
                "of this size beside the checkpoint, or give its fields with load(..., config=)"
            )
        is_tied = "lm_head.weight" not in self._tensors
        names = ["tie_word_embeddings", "scale_decoder_outputs"]
        if str(config.get("transformers_version", "")).startswith(("5.", "6.")):
            names.pop(0)  # always true in these files
        for name in names:
            if config.get(name) not in (None, is_tied):
                found = "no decoder/logits_dense" if is_tied else "a decoder/logits_dense"
                raise ConfigError(
                    f"{self.path}: the tree has {found}, but config.json says {name} "
                    f"{quoted(config[name])}; give the config.json of the model that T5X trained"
                )
        return {**config, "tie_word_embeddings": is_tied, "scale_decoder_outputs": is_tied}


def _without_layer(tensor: _Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if tensor.layer is None else (*shape[:1], *shape[2:])


def _merged(tensor: _Tensor, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with one axis for all heads."""
    if tensor.heads is None:
        return shape
    after = tensor.heads + 2
    return (*shape[: tensor.heads], math.prod(shape[tensor.heads : after]), *shape[after:])


def _tensors(path: str, leaf: _Leaf, file: Path) -> Iterator[tuple[str, _Tensor]]:
    """Hugging Face's names of the tensors in an array of the tree, and where they are in it."""
    match = _LAYER.fullmatch(path)
    side, number, stack, sublayer, part = match.groups() if match else ("encoder", *[None] * 4)
    name = _TOP.get(path)
    if sublayer in _SUBLAYERS[side] and part in _PARTS:
        has_layer = stack or number or sublayer == "relpos_bias"
        name = f"layer.{_SUBLAYERS[side][sublayer]}.{_PARTS[part]}" if has_layer else None
    if name is None:
        raise UnsupportedError(
            f"{file}: {quoted(path)} is no part of a T5, mT5, ByT5 or umT5 model; jaxllm reads no "
            "other models of T5X"
        )
    ndim = len(leaf.shape) - (1 if stack else 0)
    allowed = (1,) if path.endswith("/scale") else (2, 3) if path.endswith(_HEADS) else (2,)
    if ndim not in allowed or 0 in leaf.shape:
        raise CheckpointError(
            f"{file}: {quoted(path)} has the shape {list(leaf.shape)}, which T5X does not write"
        )
    heads = None if ndim < 3 else 0 if path.endswith("out/kernel") else 1
    place = functools.partial(
        _Tensor, path, heads=heads, transposed=ndim > 1 and not path.endswith("/embedding")
    )
    if path in _TOP:
        yield name, place(layer=None)
    elif stack:
        for layer in range(min(leaf.shape[1], MAX_LAYERS)):
            yield f"{side}.block.{layer}.{name}", place(layer=layer)
    else:
        yield f"{side}.block.{int(number or 0)}.{name}", place(layer=None)


class _MsgpackFile(FlaxFile):
    """T5X's msgpack file: arrays by their path in the tree, and descriptions of other arrays."""

    def __init__(self, path: Path) -> None:
        MappedFile.__init__(self, path)
        if bytes(self.head(21)) == b"model_checkpoint_path":
            raise UnsupportedError(
                f"{path}: belongs to a checkpoint of TensorFlow; convert it with "
                "t5x/scripts/convert_tf_checkpoint.py of T5X"
            )
        tree = read_msgpack(self.head(self.size), source=str(path), extensions=(ARRAY, SCALAR))
        state = tree.get("optimizer", tree) if isinstance(tree, dict) else None
        target = state.get("target") if isinstance(state, dict) else None
        if not isinstance(target, dict):
            raise CheckpointError(f"{path}: holds no tree named target; T5X did not write it")
        leaves = flattened(target, str(path), is_leaf={"driver", "kvstore"}.issubset)
        self.tensors = {n: x for n, x in leaves.items() if isinstance(x, StoredArray)}
        self.others = {n: x for n, x in leaves.items() if n not in self.tensors}


def _msgpack_leaves(path: Path) -> dict[str, _Leaf]:
    file = _MsgpackFile(path)
    leaves = {
        name: _Leaf(
            array.shape,
            array.dtype,
            functools.partial(file.read, name),
            functools.partial(file.release_pages, name),
        )
        for name, array in file.tensors.items()
    }
    for name, spec in file.others.items():
        match spec:
            # tensorstore before 0.1.14 has the path in the outer map.
            case {"kvstore": {"path": str(where)}} | {"kvstore": {}, "path": str(where)}:
                leaf = _zarr_leaf(_folder_store(path.parent, where), path.parent / where)
            case _:
                raise CheckpointError(
                    f"{path}: {quoted(name)} is {quoted(spec)}, which describes no array in a "
                    "folder; jaxllm reads what T5X's Checkpointer and current Orbax write"
                )
        metadata = spec.get("metadata")
        shape = metadata.get("shape") if isinstance(metadata, dict) else None
        described = [spec["driver"], spec.get("dtype"), shape]
        found = ["zarr", leaf.dtype.name, list(leaf.shape)]
        if described != found:
            raise CheckpointError(
                f"{path}: describes {quoted(name)} as {quoted(described)}, but the folder "
                f"{quoted(where)} holds {quoted(found)}; copy or download the checkpoint again"
            )
        leaves[name] = leaf
    return leaves


def _orbax_leaves(folder: Path) -> dict[str, _Leaf]:
    state = folder / "state"
    if not (state / "manifest.ocdbt").is_file():
        raise UnsupportedError(
            f"{state}: has no manifest.ocdbt, as Orbax writes it for T5X; restore the checkpoint "
            "with T5X and save it again"
        )
    import tensorstore  # slow

    def store(name: str) -> dict[str, Any]:
        base = {"driver": "file", "path": f"{state.resolve()}/"}
        return {"driver": "ocdbt", "base": base, "path": name}

    with _naming(state):
        targets = tensorstore.KvStore.KeyRange("target.", "target/")
        keys = tensorstore.KvStore.open(store("")).result().list(targets).result()
    names = dict.fromkeys(key.decode().split("/")[0] for key in keys)
    if not names:
        raise CheckpointError(f"{state}: holds no arrays of a tree named target")
    return {
        name.removeprefix("target.").replace(".", "/"): _zarr_leaf(store(f"{name}/"), state / name)
        for name in names
    }


def _folder_store(root: Path, name: str) -> dict[str, Any]:
    """tensorstore's description of an array's folder, all of whose files lie within `root`."""
    folder = root / name
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not name.isprintable() or {*name} & {*":\\"}:
        raise CheckpointError(
            f"{root}: the checkpoint names {quoted(name)} as an array's folder, which is no folder "
            "within the checkpoint's"
        )
    with naming_file(folder, CheckpointError, "read"):
        for file in (folder, *folder.iterdir()):
            if not file.resolve().is_relative_to(root.resolve()):
                raise CheckpointError(
                    f"{file}: leads out of the checkpoint's folder {root}; copy the checkpoint "
                    "with its links followed (cp -rL)"
                )
    return {"driver": "file", "path": f"{folder.resolve()}/"}


def _zarr_leaf(store: Mapping[str, Any], where: Path) -> _Leaf:
    """Opens a zarr array, and checks its compressor and the size of its chunks.

    Args:
        store: tensorstore's description of where the array's files are.
        where: the array's name in errors.
    """
    import tensorstore  # slow

    # By default tensorstore reads zeros where a chunk is missing.
    spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
    with _naming(where):
        array = tensorstore.open(spec, open=True, read=True).result()
        metadata = array.spec().to_json()["metadata"]
    compressor = (metadata["compressor"] or {}).get("id")
    if compressor not in _COMPRESSORS:
        raise CheckpointError(f"{where}: is compressed with {compressor}; T5X uses gzip or zstd")
    dtype, chunk = array.dtype.numpy_dtype, metadata["chunks"]
    is_larger = any(part > size for part, size in zip(chunk, array.shape, strict=True))
    if is_larger and math.prod(chunk) * dtype.itemsize > _MAX_CHUNK_BYTES:
        raise CheckpointError(
            f"{where}: the chunks' shape {chunk} is larger than the array's, {list(array.shape)}; "
            "is .zarray damaged?"
        )

    def read(index: Index) -> np.ndarray:
        sizes = zip(index, array.shape, strict=True)
        bounds = tuple(slice(*part.indices(size)[:2]) for part, size in sizes)
        with _naming(where):
            return array[bounds].read().result()

    return _Leaf(array.shape, dtype, read)


@contextlib.contextmanager
def _naming(where: Path) -> Generator[None]:
    """Turns an error of tensorstore into one that begins with the array's folder."""
    try:
        yield
    except (ValueError, OSError, RuntimeError, NotImplementedError) as failure:
        reason = str(failure).partition(" [")[0]  # without the description, which follows
        raise CheckpointError(
            f"{where}: cannot be read: {reason}; copy or download the checkpoint again"
        ) from failure
