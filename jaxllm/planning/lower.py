"""Lowers the library's programs for an abstract model, for this machine's devices or others."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxllm.batch.memory import traced_programs
from jaxllm.batch.row_groups import groups, prefill_batch, sizes_for
from jaxllm.batch.rows import RawRow, RowReader
from jaxllm.batch.slots import PromptRows, Sizes, Slots, slot_shapes
from jaxllm.common.arguments import checked, is_integer
from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.call.prepare import PreparedCall, prepare_call
from jaxllm.generation.generate import run_prefill
from jaxllm.generation.loop import decode_program, prefill_program, steps_of
from jaxllm.models.decoder import FlatModel
from jaxllm.models.input_checks import MAX_IDS
from jaxllm.models.model import LanguageModel, Model
from jaxllm.nn.platform.decoding import steps_between_checks
from jaxllm.parallel.field_axes import field_shardings
from jaxllm.parallel.placement import put, put_everywhere, put_tree
from jaxllm.parallel.sharding import batch_sharding, row_shards
from jaxllm.planning.abstract import device_bytes, on_device, shapes_of
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


def abstract_request(target: Target, workload: Workload, fields: Mapping[str, Any]) -> PreparedCall:
    """A call of `generate` with this workload, whose arrays are shapes on the target's devices."""
    shape = (workload.batch, workload.prompt)
    if math.prod(shape) > MAX_IDS:
        raise InputError(f"batch, prompt: {shape} are more than {MAX_IDS} token ids; lower one")
    ids = np.zeros(shape, np.int32)
    keywords = {"do_sample": False, "num_beams": 1, **fields, "max_new_tokens": workload.new}
    call = prepare_call(target.unplaced, ids, np.ones_like(ids), None, 0, keywords)
    flat = FlatModel.of(target.model)
    arrays = (call.inputs, call.settings, call.strategy)
    arrays = shapes_of(arrays) if target.mesh is not None else on_device(arrays, target.device)
    inputs, settings, strategy = arrays
    call = dataclasses.replace(
        call, model=flat, inputs=inputs, settings=settings, strategy=strategy
    )
    return call if target.mesh is None else call.on_mesh(target.mesh)


def decode_state(target: Target, call: PreparedCall) -> Any:
    """The state after prefill, as shapes with the shardings that the programs give it."""
    with target.context():
        state = run_prefill(call, prefill_program.eval_shape)
    if target.mesh is None:
        return on_device(state, target.device)
    shardings = field_shardings(state, target.mesh, batch=state.cache.mask.shape[0])
    return put_tree(state, target.mesh, shardings)


def lower_decode(
    target: Target, workload: Workload, fields: Mapping[str, Any]
) -> Iterator[LoweredProgram]:
    """The decode loop of `generate`."""
    call = abstract_request(target, workload, fields)
    state = decode_state(target, call)
    max_length = shapes_of(np.int32(call.request.max_length))
    if target.mesh is None:
        max_length = on_device(max_length, target.device)
    else:
        max_length = put_everywhere(max_length, target.mesh)
    with target.context():
        arguments = (call.strategy, call.model, state, call.settings, max_length)
        steps = steps_of(call.strategy, call.settings, target.device.platform)
        traced = decode_program.trace(*arguments, steps)
    position = len(jax.tree.leaves(call.strategy))
    flops, _ = forward_flops(target.unplaced, workload.prompt, workload.new)
    rows = workload.batch
    numbers = {"rows": rows, "flops": rows * flops, **cache_numbers(state.cache)}
    loops = 1 + (steps > 1)
    yield target.lowered("decode", traced, position, tokens=rows, loops=loops, **numbers)


def lower_prefill(
    target: Target, workload: Workload, fields: Mapping[str, Any]
) -> Iterator[LoweredProgram]:
    """The prefill of `generate`."""
    call = abstract_request(target, workload, fields)
    with target.context():
        traced = run_prefill(call, prefill_program.trace)
    position = len(jax.tree.leaves(call.strategy))
    cache = decode_state(target, call).cache
    _, flops = forward_flops(target.unplaced, workload.prompt, workload.new)
    rows = workload.batch
    numbers = {"rows": rows, "flops": rows * flops, **cache_numbers(cache)}
    tokens = rows * workload.prompt
    yield target.lowered("prefill", traced, position, tokens=tokens, loops=0, **numbers)


@dataclasses.dataclass(frozen=True)
class BatchEngine:
    """What the batch engine makes of rows of one length."""

    sizes: Sizes
    rows: PromptRows

    @staticmethod
    def of(model: Any, workload: Workload, fields: Mapping[str, Any], shards: int) -> BatchEngine:
        """The engine for a model, whose slots are split into `shards` parts.

        Args:
            model: shapes without shardings, with the model's card.
        """
        keywords = {"do_sample": False, "num_beams": 1, **fields, "max_new_tokens": workload.new}
        reader = RowReader(model, None, keywords, seed=0)
        row = reader.read(RawRow(0, 0, {"input_ids": [0] * workload.prompt}))
        (group,) = groups([row], model.config.vocab_size)
        (task,) = group.tasks()[:1]
        sizes = sizes_for([task], 1, model.is_encoder_decoder, shards, group.beams)
        sizes = sizes.with_slots(workload.slots)
        return BatchEngine(sizes, prefill_batch([task], group, sizes))

    def slots(self, model: Any, mesh: Mesh | AbstractMesh | None) -> Slots:
        """The shapes of the slots, with their shardings on a mesh."""
        return slot_shapes(model, self.rows, self.sizes, mesh)

    def traced(self, model: Any, slots: Slots) -> tuple[jax.stages.Traced, jax.stages.Traced]:
        """The programs that prefill and decode, traced."""
        return traced_programs(model, slots, self.rows, self.sizes)


def lower_batch(
    target: Target, workload: Workload, fields: Mapping[str, Any]
) -> Iterator[LoweredProgram]:
    """The programs of the batch engine: decode steps of all slots, and prefill into slots."""
    engine = BatchEngine.of(target.unplaced, workload, fields, row_shards(target.mesh))
    slots = engine.slots(target.model, target.mesh)
    if target.mesh is None:
        slots = on_device(slots, target.device)
    with target.context():
        prefill, decode = engine.traced(target.model, slots)
    numbers = cache_numbers(slots.state.cache)
    loops = 1 + (steps_between_checks(target.device.platform) > 1)
    step, prompt = forward_flops(target.unplaced, workload.prompt, workload.new)
    rows = engine.sizes.slots
    numbers |= {"rows": rows, "flops": rows * step}
    yield target.lowered("batch.decode", decode, tokens=rows, loops=loops, **numbers)
    rows = engine.sizes.prefill_rows
    numbers |= {"rows": rows, "flops": rows * prompt, "tokens": rows * workload.prompt}
    yield target.lowered("batch.prefill", prefill, loops=0, **numbers)


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
    if target.mesh is None:
        state, batch = on_device((state, batch), target.device)
    else:
        state = put_tree(state, target.mesh)
        batch = {name: put(x, batch_sharding(target.mesh)) for name, x in batch.items()}
    with target.context():
        traced = step.trace(state, batch)
    program = target.lowered("train", traced, loops=0)
    tokens, pairs = workload.batch * workload.prompt, workload.batch * workload.prompt**2
    counts = TokenCounts(tokens, pairs // 2)
    if target.unplaced.is_encoder_decoder:
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


def cache_numbers(cache: Any) -> dict[str, Any]:
    """The fields of `LoweredProgram` about the KV cache."""
    arrays = jax.tree.leaves((cache.layers, cache.cross))
    kinds = {
        (jnp.dtype(x.dtype).name, int(np.prod(x.sharding.shard_shape(x.shape)))) for x in arrays
    }
    return {"cache_bytes": device_bytes(cache), "cache_arrays": frozenset(kinds)}


PROGRAMS: dict[str, Callable[..., Iterator[LoweredProgram]]] = {
    "decode": lower_decode,
    "prefill": lower_prefill,
    "batch": lower_batch,
    "train": lower_train,
}
