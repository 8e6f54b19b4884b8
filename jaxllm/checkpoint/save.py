"""From a model back to a Hugging Face folder: the same names, shapes, dtypes and bytes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxllm.checkpoint.load import check_range, float_dtype, tensor_name
from jaxllm.checkpoint.origin import Origin
from jaxllm.checkpoint.safetensors_writer import write_sharded
from jaxllm.errors import CheckpointError, InputError
from jaxllm.models.export import config_to_json
from jaxllm.models.registry import FAMILIES, architecture_of
from jaxllm.models.weights import parameters

MAX_SHARD_BYTES = 5 * 10**9


def save_model(
    folder: Path, model: Any, *, dtype: Any = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes config.json and the weights; see `jaxllm.save_hf`."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as failure:
        raise CheckpointError(f"{folder}: cannot be made ({failure.strerror})") from failure
    tensors = dict(hf_tensors(model))
    original = original_dtypes(model, tensors)
    dtype = float_dtype("dtype", dtype)
    cast = {}
    for name, x in tensors.items():
        target = dtype or original.get(name, x.dtype)
        check_range(name, x, target)
        cast[name] = np.asarray(x, target)
    write_sharded(folder, cast, max_shard_bytes)
    dtypes = {name: str(x.dtype) for name, x in cast.items()}
    write_json(folder / "config.json", saved_config(model, dtypes))


def hf_tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """The model's parameters as Hugging Face tensors, on the host, in their own dtype."""
    model_type, _ = architecture_of(model)
    table = FAMILIES[model_type].table(model.config)
    origin: Origin | None = getattr(model, "origin", None)
    params = parameters(model)
    if any(path.endswith(".lora_a") for path in params):
        raise InputError(
            "save_hf: the model has LoRA; write merge_lora(model), or the adapter with save_adapter"
        )
    for entry in table.for_model(params):
        name = tensor_name(entry, table, stripped=origin is not None and origin.stripped)
        yield name, entry.join([np.asarray(params[o]) for o in entry.ours])
    for name, ours in origin.copies if origin is not None else ():
        if ours in params:
            yield name, np.asarray(params[ours])


def original_dtypes(model: Any, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """The file's own dtypes, if going back to them loses nothing; else none.

    A half-precision checkpoint that was widened at load goes back to its bytes; one that was
    trained further in float32 keeps its float32.
    """
    origin: Origin | None = getattr(model, "origin", None)
    if origin is None or origin.quantised:
        return {}
    dtypes = {name: jnp.dtype(dtype) for name, dtype in origin.dtypes}
    same_names = dtypes.keys() == tensors.keys()
    lossless = same_names and all(survives(x, dtypes[name]) for name, x in tensors.items())
    return dtypes if lossless else {}


def survives(x: np.ndarray, dtype: Any) -> bool:
    """Whether x goes to `dtype` and back unchanged, bit for bit."""
    if x.dtype == dtype:
        return True
    with np.errstate(over="ignore"):
        back = x.astype(dtype).astype(x.dtype)
    return bool((back.view(f"u{x.itemsize}") == x.view(f"u{x.itemsize}")).all())


def saved_config(model: Any, dtypes: dict[str, str]) -> dict[str, Any]:
    """The checkpoint's own config.json, but for what the caller has changed; `dtypes` as saved."""
    origin: Origin | None = getattr(model, "origin", None)
    model_type, architecture = architecture_of(model)
    now = config_to_json(model.config, model_type, architecture)
    if origin is None:
        config = now
    else:
        config = json.loads(origin.config)
        read = config_to_json(type(model.config).from_dict(config), model_type, architecture)
        settled = (
            "tie_word_embeddings",
            "scale_decoder_outputs",
        )  # by the loader, from the tensors
        config |= {k: v for k, v in now.items() if k not in settled and v != read.get(k)}
    if origin is None or dtypes != dict(origin.dtypes):
        found = list(dtypes.values())
        spelling = "dtype" if "dtype" in config else "torch_dtype"
        config[spelling] = max(set(found), key=found.count)
    return config


def write_json(path: Path, value: Any) -> None:
    """Writes beside the target and renames, so that a reader never sees half a file."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be written ({failure.strerror})") from failure


__all__ = ["hf_tensors", "save_model", "write_json"]
