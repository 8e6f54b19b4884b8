"""Loads a model from a checkpoint; all tensors are checked before any memory is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.gguf.split import open_gguf, part_paths
from jaxllm.checkpoint.hub import MODULES
from jaxllm.checkpoint.load_parameters import (
    LoadProgress,
    StackedTensors,
    load_parameters,
    sharded_shape,
)
from jaxllm.checkpoint.source import (
    FLOATS,
    WeightSource,
    check_repetitions,
    default_dtype,
    float_dtype,
)
from jaxllm.checkpoint.weight_files import open_weights, t5x_folders, t5x_in
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    JaxLLMError,
    MissingFileError,
    UnsupportedError,
    listed,
    warn,
)
from jaxllm.common.files import read_json
from jaxllm.common.hardware import default_device
from jaxllm.models.build_options import Options
from jaxllm.models.config import ModelConfig
from jaxllm.models.model import BaseModel, Card, Model, Origin, model_shapes
from jaxllm.models.quantize import (
    BLOCK_FORMATS,
    KEEP,
    layer_formats,
    quantized_layers,
    quantized_shape,
    with_matrices,
)
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.models.rotary_decoder import RotaryConfig
from jaxllm.models.weights import Entry, Table, parameters, tensors_of, with_parameters
from jaxllm.parallel.sharding import check_heads

_NEW_HEAD = (
    ". For a classifier with a new head, load the language model and call "
    "jaxllm.training.with_classifier(model, num_labels=...)"
)
MAX_JSON_BYTES = 16 * 2**20
_COMPARED_VALUES = 1 << 20  # of each tensor at a time
_FIRST_ROWS = 16  # of a constant, compared before all others


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: config.json's content, and tensors under Hugging Face's names."""

    path: Path
    config: Mapping[str, Any]
    weights: WeightSource

    @property
    def gguf(self) -> GGUFFile | None:
        return self.weights.file if isinstance(self.weights, HFView) else None

    @property
    def config_file(self) -> Path:
        return self.path if self.gguf is not None else self.path / "config.json"


def gguf_in(folder: Path) -> Path | None:
    """The .gguf file, or its first part, of a folder that is a GGUF checkpoint: one without
    config.json."""
    if not os.path.isdir(folder) or os.path.lexists(folder / "config.json"):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1 and not set(files) <= set(part_paths(files[0])):
        names = ", ".join(path.name for path in files[:5])
        raise MissingFileError(f"{folder}: several .gguf files ({names}); name one of them")
    return files[0] if files else None


def open_checkpoint(path: Path, prefer: str | None = None) -> Checkpoint:
    """Opens a model's folder or one weight file.

    Args:
        path: a folder with config.json and weights or with one .gguf, a .gguf file in one or
            several parts, another weight file with config.json beside it, or a checkpoint of T5X.
        prefer: format of the weights to take first, as for `open_weights`.
    """
    path = gguf_in(path) or path
    if (found := t5x_in(path)) is not None:
        return _open_t5x(found)
    if path.is_file() and path.suffix.lower() == ".gguf":
        view = HFView(open_gguf(path))
        return Checkpoint(path, view.config, view)
    folder = path.parent if path.is_file() else path
    if path.is_file() and not os.path.lexists(folder / "config.json"):
        raise UnsupportedError(
            f"{path}: a weight file without config.json; give the folder that also holds "
            "config.json"
        )
    check_is_model(folder)
    config = read_config_file(folder / "config.json")
    return Checkpoint(folder, config, open_weights(path, prefer))


def _open_t5x(path: Path) -> Checkpoint:
    """Opens a T5X checkpoint, whose config.json is in its folder or in the one above."""
    from jaxllm.checkpoint.t5x import T5XView

    _, folder = t5x_folders(path)
    is_there = os.path.lexists(folder / "config.json")
    config = read_config_file(folder / "config.json") if is_there else {}
    return Checkpoint(folder, config, T5XView(path))


def check_is_model(folder: Path) -> None:
    """Raises MissingFileError for a folder that holds an adapter or a training run, not a model."""
    if os.path.lexists(folder / "config.json"):
        return
    if os.path.lexists(folder / MODULES):
        raise UnsupportedError(
            f"{folder}: holds no config.json beside modules.json, as version 1 of "
            "sentence-transformers wrote it; save it again with a later version"
        )
    if os.path.lexists(folder / "adapter_config.json"):
        raise MissingFileError(
            f"{folder}: holds a LoRA adapter, not a model; name the base model, and the adapter "
            f"with --adapter {folder} (in Python: load(model, adapter=...))"
        )
    if (folder / "checkpoints").is_dir():
        raise MissingFileError(
            f"{folder}: holds a training run, not a model; write its model to a new folder with "
            f"`jaxllm export {folder} OUT`"
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """Reads the object in a config.json."""
    config = read_json(path, max_bytes=MAX_JSON_BYTES, error=ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: expected an object")
    return config


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    architecture: str | type | None = None,
    overrides: Mapping[str, Any] | ModelConfig | None = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
    quantize: str | None = None,
    quantize_embeddings: bool = True,
    allow_nonfinite: bool = False,
    progress: LoadProgress | None = None,
    mesh: Mesh | None = None,
    when_planned: Callable[[Any], object] | None = None,
) -> Any:
    """Builds the model that config.json describes, with the weights of the checkpoint.

    A missing, unexpected or ill-shaped tensor raises CheckpointError before memory is allocated.

    Args:
        when_planned: called before weights are read, with the model that is returned, but for its
            parameters, which are `jax.ShapeDtypeStruct` with the same dtypes and shardings.

    See `jaxllm.load` for the other arguments.
    """
    spec = read_spec(checkpoint, architecture, overrides)
    warn_of_flax(checkpoint, spec.config, overrides)
    if mesh is not None:
        check_heads(spec.config.head_counts, mesh)
    compute_dtype, weight_dtype = choose_dtypes(checkpoint.weights, dtype, param_dtype)
    options = Options.on(
        default_device().platform,
        dtype=compute_dtype,
        param_dtype=weight_dtype,
        attn_implementation=attn_implementation,
        remat=remat,
        scan_layers=scan_layers,
    )
    shapes = model_shapes(spec.make, spec.config, options)
    expected: dict[str, Any] = parameters(shapes)
    found = match_tensors(spec, expected, checkpoint.weights)
    entries, source = found.entries, found.source
    formats = matrix_formats(checkpoint, entries, shapes, quantize, quantize_embeddings)
    matrices = {
        path: quantized_shape(name, expected[f"{path}.weight"]) for path, name in formats.items()
    }
    if param_dtype is None:  # the file's dtype, unless the model needs a wider one
        for name, entry in entries.items():
            for path in entry.parameters:
                dtype = jnp.promote_types(source.info(name).dtype, expected[path].dtype)
                expected[path] = jax.ShapeDtypeStruct(expected[path].shape, dtype)
    named_class = {} if architecture is None else {"architectures": [spec.architecture]}
    origin = Origin(
        config=json.dumps(with_overrides(checkpoint, overrides) | named_class),
        dtypes=tuple(
            sorted(
                (found.names.get(tensor, tensor), source.info(name).dtype.name)
                for name in {*entries, *dict(found.copies), *dict(found.constants)}
                for tensor in source.tensors(name)
            )
        ),
        copies=found.copies,
        constants=found.constants,
        stripped=found.stripped,
        file=str(checkpoint.path),
        quantized=checkpoint.gguf is not None,
    )
    empty = with_matrices(shapes, matrices).with_card(Card(spec.config, origin=origin))
    planned: dict[str, Any] = {path: expected.get(path, x) for path, x in parameters(empty).items()}
    if mesh is not None:
        planned = {path: sharded_shape(path, x.shape, x.dtype, mesh) for path, x in planned.items()}
    if when_planned is not None:
        when_planned(with_parameters(empty, planned))
    arrays = load_parameters(
        entries,
        expected,
        source,
        matrices=matrices,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
        mesh=mesh,
    )
    for path in found.zeros:
        shape = planned[path]
        arrays[path] = jnp.zeros(shape.shape, shape.dtype, device=shape.sharding)
    return with_parameters(empty, arrays)


@dataclasses.dataclass(frozen=True)
class MatchedTensors:
    """The tensors of a checkpoint that make up a model, checked for names, shapes and dtypes.

    Attributes:
        source: the checkpoint's weights.
        entries: entry of the weight table for each tensor to read, by its name in `source`.
        names: the model's own name of a tensor, by its name in `source`.
        zeros: paths of the parameters that are zero, since the checkpoint lacks them.
        copies: (tensor name, path) of the tensors that duplicate another one.
        constants: (tensor name, rows) of the tensors that follow from the config.
        stripped: True if the tensors' names lack the prefix of the base model.
    """

    source: StackedTensors
    entries: Mapping[str, Entry]
    names: Mapping[str, str]
    zeros: Collection[str]
    copies: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, int], ...]
    stripped: bool


def match_tensors(
    spec: ModelSpec, expected: Mapping[str, Any], weights: WeightSource
) -> MatchedTensors:
    """Finds the tensors of a model in a weight file.

    Args:
        expected: the model's parameters by path.

    Raises:
        CheckpointError: a tensor is missing, unexpected or ill-shaped.
        UnsupportedError: a tensor's dtype is not one that models compute in.
    """
    present = dict.fromkeys(weights.names())
    stripped = lacks_prefix(spec.table, list(present))
    wanted = {
        tensor_name(entry, spec.table, stripped): entry for entry in spec.table.for_model(expected)
    }
    renamed = {
        stored_name(name, entry.parameters[0], spec, present, wanted): name
        for name, entry in wanted.items()
    }
    entries = {stored: wanted[name] for stored, name in renamed.items()}
    counts = {
        name: expected[entry.parameters[0]].shape[0]
        for name, entry in entries.items()
        if entry.is_stack
    }
    source = StackedTensors(weights, counts)
    names = set(source.names())
    zeros = {
        entry.parameters[0]: name
        for name, entry in entries.items()
        if name not in names and entry.parameters[0] in spec.table.zeros
    }
    for name in zeros.values():
        del entries[name]
    copied_from = check_parameter_names(entries, expected, spec, source)
    check_shapes(entries, expected, spec, source)
    check_repetitions(source, entries)
    copies = check_copies(copied_from, entries, spec, source)
    constants = check_constants(spec.table, source)
    return MatchedTensors(source, entries, renamed, zeros.keys(), copies, constants, stripped)


def matrix_formats(
    checkpoint: Checkpoint,
    entries: Mapping[str, Entry],
    model: Model[Any],
    quantize: str | None,
    embeddings: bool,
) -> dict[str, str]:
    """Formats of the layers that are quantized, by the layer's path.

    Args:
        entries: entry of the weight table for each tensor of the file.
        model: the model's shapes.
        quantize, embeddings: `quantize` and `quantize_embeddings` of `jaxllm.load`.
    """
    if quantize is None:
        return {}
    if quantize != KEEP:
        return layer_formats(model, quantize, embeddings=embeddings)
    view = checkpoint.weights
    if not isinstance(view, HFView):
        raise UnsupportedError(
            f"{checkpoint.path}: quantize='keep' keeps the blocks of a quantized GGUF file; use "
            "'int8' or 'int4' for other checkpoints"
        )
    stored = {
        path: view.quantization(name) for name, entry in entries.items() for path in entry.modules
    }
    layers = quantized_layers(model, embeddings=embeddings)
    kept = {path: stored[path] for path in layers if stored.get(path) in BLOCK_FORMATS}
    if not kept:
        raise UnsupportedError(
            f"{checkpoint.path}: quantize='keep', but no weight that may stay quantized has one of "
            f"the types {', '.join(BLOCK_FORMATS)}; use 'int8' or 'int4'"
        )
    return kept


def read_spec(
    checkpoint: Checkpoint,
    architecture: str | type | None,
    overrides: Mapping[str, Any] | ModelConfig | None,
) -> ModelSpec:
    """Family, class and config of a checkpoint, from config.json and its tensors."""
    source, where = checkpoint.weights, checkpoint.config_file
    config = with_overrides(checkpoint, overrides)
    if source.from_flax:
        # Only versions 4 of transformers have Flax classes. If config.json names a later one, it
        # was saved again, and the head of mT5 is scaled all the same.
        config.pop("transformers_version", None)
    spec = named_spec(config, where, architecture)
    if isinstance(overrides, ModelConfig):
        if type(overrides) is not type(spec.config):
            expected = type(spec.config).__name__
            raise ConfigError(f"{where}: is read by a {expected}, not a {type(overrides).__name__}")
        spec = dataclasses.replace(spec, config=overrides)
    check_depth(spec, source, where)
    spec = with_tied_head(spec, source)
    has_head = spec.config.tie_word_embeddings or "lm_head.weight" in source.names()
    is_causal = architecture is None and spec.architecture.endswith("ForCausalLM")
    if has_head or not is_causal or not os.path.lexists(checkpoint.path / MODULES):
        return spec
    return read_spec(checkpoint, BaseModel, overrides)  # it only embeds, and was saved headless


def warn_of_flax(
    checkpoint: Checkpoint,
    config: ModelConfig,
    overrides: Mapping[str, Any] | ModelConfig | None = None,
) -> None:
    """Warns if transformers' Flax class computed something else from config.json's fields, for
    weights that it wrote. Fields that the caller sets himself are left out."""
    if not checkpoint.weights.from_flax or isinstance(overrides, ModelConfig):
        return
    found = config.flax_differences(checkpoint.config)
    found = {name: value for name, value in found.items() if name not in (overrides or {})}
    if found:
        warn(
            f"{checkpoint.config_file}: transformers' Flax class did not read {', '.join(found)} "
            "as its PyTorch class and jaxllm do. For the results that weights trained with the "
            f"Flax class had there, load them with config={found!r}; see docs/migration.md"
        )


def named_spec(
    config: Mapping[str, Any], where: Path | str, architecture: str | type | None = None
) -> ModelSpec:
    """`model_spec`, whose errors begin with the file that the config is from."""
    try:
        return model_spec(config, architecture)
    except JaxLLMError as error:
        raise type(error)(f"{where}: {error}") from None


def with_overrides(
    checkpoint: Checkpoint, overrides: Mapping[str, Any] | ModelConfig | None
) -> dict[str, Any]:
    """config.json's object with the caller's fields; a whole config changes nothing in it.

    What the weight file decides is set. A whole config stands for a config.json that is not there.
    """
    fields = overrides if isinstance(overrides, Mapping) else {}
    config = {**checkpoint.config, **fields}
    if isinstance(overrides, ModelConfig):
        whole = overrides.to_json(overrides.model_type, "")
        del whole["architectures"]
        checkpoint.weights.settled(whole)  # raises an error if it contradicts the file
        config = config or whole
    return checkpoint.weights.settled(config)


def with_tied_head(spec: ModelSpec, source: WeightSource) -> ModelSpec:
    """Sets `tie_word_embeddings` according to the tensors.

    An LM head that differs from the embedding is used even if the config calls it tied:
    transformers 5 writes such files. In a family whose head is always tied it is an error
    (`check_parameter_names`). A missing head means tied for T5, and is an error elsewhere.
    """
    config, table = spec.config, spec.table
    entries = {entry.parameters[0]: entry for entry in table.entries}
    if "lm_head.weight" not in entries or "lm_head.weight".startswith(spec.unread):
        return spec
    head, names = entries["lm_head.weight"].tensor, dict.fromkeys(source.names())
    if config.tie_word_embeddings and head in names:
        path = table.copied_from(head)
        assert path is not None  # families without it have no tied head
        embedding = tensor_name(entries[path], table, lacks_prefix(table, list(names)))
        embedding = stored_name(embedding, path, spec, names, {head})
        tied = embedding not in names or same_tensors(source, head, embedding)
    else:
        tied = config.tie_word_embeddings or (spec.family.headless_means_tied and head not in names)
    if tied == config.tie_word_embeddings:
        return spec
    return dataclasses.replace(spec, config=dataclasses.replace(config, tie_word_embeddings=tied))


def stored_name(
    name: str, path: str, spec: ModelSpec, present: Collection[str], others: Collection[str]
) -> str:
    """The name that tensor `name` of parameter `path` has in the file.

    Files may hold a matrix that several modules share under the name of any of them.

    Args:
        present: names of the file's tensors.
        others: names that are not looked for, as the model has other parameters of these names.
    """
    if name in present:
        return name
    copies = (x for x in spec.table.copies_of(path, present) if x not in others)
    return next((x for x in copies if not x.startswith(spec.unread)), name)


def compute_dtype_of(path: Path, platform: str) -> str:
    """Name of the compute dtype that `load_model` chooses for a checkpoint on a platform."""
    with open_checkpoint(path).weights as source:
        return default_dtype(float_dtypes(source), platform).name


def float_dtypes(source: WeightSource) -> list[np.dtype]:
    """Dtypes of the tensors that are floats; float32 if there are none."""
    dtypes = [source.info(name).dtype for name in source.names()]
    return [dtype for dtype in dtypes if dtype in FLOATS] or [np.dtype(np.float32)]


def choose_dtypes(
    source: WeightSource, dtype: DTypeLike | None, param_dtype: DTypeLike | None
) -> tuple[np.dtype, np.dtype]:
    """The compute and parameter dtypes; None: those of the file, but float32 on a CPU."""
    dtypes = float_dtypes(source)
    compute_dtype = float_dtype("dtype", dtype) or default_dtype(dtypes)
    weight_dtype = float_dtype("param_dtype", param_dtype)
    if weight_dtype is None:
        native = max(set(dtypes), key=dtypes.count)
        weight_dtype = default_dtype(dtypes) if compute_dtype == np.float32 else native
    return compute_dtype, weight_dtype


def lacks_prefix(table: Table, names: list[str]) -> bool:
    """True if the file holds the base model only, so that tensor names lack the prefix."""
    return bool(table.prefix) and not any(name.startswith(table.prefix) for name in names)


def tensor_name(entry: Entry, table: Table, stripped: bool) -> str:
    """Name of an entry's tensor in the file."""
    return entry.tensor.removeprefix(table.prefix) if stripped else entry.tensor


def same_tensors(source: WeightSource, a: str, b: str) -> bool:
    """Compares two tensors bit by bit. Tensors of different shapes or dtypes are not read."""
    first, second = source.info(a), source.info(b)
    same_kind = (first.shape, first.dtype) == (second.shape, second.dtype)
    return same_kind and same_bits(source.read(a), source.read(b))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares shapes, dtypes and bytes: -0 differs from 0, and a NaN equals itself.

    Compares some rows at a time, so that it needs little memory.
    """
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = f"u{a.itemsize}"
    a, b = np.atleast_1d(a.view(bits)), np.atleast_1d(b.view(bits))
    rows = max(1, _COMPARED_VALUES // max(1, a[:1].size))
    return all(
        np.array_equal(a[start : start + rows], b[start : start + rows])
        for start in range(0, len(a), rows)
    )


def check_depth(spec: ModelSpec, source: WeightSource, where: Path) -> None:
    """Raises CheckpointError if the config has more layers than the file has tensors."""
    tensors = len(source.names())
    for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        layers = getattr(spec.config, name, None) or 0
        if layers > tensors:
            raise CheckpointError(
                f"{where}: {name}: {layers}, but there are only {tensors} tensors in the weights"
            )


def check_parameter_names(
    entries: Mapping[str, Entry],
    expected: Mapping[str, Any],
    spec: ModelSpec,
    source: WeightSource,
) -> dict[str, str]:
    """Checks the tensors' names against the model.

    Args:
        entries: entry of the weight table for each tensor that the model needs.
        expected: the model's parameters by path.

    Returns:
        Our path of each tensor that duplicates another one, by the tensor's name.
    """
    names, table = source.names(), spec.table
    file = source.info(names[0]).file if names else spec.architecture
    present = set(names)
    missing: list[str] = []
    parts: set[str] = set()
    for name, entry in entries.items():
        if name not in present:
            count = expected[entry.parameters[0]].shape[0] if entry.is_stack else 1
            # Enough to find one that is missing, whatever number of experts the config names.
            tensors = list(tensors_of(name, min(count, len(names) + 1)))
            missing += [tensor for tensor in tensors if tensor not in present]
            parts.update(tensors)
    copies: dict[str, str] = {}
    unexpected: list[str] = []
    for name in names:
        is_ignored = table.is_buffer(name) or table.constant(name) is not None
        is_ignored |= source.from_flax and spec.config.is_extra_in_flax(name)
        known = name in entries or name in parts or is_ignored
        if known or name.startswith(spec.unread):
            continue
        path = table.copied_from(name)
        if path is None or path not in expected:
            unexpected.append(name)
        else:
            copies[name] = path
    if missing or unexpected:
        raise CheckpointError(
            f"{file}: the tensors do not {described_model(spec)}"
            + (f"; missing {listed(missing)}" if missing else "")
            + (f"; unexpected {listed(unexpected)}" if unexpected else "")
            + (_NEW_HEAD if "score.weight" in missing else "")
        )
    return copies


def described_model(spec: ModelSpec) -> str:
    """The class and the size of a model, for errors about its tensors."""
    config = ", ".join(f"{f} {attrgetter(f)(spec.config)!r}" for f in spec.family.structure)
    return f"fit a {spec.architecture} of this config.json ({config})"


def check_copies(
    copied_from: Mapping[str, str],
    entries: Mapping[str, Entry],
    spec: ModelSpec,
    source: WeightSource,
) -> tuple[tuple[str, str], ...]:
    """Checks that tensors which duplicate another one have the same bits.

    Args:
        copied_from: our path of each such tensor, by the tensor's name.

    Returns:
        (tensor name, our path) of each.
    """
    tensor_of = {entry.parameters[0]: name for name, entry in entries.items()}
    for name, path in copied_from.items():
        if not same_tensors(source, name, tensor_of[path]):
            raise CheckpointError(
                f"{source.info(name).file}: the tensors do not {described_model(spec)}: {name} is "
                f"a copy of {tensor_of[path]} there, but they differ"
            )
    return tuple(copied_from.items())


def check_constants(table: Table, source: WeightSource) -> tuple[tuple[str, int], ...]:
    """Checks the tensors of the file that follow from the config; returns names and rows.

    Raises:
        CheckpointError: a tensor has other values.
    """
    found = []
    for name in source.names():
        make = table.constant(name)
        if make is None:
            continue
        info = source.info(name)
        rows = info.shape[0] if info.shape else 0
        tolerance = max(1e-4, float(jnp.finfo(info.dtype).eps)) if info.dtype in FLOATS else 0
        # A view of a few bytes can claim many rows, so the first ones are compared alone.
        is_equal = len(info.shape) == 2 and all(
            info.shape[1:] == (expected := make(count)).shape[1:]
            and np.allclose(
                source.read(name, (slice(count), slice(None))).astype(np.float32),
                expected,
                rtol=0,
                atol=tolerance,
            )
            for count in (min(rows, _FIRST_ROWS), rows)
        )
        if not is_equal:
            raise CheckpointError(
                f"{info.file}: {name}, {info.dtype.name}{list(info.shape)}, holds other values than"
                " the sinusoidal positions of this architecture"
            )
        found.append((name, rows))
    return tuple(found)


def check_shapes(
    entries: Mapping[str, Entry],
    expected: Mapping[str, Any],
    spec: ModelSpec,
    source: StackedTensors,
) -> None:
    """Raises CheckpointError or UnsupportedError for a tensor of another shape or dtype."""
    for name, entry in entries.items():
        info = source.info(name)
        ours = expected[entry.parameters[0]].shape
        shape = entry.tensor_shape(ours)
        if info.shape != shape:
            fields = {f for size in ours for f in fields_of_size(spec.config, size)}
            first, *others = source.tensors(name)
            found = info.shape
            if others:  # of a stack
                found, shape = found[1:], shape[1:]
            raise CheckpointError(
                f"{info.file}: {first} has shape {list(found)}, but config.json implies "
                f"{list(shape)} (from {', '.join(sorted(fields))})"
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{info.file}: {name} is {info.dtype}; weights must be float32, bfloat16 or float16"
            )


def fields_of_size(config: ModelConfig, size: int) -> list[str]:
    """Config fields that explain a dimension: equal to it, or heads and head size as factors."""
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sizes = {k: v for k, v in sizes.items() if type(v) is int and not k.endswith("_id")}
    if isinstance(config, RotaryConfig):
        sizes |= {"head_dim": config.size_per_head, "num_key_value_heads": config.kv_heads}
    heads = [name for name in sizes if "head" in name or name == "d_kv"]
    pairs = [p for p in itertools.combinations(heads, 2) if sizes[p[0]] * sizes[p[1]] == size]
    return [name for name, value in sizes.items() if value == size] + [n for p in pairs for n in p]
