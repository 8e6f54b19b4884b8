"""Saves a model in Orbax's format: parameters, config, and the origin's Hugging Face metadata."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxllm.checkpoint.orbax.run_checkpoints import RunCheckpoints
from jaxllm.checkpoint.source import FLOATS, default_dtype, float_dtype
from jaxllm.common.errors import CheckpointError
from jaxllm.common.hardware import default_device
from jaxllm.models.build_options import Options
from jaxllm.models.model import Card, Model, Origin, model_shapes
from jaxllm.models.quantize import formats_of, quantized_shapes
from jaxllm.models.registry import architecture_of, model_spec
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import check_heads, parameter_path, parameter_sharding

WEIGHTS_FOLDER = "weights"


def save_weights(folder: Path, model: Model[Any]) -> None:
    """Writes parameters and config; an older model in the folder is deleted afterwards."""
    with RunCheckpoints(folder / WEIGHTS_FOLDER, keep=1) as checkpoints:
        latest = checkpoints.latest()
        checkpoints.save(0 if latest is None else latest + 1, parameters(model), model_meta(model))


def model_meta(model: Model[Any]) -> dict[str, Any]:
    """Config, origin, and formats of quantized layers, as JSON."""
    card = model.checked_card("save_orbax")
    origin = card.origin
    model_type, architecture = architecture_of(model)
    config = card.config.to_json(model_type, architecture)
    if "scale_decoder_outputs" in config:  # exported as a bool; here None is kept
        config["scale_decoder_outputs"] = card.config.scale_decoder_outputs
    formats = formats_of(model)
    quantized = {"dtype": str(model.dtype), "formats": formats} if formats else None
    return {
        "config": config,
        "quantized": quantized,
        "origin": None if origin is None else json.loads(json.dumps(dataclasses.asdict(origin))),
    }


def load_weights(
    folder: Path,
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
) -> Any:
    """Loads the model that `save_weights` wrote; parameters keep their dtypes."""
    with RunCheckpoints(folder / WEIGHTS_FOLDER, writable=False) as checkpoints:
        record = checkpoints.read()
        quantized = record.meta["quantized"]
        dtypes = {path: jnp.dtype(leaf.dtype) for path, leaf in record.leaves.items()}
        dtype = float_dtype("dtype", dtype) or compute_dtype(list(dtypes.values()), quantized)
        options = Options.on(
            default_device().platform,
            dtype=dtype,
            param_dtype=dtype,
            attn_implementation=attn_implementation,
            remat=remat,
            scan_layers=scan_layers,
        )
        spec = model_spec(record.meta["config"])
        shapes = model_shapes(spec.make, spec.config, options)
        if quantized is not None:
            shapes = quantized_shapes(shapes, quantized["formats"])
        leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
        paths = [parameter_path(path) for path, _ in leaves]
        # Shapes come from the config and are checked; dtypes come from the checkpoint.
        if mesh is not None:
            check_heads(spec.config.head_counts, mesh)
        target = {
            path: jax.ShapeDtypeStruct(
                leaf.shape,
                dtypes.get(path, leaf.dtype),
                sharding=None if mesh is None else parameter_sharding(path, leaf.shape, mesh),
            )
            for path, (_, leaf) in zip(paths, leaves, strict=True)
        }
        arrays = checkpoints.restore(record.step, target).arrays
    model = treedef.unflatten([arrays[path] for path in paths])
    origin = record.meta["origin"]
    return model.with_card(Card(spec.config, origin=None if origin is None else origin_of(origin)))


def compute_dtype(dtypes: Sequence[np.dtype], quantized: Mapping[str, Any] | None) -> np.dtype:
    """The default compute dtype for parameters of these dtypes, also in a quantized model."""
    if quantized is not None:
        return default_dtype([jnp.dtype(quantized["dtype"])])
    common = max(set(dtypes), key=dtypes.count)
    if common not in FLOATS:
        raise CheckpointError(f"parameters are {common}; expected float32, bfloat16 or float16")
    return default_dtype(dtypes)


def origin_of(fields: dict[str, Any]) -> Origin:
    pairs = {
        name: tuple(map(tuple, fields[name]))
        for name in ("dtypes", "copies", "constants")
        if name in fields
    }
    return Origin(**{**fields, **pairs})
