"""Loads a model from a checkpoint; all tensors are checked before any memory is allocated."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.load_parameters import Progress, load_parameters
from jaxllm.checkpoint.safetensors.reader import open_safetensors
from jaxllm.checkpoint.source import BFLOAT16, WeightSource
from jaxllm.common.errors import (
    CheckpointError,
    ConfigError,
    JaxLLMError,
    MissingFileError,
    UnsupportedError,
)
from jaxllm.common.strict_json import read_json
from jaxllm.models.build_options import Options
from jaxllm.models.model import Origin
from jaxllm.models.registry import ModelSpec, model_spec
from jaxllm.models.weights import Entry, Table, parameter_path, parameters
from jaxllm.parallel.sharding import check_heads

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), BFLOAT16)
HALVES = (np.dtype(np.float16), BFLOAT16)
MAX_JSON_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: config.json's content, and tensors under Hugging Face's names."""

    path: Path
    config: Mapping[str, Any]
    weights: WeightSource
    gguf: GGUFFile | None = None

    @property
    def config_file(self) -> Path:
        return self.path if self.gguf is not None else self.path / "config.json"


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens a folder (config.json and safetensors, or one .gguf) or a .gguf file."""
    if path.is_dir() and not (path / "config.json").exists():
        ggufs = sorted(path.glob("*.gguf"))
        if len(ggufs) > 1:
            names = ", ".join(p.name for p in ggufs[:5])
            raise MissingFileError(f"{path}: several .gguf files ({names}); name one of them")
        if ggufs:
            path = ggufs[0]
    if path.is_file() and path.suffix.lower() == ".safetensors":
        raise UnsupportedError(
            f"{path}: a weight file without config.json; give the folder that also holds "
            "config.json"
        )
    if path.is_file():
        file = GGUFFile(path)
        view = HFView(file)
        return Checkpoint(path, view.config, view, file)
    config = read_json(path / "config.json", max_bytes=MAX_JSON_BYTES, error=ConfigError)
    if not isinstance(config, dict):
        raise ConfigError(f"{path / 'config.json'}: expected an object")
    return Checkpoint(path, config, open_safetensors(path))


def load_model(
    checkpoint: Checkpoint,
    *,
    dtype: Any = None,
    param_dtype: Any = None,
    architecture: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    attn_implementation: str = "eager",
    remat: bool = False,
    allow_nonfinite: bool = False,
    progress: Progress | None = None,
    mesh: Mesh | None = None,
) -> Any:
    """Builds the model that config.json describes, with the weights of the checkpoint.

    A missing, unexpected or ill-shaped tensor raises CheckpointError before memory is allocated.
    See `jaxllm.load` for the arguments.
    """
    source = checkpoint.weights
    spec = checkpoint_spec(checkpoint, architecture, overrides)
    compute, keep = choose_dtypes(source, dtype, param_dtype)
    options = Options(
        dtype=compute, param_dtype=keep, attn_implementation=attn_implementation, remat=remat
    )
    shapes = nnx.eval_shape(lambda: spec.make(spec.config, options, rngs=None))
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    expected = {parameter_path(path): leaf for path, leaf in leaves}
    table, names = spec.table, source.names()
    stripped = is_stripped(table, names)
    entries = [(tensor_name(e, table, stripped), e) for e in table.for_model(expected)]
    copies = check_tensors(entries, expected, spec, source)

    if mesh is not None:
        check_heads(spec.config.head_counts, mesh)
    arrays = load_parameters(
        entries,
        expected,
        source,
        param_dtype=param_dtype,
        allow_nonfinite=allow_nonfinite,
        progress=progress,
        mesh=mesh,
    )
    model = jax.tree_util.tree_unflatten(treedef, [arrays[parameter_path(p)] for p, _ in leaves])
    config = dict(checkpoint.config)
    if architecture is not None:
        config["architectures"] = [spec.architecture]
    dtypes = {name: source.info(name).dtype.name for name, _ in (*entries, *copies)}
    model.origin = Origin(
        config=json.dumps(config),
        dtypes=tuple(sorted(dtypes.items())),
        copies=copies,
        stripped=stripped,
        file=str(checkpoint.path),
        quantised=checkpoint.gguf is not None,
    )
    return model


def checkpoint_spec(
    checkpoint: Checkpoint, architecture: str | None, overrides: Mapping[str, Any] | None
) -> ModelSpec:
    """Family, class and config of a checkpoint, from config.json and its tensors.

    Raises:
        ConfigError, UnsupportedError: A field of config.json is invalid or unsupported.
        CheckpointError: The config has more layers than the file has tensors.
    """
    source, where = checkpoint.weights, checkpoint.config_file
    try:
        spec = model_spec({**checkpoint.config, **(overrides or {})}, architecture)
    except JaxLLMError as error:
        raise type(error)(f"{where}: {error}") from None
    check_depth(spec, source, where)
    return with_tying_of_file(spec, source)


def with_tying_of_file(spec: ModelSpec, source: WeightSource) -> ModelSpec:
    """Sets `tie_word_embeddings` according to the tensors.

    An LM head that differs from the embedding is used even if the config calls it tied:
    transformers 5 writes such files. A missing head means tied for T5, and is an error elsewhere.
    """
    config, has_head = spec.config, "lm_head.weight" in source.names()
    if "lm_head.weight".startswith(spec.unread):
        return spec
    if config.tie_word_embeddings and has_head:
        embedding = spec.table.copied_from("lm_head.weight")
        entry = next(e for e in spec.table.entries if e.ours == (embedding,))
        shared = tensor_name(entry, spec.table, is_stripped(spec.table, source.names()))
        tied = shared in source.names() and same_bits(
            source.read("lm_head.weight"), source.read(shared)
        )
    else:
        tied = config.tie_word_embeddings or (spec.family.headless_means_tied and not has_head)
    if tied == config.tie_word_embeddings:
        return spec
    return dataclasses.replace(spec, config=dataclasses.replace(config, tie_word_embeddings=tied))


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Compares shapes, dtypes and bytes: -0 differs from 0, and a NaN equals itself."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    bits = f"u{a.itemsize}"
    return bool((a.view(bits) == b.view(bits)).all())


def choose_dtypes(source: WeightSource, dtype: Any, param_dtype: Any) -> tuple[Any, Any]:
    """The compute and parameter dtypes. None: the file's dtype, but float32 on a CPU.

    XLA converts half-precision weights on every use on a CPU, which is about five times slower.
    """
    infos = [source.info(name) for name in source.names()]
    dtypes = [i.dtype for i in infos if i.dtype in FLOATS]
    native = max(set(dtypes), key=dtypes.count) if dtypes else np.dtype(np.float32)
    on_cpu = jax.default_backend() == "cpu"
    dtype = float_dtype("dtype", dtype) or (np.dtype(np.float32) if on_cpu else native)
    widened = on_cpu and dtype == np.float32 and native in HALVES
    return dtype, float_dtype("param_dtype", param_dtype) or (
        np.dtype(np.float32) if widened else native
    )


def float_dtype(name: str, value: Any) -> Any:
    """Converts a dtype argument to a numpy dtype; None stays None.

    Raises:
        UnsupportedError: It is not float32, bfloat16 or float16.
    """
    if value is None:
        return None
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype not in FLOATS:
        raise UnsupportedError(f"{name}: expected float32, bfloat16 or float16, found {value!r}")
    return dtype


def is_stripped(table: Table, names: list[str]) -> bool:
    """True if the file holds the base model only, so that tensor names lack the prefix."""
    return bool(table.prefix) and not any(n.startswith(table.prefix) for n in names)


def tensor_name(entry: Entry, table: Table, stripped: bool) -> str:
    """Name of an entry's tensor in the file."""
    return entry.theirs.removeprefix(table.prefix) if stripped else entry.theirs


def check_depth(spec: ModelSpec, source: WeightSource, where: Path) -> None:
    """Raises CheckpointError if the config has more layers than the file has tensors."""
    tensors = len(source.names())
    for name in ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers"):
        layers = getattr(spec.config, name, None) or 0
        if layers > tensors:
            raise CheckpointError(
                f"{where}: {name}: {layers}, but there are only {tensors} tensors in the weights"
            )


def check_tensors(
    entries: list[tuple[str, Entry]],
    expected: Mapping[str, Any],
    spec: ModelSpec,
    source: WeightSource,
) -> tuple[tuple[str, str], ...]:
    """Checks names, shapes and dtypes against the model; returns the known copies in the file."""
    names, table = source.names(), spec.table
    file = source.info(names[0]).file if names else spec.architecture
    needed = {name for name, _ in entries}
    present = set(names)
    missing = [name for name, _ in entries if name not in present]
    copies, unexpected = [], []
    for name in names:
        if name in needed or table.is_buffer(name) or name.startswith(spec.unread):
            continue
        original = table.copied_from(name)
        if original is not None and original in expected:
            by_ours = {e.ours[0]: n for n, e in entries}
            if not same_bits(source.read(name), source.read(by_ours[original])):
                raise CheckpointError(
                    f"{file}: {name} is a copy of {by_ours[original]} in this architecture, but "
                    "they differ"
                )
            copies.append((name, original))
        else:
            unexpected.append(name)
    if missing or unexpected:
        config = ", ".join(f"{f} {getattr(spec.config, f)!r}" for f in spec.family.structure)
        raise CheckpointError(
            f"{file}: the tensors do not fit a {spec.architecture} of this config.json ({config})"
            + _listed("; missing", missing)
            + _listed("; unexpected", unexpected)
        )
    for name, entry in entries:
        info = source.info(name)
        shape = list(expected[entry.ours[0]].shape)
        shape[0] *= len(entry.ours)
        expected_shape = tuple(reversed(shape)) if entry.transposed else tuple(shape)
        if info.shape != expected_shape:
            sizes = expected[entry.ours[0]].shape
            fields = {f for size in sizes for f in fields_behind(spec.config, size)}
            raise CheckpointError(
                f"{info.file}: {name} has shape {list(info.shape)}, but config.json implies "
                f"{list(expected_shape)} (from {', '.join(sorted(fields))})"
            )
        if info.dtype not in FLOATS:
            raise UnsupportedError(
                f"{info.file}: {name} is {info.dtype}; weights must be float32, bfloat16 or float16"
            )
    return tuple(copies)


def fields_behind(config: Any, size: int) -> list[str]:
    """Config fields that explain a dimension: equal to it, or heads and head size as factors."""
    sizes = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    sizes = {k: v for k, v in sizes.items() if type(v) is int and not k.endswith("_id")}
    if hasattr(config, "size_per_head"):
        sizes |= {"head_dim": config.size_per_head, "num_key_value_heads": config.kv_heads}
    heads = [name for name in sizes if "head" in name or name == "d_kv"]
    pairs = [p for p in itertools.combinations(heads, 2) if sizes[p[0]] * sizes[p[1]] == size]
    return [name for name, value in sizes.items() if value == size] + [n for p in pairs for n in p]


def _listed(label: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"{label} {', '.join(names[:10])}{more}"


__all__ = ["Checkpoint", "load_model", "open_checkpoint", "parameters"]
