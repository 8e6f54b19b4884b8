"""`plan()`: cost of the library's programs on a TPU or GPU, by its own compiler, ahead of time."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxllm.common.arguments import checked, checked_function, checked_list, checks_flags
from jaxllm.common.errors import InputError, quoted
from jaxllm.models.joined import arranged_for_inference
from jaxllm.parallel.sharding import make_mesh
from jaxllm.planning import hlo
from jaxllm.planning.abstract import abstract_model, with_lora
from jaxllm.planning.decide import Decision, decide
from jaxllm.planning.lower import PROGRAMS, Workload, lower
from jaxllm.planning.topology import Chip, LoweredProgram, Topology, find_topology

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclasses.dataclass(frozen=True)
class Uncosted:
    """Operations of one kind for which the compiler gives no cycles."""

    count: int
    at_least_us: float | None
    """Time in which the memory moves the bytes that they read and write."""

    def __str__(self) -> str:
        return f"{self.count}" + (f" (>= {self.at_least_us:,.0f} us)" if self.at_least_us else "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramPlan:
    """Costs of one program. Bytes are those of one device.

    None: the compiler does not say, or it refused a program that does not fit (`fits` is False).
    """

    name: str
    """`decode`, `prefill`, `batch.decode`, `batch.prefill` or `train`."""
    mesh: Mapping[str, int] | None = None
    """Sizes of the mesh's axes; None: one device."""
    rows: int
    """Sequences of a step, on all devices."""
    tokens: int
    """Tokens of a step, on all devices: for `prefill` those of the prompts, for `batch.prefill`
    those of a wide chunk where prompts are prefilled in chunks."""
    weight_bytes: int
    """The model's parameters (float32 for `train`)."""
    cache_bytes: int
    """The KV cache; 0 for `train`."""
    argument_bytes: int | None = None
    """All inputs: weights that the program reads, cache and other state."""
    temp_bytes: int | None = None
    """Temporary arrays."""
    peak_bytes: int | None = None
    """Inputs, outputs, temporary arrays and code at once, and what only other programs read: their
    weights, the slots during a prefill of a chunk, and its prompts during a decode step."""
    fits: bool | None = None
    """True if `peak_bytes` fits the memory of a device; None: unknown (CPU)."""
    estimated_step_us: float | None = None
    """The compiler's cycles of one step at the chip's clock, those of loops times their trips, but
    at least `floor_step_us`. TPU only, without collectives and the operations of `uncosted`."""
    floor_step_us: float | None = None
    """Weights that the step reads, and cache, over the memory's bandwidth; or its FLOPs over the
    peak, if that is more."""
    inner_loops: int | None = None
    """While loops inside a step."""
    cache_copies: int | None = None
    """Copies of a layer's keys or values anywhere in the program."""
    kernels: int | None = None
    """Operations that a step launches, those of loops times their trips."""
    collectives: int | None = None
    """Collective operations in a step."""
    collective_bytes: int | None = None
    """Bytes that a device sends in them."""
    collective_us: float | None = None
    """Time of the collectives, one after the other, by the bandwidth between the devices."""
    series_step_us: float | None = None
    """A step whose collectives run while nothing is computed."""
    overlapped_step_us: float | None = None
    """A step whose asynchronous collectives run while other operations do: the larger of the two
    times, and the collectives that are not asynchronous."""
    mfu: float | None = None
    """Model FLOPs of a training step over the devices' peak in `series_step_us`."""
    overlapped_mfu: float | None = None
    """The same in `overlapped_step_us`."""
    uncosted: Mapping[str, Uncosted] | None = None
    """Operations of a step without an estimate: Pallas kernels, scatters, sorts; TPU only."""
    branch_us: tuple[tuple[float, ...], ...] | None = None
    """Estimated times of the branches of each conditional in a step, of which `estimated_step_us`
    takes the longest; TPU only."""
    compile_seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Costs of the programs of one model and workload on one topology."""

    topology: str
    device: str
    """Name of the device."""
    devices: int
    """Number of devices of the topology."""
    dtype: str
    workload: Workload
    programs: tuple[ProgramPlan, ...]

    @property
    def requests_per_s(self) -> float | None:
        """Prompts per second that the batch engine prefills and decodes with full slots, by the
        estimates of its two programs; None without them."""
        programs = {program.name: program for program in self.programs}
        prefill, decode = programs.get("batch.prefill"), programs.get("batch.decode")
        if prefill is None or decode is None:
            return None
        if prefill.series_step_us is None or decode.series_step_us is None:
            return None
        steps = self.workload.new * decode.series_step_us / decode.rows
        calls = math.ceil(self.workload.prompt * prefill.rows / prefill.tokens)
        return round(1e6 / (calls * prefill.series_step_us / prefill.rows + steps), 2)

    def to_dict(self) -> dict[str, Any]:
        """A JSON object; the figures of the programs are in the list `programs`."""
        return dataclasses.asdict(self) | {"requests_per_s": self.requests_per_s}


@checks_flags
def plan(
    model: str | PathLike[str] | Mapping[str, Any],
    topology: str = "v5e:2x2",
    *,
    mesh: Mapping[str, int] | Decision | str | None = None,
    batch: int = 8,
    prompt: int = 512,
    new: int = 128,
    slots: int = 64,
    dtype: str = "bfloat16",
    program: str | Sequence[str] | None = None,
    lora_rank: int | None = None,
    attn_implementation: str = "auto",
    remat: bool | str = False,
    scan_layers: bool = False,
    quantize: str | None = None,
    progress: Callable[[str], object] | None = None,
) -> Plan:
    """Compiles the library's programs for devices that are not there, and says what they cost.

    Args:
        model: a folder with config.json, the path of a config.json or of a .gguf file, or the
            object in a config.json. Weights are not read.
        topology: ``"v5e:2x4"``, ``"v6e:2x2"``, ``"v5p:2x2x1"``, ``"h100"``, ``"h100:8"``, or
            ``"cpu"``, this machine's CPU.
        mesh: sizes of `jaxllm.make_mesh`, such as ``{"tensor": 8}``, over the first devices of the
            topology; axes that are not named are 1. None: one device. "auto": all devices, with the
            best mesh of `decide` for generation, and `fsdp` for training. A `Decision` for this
            model and topology: the same, without computing it again.
        batch: rows of prefill, decode loop and training step.
        prompt: tokens of a prompt, or of a row of the training step.
        new: new tokens of a row.
        slots: slots of the batch engine.
        dtype: dtype of weights and computation; a training step keeps its weights in float32.
        program: "decode", "prefill", "batch" (its programs are `batch.decode` and `batch.prefill`),
            "train", or several of them. None: all.
        lora_rank: rank of LoRA updates, which a training step trains in place of all parameters.
        attn_implementation, remat, scan_layers: as `jaxllm.load`.
        quantize: as `jaxllm.load`; a quantized model has no training step.
        progress: called with the name of each program before it is compiled.

    Returns:
        A `Plan`. A program that the compiler refuses because it does not fit has `fits` False.

    Raises:
        MissingExtraError: the compiler for the topology is not installed.
        UnsupportedError, InputError: an unknown topology or program, a mesh larger than the
            topology, no mesh on which the weights fit ("auto"), or `remat`, `lora_rank` or
            `scan_layers` without a training step.
        JaxLLMError: as `abstract_model`.
    """
    programs = checked_programs(program, quantized=quantize is not None)
    of_training = {"remat": remat, "lora_rank": lora_rank is not None, "scan_layers": scan_layers}
    for name, value in of_training.items():
        if value and "train" not in programs:
            raise InputError(
                f"{name}: has an effect on a training step only; add the program train"
            )
    if progress is not None:
        checked_function(progress, "progress")
    sizes = {"batch": batch, "prompt": prompt, "new": new, "slots": slots}
    workload = Workload(**sizes)
    target_topology = find_topology(topology)
    lengths = {"batch": batch, "prompt": prompt, "new": new}
    meshes: dict[bool, Mapping[str, int] | None] = {}  # True: of the training step
    if isinstance(mesh, Decision) and mesh.topology != topology:
        raise InputError(
            f"mesh: the decision is about {mesh.topology}, and the topology is {topology}; give "
            "the decision of this topology, or 'auto'"
        )
    if isinstance(mesh, str) and mesh != "auto":
        raise InputError(f"mesh: expected sizes of axes or 'auto', found {quoted(mesh)}")
    if not isinstance(mesh, Decision | str):
        meshes = dict.fromkeys((False, True), mesh)
    elif target_topology.chip.memory_bytes is not None:
        meshes = {True: {"fsdp": len(target_topology.devices)}}
        if programs != ["train"]:
            if not isinstance(mesh, Decision):
                mesh = decide(model, topology, dtype=dtype, quantize=quantize, **lengths)
            if mesh.best is None:
                raise InputError(
                    f"mesh: auto: the model generates on no mesh of {topology}: its weights do not "
                    "fit, or it is a model without generation, which has the program train only"
                )
            meshes[False] = mesh.best.mesh
    plans = []
    for name in programs:
        sizes_of_mesh = meshes.get(name == "train")
        device_mesh = (
            None if sizes_of_mesh is None else topology_mesh(target_topology, sizes_of_mesh)
        )
        abstract = abstract_model(
            model,
            mesh=device_mesh,
            device=target_topology.devices[0],
            dtype=dtype,
            attn_implementation=attn_implementation,
            remat=remat,
            scan_layers=scan_layers,
            quantize=quantize,
        )
        if name != "train":
            abstract = arranged_for_inference(abstract)
        elif lora_rank is not None:
            abstract = with_lora(abstract, lora_rank)
        for lowered in lower(abstract, name, **sizes):
            if progress is not None:
                progress(lowered.name)
            plans.append(plan_program(lowered, target_topology.chip))
    return Plan(
        topology=topology,
        device=target_topology.chip.name,
        devices=len(target_topology.devices),
        dtype=jnp.dtype(dtype).name,
        workload=workload,
        programs=tuple(plans),
    )


def checked_programs(program: str | Sequence[str] | None, *, quantized: bool) -> list[str]:
    """The names of the programs that are asked for.

    >>> checked_programs(None, quantized=True)
    ['decode', 'prefill', 'batch']
    """
    if program is None:
        return [name for name in PROGRAMS if not quantized or name != "train"]
    names = [program] if isinstance(program, str) else checked_list(program, "program")
    if not names:
        raise InputError(f"program: expected one or several of {', '.join(PROGRAMS)}")
    return names


def topology_mesh(topology: Topology, sizes: Mapping[str, int]) -> Mesh:
    """A mesh over the first devices of a topology.

    Raises:
        InputError: an unknown axis, or more devices than there are.
    """
    checked(sizes, (Mapping,), "mesh", "sizes of axes, such as {'tensor': 8}")
    axes = {"data": 1, "fsdp": 1, "tensor": 1}
    for name in sizes:
        if name not in axes:
            raise InputError(f"mesh: unknown axis {quoted(name)}; known: {', '.join(axes)}")
    axes |= sizes
    devices = topology.devices
    if all(isinstance(size, int) and size > 0 for size in axes.values()):
        needed = math.prod(axes.values())
        if needed > len(devices):
            mesh_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
            raise InputError(
                f"mesh: {mesh_text} makes {needed} devices, but topology {topology.name} has "
                f"{len(devices)}; choose a larger topology"
            )
        devices = devices[:needed]
    return make_mesh(**axes, devices=devices)


def plan_program(program: LoweredProgram, chip: Chip) -> ProgramPlan:
    """Compiles one program and reads its costs."""
    stated: dict[str, Any] = {
        "name": program.name,
        "mesh": None if program.mesh is None else dict(program.mesh.shape),
        "rows": program.rows,
        "tokens": program.tokens,
        "weight_bytes": program.weight_bytes,
        "cache_bytes": program.cache_bytes,
        "floor_step_us": floor_us(program, chip),
    }
    began = time.perf_counter()
    try:
        compiled = program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        seconds = round(time.perf_counter() - began, 2)
        needed = needed_bytes(str(error))
        return ProgramPlan(**stated, peak_bytes=needed, fits=False, compile_seconds=seconds)
    seconds = round(time.perf_counter() - began, 2)
    memory = memory_of(compiled, program)
    text = compiled.as_text()
    assert text is not None  # the compilers of all topologies return it
    module = hlo.Module.parse(text)
    step = module.main_loop(program.loops)
    return ProgramPlan(
        **stated,
        **memory,
        **times_of(module, step, program, chip),
        fits=None if chip.memory_bytes is None else memory["peak_bytes"] <= chip.memory_bytes,
        inner_loops=hlo.inner_loops(module, step),
        cache_copies=hlo.array_copies(module, program.cache_arrays),
        kernels=hlo.kernels(module, step),
        collectives=hlo.collectives(module, step),
        compile_seconds=seconds,
    )


def times_of(module: hlo.Module, step: str, program: LoweredProgram, chip: Chip) -> dict[str, Any]:
    """Times of a step and its collectives, and what they leave out."""
    devices = 1 if program.mesh is None else program.mesh.size

    def sent_bytes(instruction: hlo.Instruction) -> float:
        found = hlo.collectives_of(module, instruction)
        return sum(hlo.transferred_bytes(x, devices) for x, _ in found)

    def microseconds(instruction: hlo.Instruction, *, hidden_only: bool = False) -> float:
        """Time of collectives: that of their bytes, or of their hops around half of the ring."""
        total = 0.0
        for x, is_asynchronous in hlo.collectives_of(module, instruction):
            if chip.link is not None and (is_asynchronous or not hidden_only):
                phases = 2 if "all-reduce" in x.opcode else 1
                hops = phases * (hlo.group_size(x, devices) // 2)
                total += chip.ring_seconds(hlo.transferred_bytes(x, devices), hops) * 1e6
        return total

    sent = module.total(step, sent_bytes)
    times: dict[str, Any] = {"collective_bytes": round(sent)}
    if chip.link is not None:
        times["collective_us"] = round(module.total(step, microseconds), 1)
    if chip.clock is None:
        return times
    floor = floor_us(program, chip) or 0.0
    computing = max(hlo.cycles(module, step) / chip.clock * 1e6, floor)
    hidden = module.total(step, partial(microseconds, hidden_only=True))
    series = computing + times.get("collective_us", 0.0)
    overlapped = max(computing, hidden) + times.get("collective_us", 0.0) - hidden
    times |= {
        "estimated_step_us": round(computing, 1),
        "series_step_us": round(series, 1),
        "overlapped_step_us": round(overlapped, 1),
        "uncosted": {
            name: Uncosted(count, round(size / chip.bandwidth * 1e6, 1) if chip.bandwidth else None)
            for name, (count, size) in hlo.uncosted(module, step).items()
        },
        "branch_us": tuple(
            tuple(round(cycles / chip.clock * 1e6, 1) for cycles in branches)
            for branches in hlo.branch_cycles(module, step)
        ),
    }
    if program.model_flops is not None and chip.flops is not None:
        ideal = program.model_flops / (chip.flops * devices) * 1e6
        times |= {"mfu": round(ideal / series, 3), "overlapped_mfu": round(ideal / overlapped, 3)}
    return times


def floor_us(program: LoweredProgram, chip: Chip) -> float | None:
    """Microseconds in which the memory delivers the weights that a step reads, and the cache, and
    in which the FLOPs are done at the peak: the larger of the two."""
    if chip.bandwidth is None:
        return None
    devices = 1 if program.mesh is None else program.mesh.size
    read = (program.read_weight_bytes + program.cache_bytes) / chip.bandwidth
    return round(max(read, program.flops / (chip.peak(program.dtype) * devices)) * 1e6, 3)


def memory_of(compiled: jax.stages.Compiled, program: LoweredProgram) -> dict[str, Any]:
    """Bytes of arguments, temporary arrays and all together."""
    stats = compiled.memory_analysis()
    assert stats is not None
    outputs = stats.output_size_in_bytes - stats.alias_size_in_bytes
    peak = stats.argument_size_in_bytes + outputs + stats.temp_size_in_bytes
    other = program.weight_bytes - program.argument_weight_bytes + program.beside_bytes
    return {
        "argument_bytes": stats.argument_size_in_bytes,
        "temp_bytes": stats.temp_size_in_bytes,
        "peak_bytes": peak + stats.generated_code_size_in_bytes + other,
    }


def needed_bytes(message: str) -> int | None:
    """The bytes that a program needs, from the error of a compiler that has fewer.

    >>> needed_bytes("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm.")
    22011707392
    """
    found = re.search(r"Used ([\d.]+)([KMGT]?) of|HLO temporaries \(([\d.]+)([KMGT]?)\)", message)
    if found is None:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])
