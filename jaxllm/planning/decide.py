"""`decide()`: how to run a model on some devices, by bytes, FLOPs and links alone.

The arithmetic needs neither the devices nor their compiler. A step takes at least the time in
which the memory delivers what the step reads, and at least the time of its FLOPs at the peak: the
roofline of Williams et al. 2009. Collectives are added to it, one after the other.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from os import PathLike
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jaxllm.batch.programs import programs
from jaxllm.checkpoint.load_parameters import READ_AHEAD
from jaxllm.common.arguments import checks_flags
from jaxllm.common.errors import InputError, UnsupportedError
from jaxllm.common.hardware import SHARE_OF_DEVICE
from jaxllm.models.expert_use import used_shares
from jaxllm.models.model import BaseModel, LanguageModel, Model
from jaxllm.models.weights import parameters
from jaxllm.nn.platform.training import logits_within_memory
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import FSDP, TENSOR, abstract_mesh, row_shards
from jaxllm.planning.abstract import (
    abstract_model,
    device_bytes,
    read_shares,
    with_experts,
    with_lora,
)
from jaxllm.planning.lower import Workload, forward_flops
from jaxllm.planning.topology import Chip, chip_and_count
from jaxllm.training.lora import is_trainable
from jaxllm.training.monitor.flops import TokenCounts, model_flops

READ_BANDWIDTH = 1e9
"""Bytes per second at which a checkpoint is read, for `load_seconds`."""
STATE_BYTES = 16
"""Bytes for each trained parameter: weight, gradient and Adam's two moments in float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshBounds:
    """What generation costs on one mesh of all devices. Bytes are those of one device."""

    mesh: Mapping[str, int]
    weight_bytes: int
    row_bytes: int
    """The KV cache and state of one sequence, on each of the devices that hold it."""
    rows: int
    """Most sequences at once, on all devices together, in nine tenths of the memory; 0 if the
    weights leave no room."""
    step_us: float
    """At least what a decode step of so many sequences takes, without collectives."""
    collective_us: float
    """The collectives of the step, one after the other."""
    first_token_us: float
    """Prefill of one prompt on idle devices, with collectives."""
    tokens_per_s: float
    """New tokens per second of all sequences together; prefill is not in it."""
    requests_per_s: float
    """Prompts per second, prefilled and decoded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBounds:
    """What a training step costs on a mesh `fsdp` of all devices."""

    mesh: Mapping[str, int]
    lora_rank: int | None
    """Rank of the LoRA updates; None: all parameters are trained."""
    state_bytes: int
    """Weights, gradients and moments, of one device."""
    activation_bytes: int
    """Inputs of the blocks, which `remat` keeps, and logits of the loss, of one device."""
    fits: bool
    step_us: float
    """At least what the FLOPs of a step take."""
    tokens_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """Meshes for a model on the devices of a topology, the best first."""

    topology: str
    device: str
    devices: int
    dtype: str
    workload: Workload
    meshes: tuple[MeshBounds, ...]
    """Ranked by requests per second; empty for a model that does not generate, as a classifier."""
    training: TrainingBounds | None
    """None: quantized weights, and models without a head, are not trained."""
    checkpoint_bytes: int
    """Bytes of all weights in their dtype."""
    load_seconds: float
    """Time to read them at 1 GB/s."""
    host_bytes: int
    """Memory of the host while weights are loaded: the tensors that are read ahead, and their
    copies."""

    @property
    def best(self) -> MeshBounds | None:
        """The mesh with the most requests per second; None if the model fits on none."""
        return self.meshes[0] if self.meshes and self.meshes[0].rows else None

    def to_dict(self) -> dict[str, Any]:
        """A JSON object."""
        return dataclasses.asdict(self)


@checks_flags
def decide(
    model: str | PathLike[str] | Mapping[str, Any],
    topology: str = "v5e:2x2",
    *,
    batch: int = 8,
    prompt: int = 512,
    new: int = 128,
    dtype: str = "bfloat16",
    quantize: str | None = None,
    lora_rank: int | None = None,
) -> Decision:
    """Ranks the meshes of all devices of a topology for one model and workload.

    Neither the devices nor their compiler are needed; `plan` compiles the programs.

    Args:
        model: as for `plan`.
        topology: as for `plan`; also ``"a100:4"``, ``"l4"``, ``"h200:8"`` and ``"b200"``.
        batch: rows of a training step.
        prompt: tokens of a prompt, or of a row of the training step.
        new: new tokens of a row.
        dtype, quantize: as for `plan`.
        lora_rank: rank of LoRA updates of all linear layers; None: all parameters are trained.

    Raises:
        UnsupportedError: an unknown topology, or the CPU, whose figures are not known.
        JaxLLMError: as `abstract_model`.

    >>> config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
    >>> decision = decide(config, "a100:4", prompt=32, new=32)
    >>> dict(decision.best.mesh), decision.best.rows > 1000
    ({'data': 4, 'fsdp': 1, 'tensor': 1}, True)
    """
    chip, count = chip_and_count(topology)
    if chip.memory_bytes is None:
        raise UnsupportedError(
            f"topology: bounds need the memory and bandwidth of a device, which are not known for "
            f"{topology!r}; name a TPU or GPU"
        )
    workload = Workload(batch=batch, prompt=prompt, new=new, slots=16)
    plain = abstract_model(model, dtype=dtype)
    placed = plain if quantize is None else abstract_model(model, dtype=dtype, quantize=quantize)
    meshes: list[MeshBounds] = []
    if isinstance(placed, LanguageModel):
        costs = Costs.of(placed, plain, workload)
        heads = math.gcd(*plain.config.head_counts.values())
        tensors = [n for n in range(1, heads + 1) if count % n == 0 and heads % n == 0]
        # Gathering weights for each step is slow: only where they fit in no other way.
        for rows in ("data", "fsdp"):
            if not any(bounds.rows for bounds in meshes):
                sizes = [{rows: count // n, "tensor": n} for n in tensors]
                meshes += [costs.on(abstract_mesh(**axes), chip) for axes in sizes]
    training = None
    if quantize is None and not isinstance(plain, BaseModel):
        training = training_bounds(plain, workload, chip, count, lora_rank)
    elif lora_rank is not None:
        what = f"a {type(plain).__name__} is" if quantize is None else "quantized weights are"
        raise InputError(f"lora_rank: {what} not trained; leave it out")
    largest = max(x.size for x in jax.tree.leaves(plain)) * plain.dtype.itemsize
    total = device_bytes(plain)
    return Decision(
        topology=topology,
        device=chip.name,
        devices=count,
        dtype=plain.dtype.name,
        workload=workload,
        meshes=tuple(sorted(meshes, key=lambda x: (-x.requests_per_s, x.first_token_us))),
        training=training,
        checkpoint_bytes=total,
        load_seconds=round(total / READ_BANDWIDTH, 1),
        host_bytes=2 * min(total, max(READ_AHEAD, 3 * largest)),
    )


@dataclasses.dataclass(frozen=True)
class Costs:
    """What generation costs on any mesh: sizes of a model, and FLOPs of one sequence."""

    model: LanguageModel[Any]
    """Shapes without shardings."""
    workload: Workload
    read_shares: tuple[float, ...]
    """Share of each weight that a decode step reads."""
    decode_flops: float
    """FLOPs of a new token, after half of the new ones."""
    prefill_flops: float
    """FLOPs of a prompt."""

    @staticmethod
    def of(placed: LanguageModel[Any], plain: LanguageModel[Any], workload: Workload) -> Costs:
        """The costs of a model, whose FLOPs are those of the same model without quantization."""
        sizes = {"rows": workload.slots, "prompt": workload.prompt, "new": workload.new}
        decode, _ = programs(placed, None, None, **sizes, in_slots=True, fields={})
        jaxpr, count = decode.trace().jaxpr.jaxpr, len(jax.tree.leaves(placed))
        shares = read_shares(jaxpr, jaxpr.invars[:count])
        decode_flops, prefill_flops = forward_flops(plain, workload.prompt, workload.new)
        return Costs(placed, workload, tuple(shares), decode_flops, prefill_flops)

    def on(self, mesh: AbstractMesh, chip: Chip) -> MeshBounds:
        """The bounds for a mesh of one kind of device."""
        assert chip.memory_bytes is not None
        assert chip.bandwidth is not None
        shards, tensor = row_shards(mesh), mesh.shape[TENSOR]
        model = put_tree(self.model, mesh)
        leaves = jax.tree.leaves(model)
        weights = device_bytes(leaves)

        # Weights that are sharded over `fsdp` are gathered for their products.
        fsdp = mesh.shape[FSDP]
        gathered = [device_bytes(x) * (fsdp if FSDP in x.sharding.spec else 1) for x in leaves]

        def read(tokens: int) -> float:
            """Bytes that a step of so many tokens reads."""
            used = used_shares(self.model, tokens).values()
            shares = with_experts(self.read_shares, used)
            return sum(s * size for s, size in zip(shares, gathered, strict=True))

        sizes = {"rows": shards, "prompt": self.workload.prompt, "new": self.workload.new}
        decode, _ = programs(self.model, mesh, None, **sizes, in_slots=True, fields={})
        row_bytes = device_bytes(decode.state)
        # Of one device and its share of the rows, from here on.
        rows = max(0, int((SHARE_OF_DEVICE * chip.memory_bytes - weights) / row_bytes))
        peak = tensor * chip.peak(self.model.dtype)

        # All experts of a layer are gathered, used or not.
        is_expert = [used < 1 for used in used_shares(self.model).values()]
        shares = [max(x) for x in zip(self.read_shares, is_expert, strict=True)]
        missing = [size - device_bytes(x) for size, x in zip(gathered, leaves, strict=True)]
        received = sum(s * size for s, size in zip(shares, missing, strict=True))
        gathers = chip.ring_seconds(received, fsdp // 2)

        def collectives(tokens: int, *, decoding: bool) -> float:
            return gathers + sum(
                chip.all_reduce_seconds(tokens * outputs * self.model.dtype.itemsize, tensor)
                for outputs, share in zip(reduced_outputs(model), self.read_shares, strict=True)
                if outputs and (share or not decoding)
            )

        step = max(
            (read(rows) + rows * row_bytes) / chip.bandwidth, rows * self.decode_flops / peak
        )
        exchanged = collectives(rows, decoding=True)
        prefill = self.prefill_flops / peak + collectives(self.workload.prompt, decoding=False)
        seconds = rows * prefill + self.workload.new * (step + exchanged)
        return MeshBounds(
            mesh=dict(mesh.shape),
            weight_bytes=weights,
            row_bytes=row_bytes,
            rows=rows * shards,
            step_us=round(step * 1e6, 1),
            collective_us=round(exchanged * 1e6, 1),
            first_token_us=round(
                max(prefill, read(self.workload.prompt) / chip.bandwidth) * 1e6, 1
            ),
            tokens_per_s=round(rows * shards / (step + exchanged), 1),
            requests_per_s=round(rows * shards / seconds, 2),
        )


def reduced_outputs(model: Model[Any]) -> list[int]:
    """For each parameter on a mesh, the numbers of a token that an all-reduce adds up: the outputs
    of a matrix, or of a stack of experts' matrices, whose inputs are sharded over `tensor`; 0 for
    others."""
    return [
        x.shape[-2] if x.sharding.spec[1:] in ((TENSOR,), (None, TENSOR)) else 0
        for x in jax.tree.leaves(model)
    ]


def training_bounds(
    model: Model[Any], workload: Workload, chip: Chip, count: int, lora_rank: int | None
) -> TrainingBounds:
    """The bounds of a training step with Adam on a mesh `fsdp` of all devices."""
    assert chip.memory_bytes is not None
    mesh = abstract_mesh(fsdp=count)
    shapes = model if lora_rank is None else with_lora(model, lora_rank)
    params = parameters(put_tree(shapes, mesh))
    trained = [path for path in params if lora_rank is None or is_trainable(path)]
    frozen = [x for path, x in params.items() if path not in set(trained)]
    elements = sum(
        math.prod(params[path].sharding.shard_shape(params[path].shape)) for path in trained
    )
    state = STATE_BYTES * elements + device_bytes(frozen)
    rows = -(-workload.batch // count)
    tokens = rows * workload.prompt
    blocks = {match[0] for path in params if (match := re.match(r".*\.blocks\.\d+", path))}
    kept = tokens * model.config.width * len(blocks) * model.dtype.itemsize
    # The logits that the loss holds at once, and their gradient.
    most = logits_within_memory(chip.platform, model.dtype, chip.memory_bytes)
    kept += 2 * min(tokens * model.config.vocab_size, most) * model.dtype.itemsize
    counts = TokenCounts(tokens * count, tokens * count * workload.prompt // 2)
    if model.is_encoder_decoder:
        pairs = tokens * count * workload.prompt
        counts = TokenCounts(tokens * count, pairs // 2, tokens * count, pairs, pairs)
    flops = model_flops(shapes, None if lora_rank is None else trained).of(counts)
    step = flops / (chip.peak(model.dtype) * count)
    return TrainingBounds(
        mesh=dict(mesh.shape),
        lora_rank=lora_rank,
        state_bytes=state,
        activation_bytes=kept,
        fits=state + kept <= SHARE_OF_DEVICE * chip.memory_bytes,
        step_us=round(step * 1e6, 1),
        tokens_per_s=round(tokens * count / step, 1),
    )
