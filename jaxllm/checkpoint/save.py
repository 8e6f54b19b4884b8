"""Saves a model as a Hugging Face folder, with the names, dtypes and bytes of its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike

from jaxllm.checkpoint.load import (
    Checkpoint,
    match_tensors,
    named_spec,
    read_spec,
    same_bits,
    tensor_name,
    warn_of_flax,
    with_overrides,
)
from jaxllm.checkpoint.load_parameters import LoadProgress, check_range
from jaxllm.checkpoint.safetensors import write_sharded
from jaxllm.checkpoint.source import FLOATS, Index, float_dtype
from jaxllm.checkpoint.weight_files import (
    UNREAD_SUFFIXES,
    WEIGHT_SUFFIXES,
    known_names,
    other_files,
)
from jaxllm.common.errors import (
    CheckpointError,
    InputError,
    UnsupportedError,
    listed,
    quoted,
    warn,
)
from jaxllm.common.files import make_folder, write_json
from jaxllm.models.build_options import FLOAT32
from jaxllm.models.lora import lora_layers
from jaxllm.models.model import Model, model_shapes
from jaxllm.models.quantize import formats_of, quantized_shapes
from jaxllm.models.registry import FAMILIES, ModelSpec, architecture_of
from jaxllm.models.weights import check_not_joined, is_quantized, parameters, tensors_of
from jaxllm.parallel.processes import in_all_processes

MAX_SHARD_BYTES = 5 * 10**9
STOP = -1


def save_model(
    folder: Path,
    model: Model[Any],
    arrays: Mapping[str, LazyHostArray],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes config.json and the weights; see `jaxllm.save_hf`.

    Args:
        arrays: the model's parameters by path, from `with_host_arrays`.
    """
    if os.path.exists(folder) and not os.path.isdir(folder):  # False for a name that is too long
        raise CheckpointError(f"{folder}: is not a folder; name another one")
    make_folder(folder)
    tensors = dict(hf_tensors(model, arrays))
    original = original_dtypes(model, tensors)
    dtype = float_dtype("dtype", dtype)
    cast = {}
    for name, x in tensors.items():
        target = jnp.dtype(dtype or original.get(name, x.dtype))
        if target == np.float16 != x.dtype:
            check_range(name, x.read(), target)
        cast[name] = LazyHostArray(x.shape, target, lambda x=x, to=target: np.asarray(x.read(), to))
    write_sharded(folder, cast, max_shard_bytes)
    if replaced := other_files(folder):  # which the Flax-named classes would load
        for path in replaced:
            path.unlink()
        names = listed([path.name for path in replaced])
        warn(f"{folder}: removed {names}, the weights of the model that was replaced")
    dtypes = {name: str(x.dtype) for name, x in cast.items()}
    write_json(folder / "config.json", saved_config(model, dtypes))


def save_tensors(
    folder: Path,
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike | None = None,
    progress: LoadProgress | None = None,
) -> ModelSpec:
    """Writes the config and the weights of an opened checkpoint, one tensor at a time.

    The checkpoint may have any format that jaxllm reads. Its tensors are checked as `load_model`
    checks them. A tensor that duplicates another one is written once: transformers and jaxllm tie
    the two again.

    Args:
        folder: an existing folder.
        dtype: dtype of the written tensors. None: the dtype that each is read with.
        progress: called as ``progress(tensor_name, bytes_done, bytes_total)``.

    Returns:
        The family and the class of the model.
    """
    spec = read_spec(checkpoint, None, None)
    warn_of_flax(checkpoint, spec.config)
    expected = parameters(model_shapes(spec.make, spec.config, FLOAT32))
    found = match_tensors(spec, expected, checkpoint.weights)
    source, dtype = found.source, float_dtype("dtype", dtype)
    tensors: dict[str, LazyHostArray] = {}
    written: dict[str, int] = {}  # bytes of the tensors that were read
    mapped: list[str] = []  # the tensor whose pages are in memory

    def add(name: str, stored: str, shape: tuple[int, ...], index: Index = ()) -> None:
        target = np.dtype(dtype or source.info(stored).dtype)

        def read() -> np.ndarray:
            for earlier in mapped:
                source.release_pages(earlier)
            mapped[:] = [stored]
            values = source.read(stored, index).reshape(shape)
            if target == np.float16 != values.dtype:
                check_range(name, values, target)
            if progress is not None and name not in written:
                written[name] = tensors[name].nbytes
                progress(name, sum(written.values()), sum(x.nbytes for x in tensors.values()))
            return np.asarray(values, target)

        tensors[name] = LazyHostArray(shape, target, read)

    for stored, entry in found.entries.items():
        name, shape = found.names[stored], source.info(stored).shape
        if entry.is_stack:
            for number, expert in enumerate(tensors_of(name, shape[0])):
                rest = (slice(0, size) for size in shape[1:])
                add(expert, stored, shape[1:], (slice(number, number + 1), *rest))
        else:
            add(name, stored, shape)
    for name, _ in found.constants:
        add(name, name, source.info(name).shape)
    write_sharded(folder, tensors)
    dtypes = {name: x.dtype.name for name, x in tensors.items()}
    write_json(folder / "config.json", with_dtype(completed_config(checkpoint, spec), dtypes))
    return spec


def completed_config(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """The checkpoint's config.json, with what jaxllm knew of the tensors or the kind of file only.

    That is the class, whether the head is tied, and whether T5's head is scaled.
    """
    config = {"architectures": [spec.architecture], **with_overrides(checkpoint, None)}
    model_type = str(config.get("model_type"))
    known = spec.config.to_json(model_type, spec.architecture)
    for _ in range(2):  # a field that is absent may follow from one that was set
        implied = named_spec(config, checkpoint.config_file).config
        read = implied.to_json(model_type, spec.architecture)
        config |= {name: value for name, value in known.items() if value != read.get(name)}
    return config


def with_dtype(config: dict[str, Any], dtypes: Mapping[str, str]) -> dict[str, Any]:
    """A config.json with the most common dtype of the saved tensors."""
    names = list(dtypes.values())
    key = "dtype" if "dtype" in config else "torch_dtype"
    return {**config, key: max(set(names), key=names.count)}


def check_no_model(folder: Path) -> None:
    """Raises CheckpointError if the folder holds the config or the weights of a model."""
    if existing := model_files(folder):
        raise CheckpointError(
            f"{folder}: there is a model already ({listed(sorted(existing))}); use another folder, "
            "or overwrite=True to replace it"
        )


def model_files(folder: Path) -> list[str]:
    """Names of a folder's config and weight files, in any format."""
    names = [path.name for path in folder.iterdir()] if os.path.isdir(folder) else []
    weights = (*WEIGHT_SUFFIXES, ".gguf", *UNREAD_SUFFIXES)
    known = ("config.json", *known_names())
    return [name for name in names if name in known or name.lower().endswith(weights)]


def check_parameters(model: Model[Any], function: str) -> None:
    """Checks that the arrays of a model, such as one from `jax.tree.map`, are those of its config.

    Args:
        function: name of the function that saves the model, for the message.

    Raises:
        InputError: an array is missing, or has another shape or dtype.
    """
    config = model.checked_card(function).config
    shapes = quantized_shapes(model_shapes(type(model), config, FLOAT32), formats_of(model))
    expected = {
        path: (x.shape, x.dtype.name if ".matrix." in path else "float")
        for path, x in parameters(shapes).items()
    }
    found = parameters(model)
    check_not_joined(found)
    for path in lora_layers(model):
        rows, columns = expected[f"{path}.weight"][0]
        rank = next(iter(getattr(found[f"{path}.lora_b"], "shape", ())[-1:]), 0)
        lora = {"a": (rank, columns), "b": (rows, rank), "magnitude": (rows,)}
        expected |= {f"{path}.lora_{name}": (shape, "float") for name, shape in lora.items()}
    lacking = [path for path in expected if path not in found and ".lora_" not in path]
    for path in [*found, *lacking]:
        (shape, dtype), x = expected[path], found.get(path)
        actual, fits = quoted(x), False
        if isinstance(x, jax.Array | np.ndarray):
            actual = f"{x.dtype}{list(x.shape)}"
            fits = x.shape == shape and (
                x.dtype in FLOATS if dtype == "float" else x.dtype == dtype
            )
        if not fits:
            raise InputError(
                f"{function}: {path}: expected {dtype}{list(shape)}, as config and class imply, "
                f"found {actual}; save the models of a stack one by one, and cast weights to "
                "float32, bfloat16 or float16"
            )


def check_no_lora(parameters: Iterable[str], function: str) -> None:
    """Raises InputError if one of the parameters, by their names, is of LoRA."""
    if any(path.endswith(".lora_a") for path in parameters):
        raise InputError(
            f"{function}: the model has LoRA adapters; save merge_lora(model), or the adapters "
            "with save_adapter"
        )


def hf_tensors(
    model: Model[Any], arrays: Mapping[str, LazyHostArray]
) -> Iterator[tuple[str, LazyHostArray]]:
    """The model's parameters as Hugging Face tensors, in their own dtype."""
    model_type, _ = architecture_of(model)
    table = FAMILIES[model_type].table(model.config)
    origin = model.checked_card("save_hf").origin
    check_no_lora(arrays, "save_hf")
    if is_quantized(model):
        raise UnsupportedError(
            "save_hf: Hugging Face's format cannot hold these quantized weights; use save_orbax, "
            "or load the model without quantize="
        )
    file_tensors = None if origin is None else {name for name, _ in origin.dtypes}
    for entry in table.for_model(arrays):
        name = tensor_name(entry, table, stripped=origin is not None and origin.stripped)
        parts = [arrays[path] for path in entry.parameters]
        absent = file_tensors is not None and name not in file_tensors
        if table.zeros.issuperset(entry.parameters) and absent and not parts[0].read().any():
            continue  # still zero, as in the file without this tensor
        if entry.is_stack:
            yield from expert_tensors(name, parts[0])
            continue
        yield (
            name,
            LazyHostArray(
                entry.tensor_shape(parts[0].shape),
                parts[0].dtype,
                lambda entry=entry, parts=parts: entry.join([part.read() for part in parts]),
            ),
        )
    for name, ours in origin.copies if origin is not None else ():
        if ours in arrays:
            yield name, arrays[ours]
    dtypes = {} if origin is None else dict(origin.dtypes)
    for name, rows in table.new_constants if origin is None else origin.constants:
        make = table.constant(name)
        assert make is not None  # the table of this family named it
        values = make(rows).astype(dtypes.get(name, np.float32))
        yield name, LazyHostArray(values.shape, values.dtype, lambda values=values: values)


def expert_tensors(name: str, stack: LazyHostArray) -> Iterator[tuple[str, LazyHostArray]]:
    """The tensors of a stack. Tensors that are read one after another share a copy on the host."""
    last: list[np.ndarray] = []

    def read(number: int) -> np.ndarray:
        if number == 0 or not last:
            last[:] = [stack.read()]
        tensor = np.ascontiguousarray(last[0][number])
        if number == stack.shape[0] - 1:
            last.clear()
        return tensor

    for number, tensor in enumerate(tensors_of(name, stack.shape[0])):
        yield tensor, LazyHostArray(stack.shape[1:], stack.dtype, partial(read, number))


def original_dtypes(model: Model[Any], tensors: Mapping[str, LazyHostArray]) -> dict[str, np.dtype]:
    """Dtypes of the file that the model was loaded from, if casting back is lossless; else empty.

    So a half-precision checkpoint that was loaded as float32 is saved with its original bytes; if
    it was trained further in float32 it is saved in float32.
    """
    origin = model.checked_card("save_hf").origin
    if origin is None or origin.quantized:
        return {}
    dtypes = {name: jnp.dtype(dtype) for name, dtype in origin.dtypes}
    same_names = dtypes.keys() == tensors.keys()
    lossless = same_names and all(
        x.dtype == dtypes[name] or is_lossless(x.read(), dtypes[name])
        for name, x in tensors.items()
    )
    return dtypes if lossless else {}


def is_lossless(x: np.ndarray, dtype: DTypeLike) -> bool:
    """True if casting to `dtype` and back gives the same bits."""
    with np.errstate(over="ignore"):
        return same_bits(x.astype(dtype).astype(x.dtype), x)


def saved_config(model: Model[Any], dtypes: dict[str, str]) -> dict[str, Any]:
    """The checkpoint's config.json with the caller's changes; `dtypes` are those being saved."""
    origin = model.checked_card("save_hf").origin
    model_type, architecture = architecture_of(model)
    current = model.config.to_json(model_type, architecture)
    if origin is None:
        config = current
    else:
        config = json.loads(origin.config)
        read = type(model.config).from_dict(config)
        if hasattr(read, "tie_word_embeddings"):  # the loader decides it by the tensors
            tied = model.config.tie_word_embeddings
            read = dataclasses.replace(read, tie_word_embeddings=tied)
        loaded = read.to_json(model_type, architecture)
        config |= {key: value for key, value in current.items() if value != loaded.get(key)}
    unchanged = origin is not None and dtypes == dict(origin.dtypes)
    return config if unchanged else with_dtype(config, dtypes)


@dataclasses.dataclass(frozen=True)
class LazyHostArray:
    """Array on a device or in a file that is read at each access and not kept on the host."""

    shape: tuple[int, ...]
    dtype: Any
    read: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self.read()
        return values if dtype is None else values.astype(dtype, copy=False)


def with_host_arrays(
    arrays: Mapping[str, jax.Array | np.ndarray], act: Callable[[dict[str, LazyHostArray]], None]
) -> None:
    """Calls ``act`` with the arrays, readable in any order and repeatedly.

    For arrays that several processes share, only process 0 calls it; the others take part in the
    all-gather of each array it reads, until it returns or fails. Then all return, or all raise.

    Raises:
        CheckpointError: ``act`` failed in process 0, where its own error is raised.
    """
    # Copies on the host, as from `jax.device_get`, are NumPy arrays.
    if all(isinstance(x, np.ndarray) or x.is_fully_addressable for x in arrays.values()):
        act({n: LazyHostArray(x.shape, x.dtype, lambda x=x: local(x)) for n, x in arrays.items()})
        return
    ordered = [jnp.asarray(x) for x in arrays.values()]

    def gather(number: int) -> np.ndarray:
        multihost_utils.broadcast_one_to_all(np.int32(number))
        return all_gather(ordered[number])

    def read_and_share() -> None:
        try:
            act(
                {
                    name: LazyHostArray(x.shape, x.dtype, lambda i=i: gather(i))
                    for i, (name, x) in enumerate(arrays.items())
                }
            )
        finally:
            multihost_utils.broadcast_one_to_all(np.int32(STOP))

    def take_part() -> None:
        while (number := int(multihost_utils.broadcast_one_to_all(np.int32(0)))) != STOP:
            all_gather(ordered[number])

    in_all_processes(read_and_share if jax.process_index() == 0 else take_part, CheckpointError)


def all_gather(x: jax.Array) -> np.ndarray:
    """Gathers the full array to every process; all of them must call."""
    return np.asarray(multihost_utils.process_allgather(x, tiled=True))


def local(x: jax.Array | np.ndarray) -> np.ndarray:
    """Full array on the host, if all its shards are in this process.

    Copied shard by shard: `np.asarray` of a sharded array is cached by JAX.
    """
    if isinstance(x, np.ndarray) or len(x.sharding.device_set) == 1:
        return np.asarray(x)
    result = np.empty(x.shape, x.dtype)
    for shard in x.addressable_shards:
        if shard.replica_id == 0:
            result[shard.index] = np.asarray(shard.data)
    return result
