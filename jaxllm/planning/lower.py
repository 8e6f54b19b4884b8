"""Lowers the library's programs for an abstract model, for this machine's devices or others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.batch.programs import programs
from jaxllm.common.arguments import checked, is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.models.input_checks import MAX_IDS
from jaxllm.models.model import LanguageModel, Model
from jaxllm.parallel.placement import put_shapes
from jaxllm.parallel.sharding import batch_sharding, row_shards, use_devices
from jaxllm.planning.abstract import device_bytes
from jaxllm.planning.topology import LoweredProgram, Target

_MAX_SIZE = 2**20
"""Most rows, and most tokens of one; `generate` takes no more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of the programs' inputs."""

    batch: int
    """Rows of prefill, decode loop and training step."""
    prompt: int
    """Tokens of a prompt, or of a row of the training step."""
    new: int
    """New tokens of a row."""
    slots: int
    """Slots of the batch engine."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not is_integer(value) or not 1 <= value <= _MAX_SIZE:
                expected = f"an integer from 1 to {_MAX_SIZE}"
                raise InputError(f"{field.name}: expected {expected}, found {quoted(value)}")


def lower(
    model: Model[Any],
    program: str = "decode",
    *,
    batch: int = 8,
    prompt: int = 512,
    new: int = 128,
    slots: int = 64,
    **fields: Any,
) -> tuple[LoweredProgram, ...]:
    """Lowers programs of the library for a model, without weights and without running anything.

    The devices are those of the model's shardings: a single one or a mesh, of one or several
    processes, here or in a topology description (`find_topology`).

    Args:
        model: a model of `abstract_model`, or a loaded one.
        program: "decode" (the loop of `generate`), "prefill", "batch" (the two programs of
            `BatchGenerator`, `batch.decode` and `batch.prefill`) or "train" (the step of
            `make_train_step` with the default optimizer of a recipe).
        batch: rows of prefill, decode loop and training step.
        prompt: tokens of a prompt, or of a row of the training step.
        new: new tokens of a row.
        slots: slots of the batch engine.
        fields: generation fields, such as `do_sample` or `num_beams`; greedy search by default.

    Returns:
        The programs, lowered; `.compile()` compiles one for the devices of the model.

    Raises:
        InputError, UnsupportedError: as the library's functions raise for such a call.
    """
    checked(model, (Model,), "model", "a model")
    if not isinstance(program, str) or program not in PROGRAMS:
        raise InputError(f"program: unknown {quoted(program)}; known: {', '.join(PROGRAMS)}")
    for name in ("max_length", "max_new_tokens"):
        if name in fields:
            raise InputError(f"{name}: leave it out; `new` is the number of new tokens")
    workload = Workload(batch=batch, prompt=prompt, new=new, slots=slots)
    return tuple(PROGRAMS[program](Target.of(model), workload, fields))


def lower_generation(
    name: str, target: Target, workload: Workload, fields: Mapping[str, Any]
) -> Iterator[LoweredProgram]:
    """The program `decode` or `prefill` of `generate`, or both of the batch engine."""
    in_slots, shape = name == "batch", (workload.batch, workload.prompt)
    if not in_slots and math.prod(shape) > MAX_IDS:
        raise InputError(f"batch, prompt: {shape} are more than {MAX_IDS} token ids; lower one")
    sizes = {"prompt": workload.prompt, "new": workload.new}
    rows, devices = workload.slots if in_slots else workload.batch, (target.mesh, target.device)
    found = programs(target.model, *devices, rows=rows, **sizes, in_slots=in_slots, fields=fields)
    step, prefill = forward_flops(target.model, **sizes)
    for program in found:
        if not in_slots and program.name != name:
            continue
        with use_devices(*devices):
            traced = program.trace()
        arrays = jax.tree.leaves((program.cache.layers, program.cache.cross))
        kinds = ((jnp.dtype(x.dtype).name, x.sharding.shard_shape(x.shape)) for x in arrays)
        is_step = program.loops > 0
        yield target.lowered(
            program.name,
            traced,
            program.position,
            tokens=program.tokens,
            loops=program.loops,
            beside_bytes=device_bytes(program.beside),
            cache_bytes=device_bytes(program.cache),
            cache_arrays=frozenset((dtype, math.prod(shape)) for dtype, shape in kinds),
            rows=program.rows,
            flops=program.tokens * (step if is_step else prefill / workload.prompt),
        )


def lower_train(
    target: Target, workload: Workload, fields: Mapping[str, Any]
) -> Iterator[LoweredProgram]:
    """The training step on rows of `prompt` tokens, with a recipe's default optimizer."""
    # Training takes a second to import, which lowering another program need not pay.
    from jaxllm.training.lora import is_trainable, lora_layers
    from jaxllm.training.losses import loss_for
    from jaxllm.training.monitor.flops import TokenCounts, model_flops
    from jaxllm.training.optimizers import OptimizerConfig, make_optimizer
    from jaxllm.training.state import TrainState
    from jaxllm.training.step import make_train_step

    if fields:
        raise InputError(f"{next(iter(fields))}: a training step has no generation fields")
    if workload.batch % row_shards(target.mesh):
        raise InputError(
            f"batch: {workload.batch} rows cannot be split over data * fsdp = "
            f"{row_shards(target.mesh)} devices; make it a multiple"
        )
    optimizer = make_optimizer(OptimizerConfig())
    step = make_train_step(optimizer, loss_for(target.model), device=target.device)
    trainable = is_trainable if lora_layers(target.model) else None
    create = partial(TrainState.create, optimizer=optimizer, trainable=trainable)
    state = jax.eval_shape(create, target.model)
    ids = jax.ShapeDtypeStruct((workload.batch, workload.prompt), jnp.int32)
    batch = {"input_ids": ids, "labels": ids}
    state = put_shapes(state, target.mesh, target.device)
    rows = None if target.mesh is None else dict.fromkeys(batch, batch_sharding(target.mesh))
    batch = put_shapes(batch, target.mesh, target.device, rows)
    with use_devices(target.mesh, target.device):
        traced = step.trace(state, batch)
    tokens, pairs = workload.batch * workload.prompt, workload.batch * workload.prompt**2
    program = target.lowered("train", traced, tokens=tokens, loops=0)
    counts = TokenCounts(tokens, pairs // 2)
    if target.model.is_encoder_decoder:
        counts = TokenCounts(tokens, pairs // 2, tokens, pairs, pairs)
    # A step reads trained parameters in float32, whatever the model's dtype.
    weights = device_bytes((state.params, state.frozen))
    trained = state.params.keys() if trainable is not None else None
    flops = model_flops(target.model, trained).of(counts)
    yield dataclasses.replace(
        program,
        rows=workload.batch,
        flops=flops,
        weight_bytes=weights,
        argument_weight_bytes=weights,
        read_weight_bytes=weights,
        model_flops=flops,
    )


def forward_flops(model: LanguageModel[Any], prompt: int, new: int) -> tuple[float, float]:
    """FLOPs of a decode step of one sequence, and of its prompt's prefill.

    A third of what `model_flops` counts for a training step, whose backward pass takes two thirds.
    Only the last token of a prompt goes through the head. Attention with windows is not counted.
    """
    # Training takes a second to import, which lowering a program need not pay earlier.
    from jaxllm.training.monitor.flops import TokenCounts, model_flops

    flops = model_flops(model)
    head = 2.0 * model.config.vocab_size * model.config.width
    if model.is_encoder_decoder:
        step = TokenCounts(1, new // 2, cross_pairs=prompt)
        prefill = TokenCounts(0, 0, source_tokens=prompt, source_pairs=prompt**2)
        return flops.of(step) / 3, flops.of(prefill) / 3
    blocks = model.decoder_stack.blocks
    full = all(block.attn.window is None for block in blocks)
    step = TokenCounts(1, (prompt + new // 2) * full)
    body = flops.of(TokenCounts(prompt, prompt**2 // 2 * full)) / 3
    return flops.of(step) / 3, body - (prompt - 1) * head


PROGRAMS: dict[str, Callable[..., Iterator[LoweredProgram]]] = {
    **{name: partial(lower_generation, name) for name in ("decode", "prefill", "batch")},
    "train": lower_train,
}
