"""jaxllm as a peer on a device: `python jaxllm_device_worker.py`, for the cases of a record."""

import dataclasses
import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")

import flax
import jax

from jaxllm.common.compiling import CompileClock
from jaxllm.common.hardware import format_bytes
from jaxllm.models.joined import arranged_for_inference
from jaxllm.models.weights import parameters
from jaxllm.training.lora import LoraConfig, add_lora

sys.path.insert(0, str(Path(__file__).parents[1]))
from device_checks import all_checks
from device_models import random_model, shapes_on
from device_speed import (
    Limits,
    Measurement,
    Reads,
    column_bytes,
    measure_decode,
    measure_engine,
    measure_prefill,
    measure_train,
)
from protocol import serve
from record_cases import Case

device = jax.devices()[0]
limits = Limits.of(device)
models: dict[tuple[str, str], tuple[Any, Reads]] = {}
"""The model of the last case for inference, by its shape and implementation of attention."""


def run(case: Case) -> dict[str, Any]:
    if case.kind == "checks":
        found = all_checks(case.families, device, case.attn_implementation)
        return {"checks": [check.to_dict() for check in found]}
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is not None and (needed := needed_bytes(case)) > limit:
        sizes = f"{format_bytes(needed)}, and the device has {format_bytes(limit)}"
        return {"left_out": f"needs about {sizes}"}
    try:
        measure = training(case) if case.kind == "train" else inference(case)
        clock = CompileClock()
        try:
            answer = dataclasses.asdict(measure())
        finally:
            clock.close()
        return answer | {"compile_seconds": clock.seconds, "programs": clock.programs}
    except Exception as error:  # such as too little memory, of which another case may need less
        models.clear()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}


def inference(case: Case) -> Callable[[], Measurement]:
    """Makes the model of a case, or keeps that of the last one, and returns what measures it."""
    key = (case.shape, case.attn_implementation)
    if key not in models:
        models.clear()
        gc.collect()
        model = random_model(case.config(), device, "bfloat16", case.attn_implementation)
        model = arranged_for_inference(model)
        models[key] = model, Reads.of(model)
    model, reads = models[key]
    if case.kind == "prefill":
        return partial(measure_prefill, model, limits, rows=case.rows, tokens=case.prompt)
    if case.kind == "engine":
        return partial(measure_engine, model, reads, limits, case.lengths())
    sizes = {"batch": case.rows, "prompt": case.prompt, "new": case.new, "beams": case.beams}
    return partial(measure_decode, model, reads, limits, **sizes)


def training(case: Case) -> Callable[[], Measurement]:
    models.clear()
    gc.collect()
    options = ("bfloat16", case.attn_implementation, case.param_dtype)
    model = random_model(case.config(), device, *options)
    if case.lora_rank is not None:
        model = add_lora(model, LoraConfig(rank=case.lora_rank))
    return partial(measure_train, model, limits, rows=case.rows, tokens=case.prompt)


def needed_bytes(case: Case) -> int:
    """About what a case needs of the memory. The batch engine takes fewer slots if it must."""
    shapes = shapes_on(case.config(), device, "bfloat16", param_dtype=case.param_dtype)
    weights = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    if case.kind != "train":
        own, cross = column_bytes(shapes)
        columns = 0 if case.kind == "engine" else case.beams * (case.prompt + case.new)
        return int(1.2 * weights) + case.rows * (columns * own + case.prompt * cross)
    matrices = {path: x for path, x in parameters(shapes).items() if x.ndim == 2}
    outputs = sum(x.shape[0] for path, x in matrices.items() if ".blocks." in path)
    # The backward pass has each output twice, before and after what follows the product, and the
    # logits and their gradient in float32. Adam has three arrays beside the parameters.
    kept = case.rows * case.prompt * (2 * outputs * 2 + 2 * shapes.config.vocab_size * 4)
    return kept + (weights if case.lora_rank is not None else 4 * weights)


version = f"jaxllm on jax {jax.__version__}, flax {flax.__version__}"
facts = {"device": device.device_kind, "platform": device.platform}
serve({"version": version, **facts, "limits": dataclasses.asdict(limits)}, run, Case)
