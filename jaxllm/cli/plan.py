"""``jaxllm plan MODEL``: what a model's programs cost on a TPU or GPU, compiled ahead of time.

Their own compilers say it, from config.json alone; nothing runs, and no weights are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from jaxllm.cli.devices import mesh_sizes
from jaxllm.cli.options import DTYPE_NAMES, add_model
from jaxllm.cli.process import Parser, add_flags, command, reject
from jaxllm.common.errors import InputError
from jaxllm.common.optional_packages import install_command
from jaxllm.common.progress import Reporter
from jaxllm.models.quantize import FORMATS
from jaxllm.nn.attention import IMPLEMENTATIONS
from jaxllm.planning import Decision, Plan, decide, plan
from jaxllm.planning.plan import Uncosted
from jaxllm.planning.topology import CHIPS, COMPILED_GPU, chip_and_count, has_compiler

_EXAMPLES = """\
examples:
  jaxllm plan ~/models/llama --topology v5e:2x4 --prompt 1024 --new 128 --bounds
  jaxllm plan ~/models/llama --topology v5e:2x4 --mesh tensor=8 --program decode
  jaxllm plan ~/models/gpt2 --topology h100 --batch 8 --prompt 1024 --program train --json
"""
_SIZES = (
    ("--batch N", 8, "rows of prefill, decode loop and training step (default: 8)"),
    ("--prompt N", 512, "tokens of a prompt, or of a row of the training step (default: 512)"),
    ("--new N", 128, "new tokens of a row (default: 128)"),
    ("--slots N", None, "slots of the batch engine (default: 64)"),
)
_COMPILED = ("slots", "program", "attn_implementation", "remat", "scan_layers")
"""Options of the compiled programs, which bounds do not depend on."""


def _parser(program: str) -> Parser:
    parser = Parser(
        program,
        "[MODEL]",
        description="Show the memory and the time of a model on TPUs or GPUs that are not here.",
        epilog=_EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "--topology",
        default="v5e:2x2",
        help="v5e:2x4, v6e:2x2, v5p:2x2x1, h100, h100:8 or cpu; with bounds only also a100:4, l4, "
        "h200 or b200 (default: %(default)s)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_or_auto,
        metavar="SIZES",
        default="auto",
        help="shard over the first devices of the topology: data=2,tensor=4. auto, the default: "
        "compare the meshes of all devices, and take the best",
    )
    parser.add_argument(
        "--bounds", action="store_true", help="compare meshes only, and compile nothing"
    )
    add_flags(parser, {flag: {"default": n, "help": text} for flag, n, text in _SIZES})
    parser.add_argument(
        "--dtype",
        choices=DTYPE_NAMES,
        default="bfloat16",
        help="weights and computation (bfloat16)",
    )
    parser.add_argument(
        "--quantize", choices=tuple(FORMATS), help="weights as integers, without a training step"
    )
    parser.add_argument(
        "--program",
        choices=("decode", "prefill", "batch", "train"),
        action="append",
        help="what to compile; may be repeated (default: all)",
    )
    implementations = f"auto (the default), {', '.join(IMPLEMENTATIONS)}"
    parser.add_argument("--attn-implementation", metavar="NAME", help=implementations)
    parser.add_argument(
        "--lora-rank", type=int, metavar="N", help="training updates LoRA matrices of this rank"
    )
    parser.add_argument(
        "--remat",
        nargs="?",
        const="full",
        choices=("full", "dots"),
        help="recomputes activations: full, the default here, or dots, all but linear layers",
    )
    parser.add_argument("--scan-layers", action="store_true", help="training scans its layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def mesh_or_auto(text: str) -> dict[str, int] | str:
    """The sizes of a mesh, or "auto"."""
    return text if text == "auto" else mesh_sizes(text)


def _run(arguments: argparse.Namespace) -> int:
    # The accelerator is described, not used: the process needs no other device than the CPU.
    jax.config.update("jax_platforms", "cpu")
    reporter = Reporter(quiet=arguments.json)
    console, found = Console(highlight=False), {}
    chip, _ = chip_and_count(arguments.topology)
    common = {
        "batch": arguments.batch,
        "prompt": arguments.prompt,
        "new": arguments.new,
        "dtype": arguments.dtype,
        "quantize": arguments.quantize,
        "lora_rank": arguments.lora_rank,
    }
    compiles, mesh = not arguments.bounds, arguments.mesh
    if arguments.bounds:
        reject(arguments, _COMPILED, "has no effect with --bounds, which compiles nothing")
        if mesh != "auto":
            raise InputError("--bounds compares all meshes; leave out --mesh")
    if arguments.bounds or (arguments.mesh == "auto" and chip.memory_bytes is not None):
        mesh = decision = decide(arguments.model, arguments.topology, **common)
        found["decision"] = decision.to_dict()
        if not arguments.json:
            for line in decision_lines(decision):
                console.print(line, soft_wrap=True)
            if decision.meshes:
                console.print(meshes_table(decision))
        # What was not asked for by name is left out where it cannot be compiled.
        can_compile = has_compiler(arguments.topology) and decision.best is not None
        if compiles and not arguments.program and not can_compile:
            compiles = False
            reporter.say(f"no programs are compiled: {why_not(decision)}")
    if compiles:
        given = {name: getattr(arguments, name) for name in _COMPILED}
        result = plan(
            arguments.model,
            arguments.topology,
            mesh=mesh,
            progress=lambda name: reporter.say(f"compiling {name}"),
            **common,
            **{name: value for name, value in given.items() if value is not None},
        )
        found |= result.to_dict()
        if not arguments.json:
            console.print(title_of(result), soft_wrap=True)
            console.print(plan_table(result))
    if arguments.json:
        print(json.dumps(found, indent=2))
    return 0


def why_not(decision: Decision) -> str:
    """Why nothing can be compiled for a topology."""
    if not decision.meshes:
        hint = "" if decision.training is None else "; add --program train"
        return f"the model does not generate{hint}"
    if decision.best is None:
        return "the weights fit on none of the meshes"
    extra = "tpu" if decision.device.startswith("TPU") else "gpu"
    if decision.device != CHIPS[COMPILED_GPU].name and extra == "gpu":
        return f"jaxllm knows no compiler for {decision.device}"
    return f"install the compiler with {install_command(f'plan-{extra}')}"


def decision_lines(decision: Decision) -> Iterator[str]:
    """What to do with a model on these devices, as sentences."""
    where = f"{decision.devices} x {decision.device}"
    sizes = f"{decision.workload.prompt} + {decision.workload.new} tokens"
    best = decision.best
    if not decision.meshes:
        yield "The model has no language-model head, and does not generate."
    elif best is None:
        least = min(bounds.weight_bytes for bounds in decision.meshes)
        yield (
            f"The weights do not fit: {least / 1e9:,.1f} GB on each of {where} at least. Take more "
            "devices, or --quantize."
        )
    else:
        yield (
            f"Generate on {where} with --mesh {axes_text(best.mesh)}: at most {best.rows:,} "
            f"sequences of {sizes} at once."
        )
        yield (
            f"At best {best.tokens_per_s:,.0f} tokens/s while decoding, {best.requests_per_s:,.1f} "
            f"requests/s, the first token of a request after {best.first_token_us / 1e3:,.1f} ms."
        )
    yield (
        f"Loading reads {decision.checkpoint_bytes / 1e9:,.1f} GB, in {decision.load_seconds:,.0f} "
        f"s at 1 GB/s, and takes {decision.host_bytes / 1e9:,.1f} GB of the host's memory."
    )
    training = decision.training
    if training is not None:
        what = "all weights" if training.lora_rank is None else f"LoRA of rank {training.lora_rank}"
        used = (training.state_bytes + training.activation_bytes) / 1e9
        yield (
            f"Train {what} with --mesh {axes_text(training.mesh)}: {used:,.1f} GB a device for "
            f"{decision.workload.batch} rows with --remat, which "
            + ("fit" if training.fits else "do NOT fit")
            + f"; at best {training.tokens_per_s:,.0f} tokens/s."
        )


def axes_text(mesh: Mapping[str, int]) -> str:
    """A mesh as the command's option takes it.

    >>> axes_text({"data": 2, "fsdp": 1, "tensor": 4}), axes_text({"data": 1})
    ('data=2,tensor=4', 'data=1')
    """
    sizes = {axis: size for axis, size in mesh.items() if size > 1} or {"data": 1}
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def meshes_table(decision: Decision) -> Table:
    """A table of the meshes for generation, the best mesh first, with the bytes of one device."""
    table = Table("mesh", *(Column(axes_text(x.mesh), justify="right") for x in decision.meshes))
    for field, label, divisor, decimals in _MESH_ROWS:
        cells = [
            f"{getattr(x, field) / divisor:,.{decimals}f}"
            if x.rows > 0 or field in ("weight_bytes", "rows")
            else "-"
            for x in decision.meshes
        ]
        table.add_row(label, *cells)
    return table


def title_of(plan: Plan) -> str:
    """Devices, dtype and workload of a plan, and what the batch engine does with them."""
    sizes = ", ".join(f"{name} {size}" for name, size in vars(plan.workload).items())
    title = f"{plan.topology}, {plan.devices} x {plan.device}, {plan.dtype}; {sizes}"
    if plan.requests_per_s is None:
        return title
    return f"{title}\nBy the compiler's estimates: {plan.requests_per_s:,.1f} requests/s"


def plan_table(plan: Plan) -> Table:
    """The plan as a table with one column for each program."""
    table = Table("", *(Column(program.name, justify="right") for program in plan.programs))
    for field, label, shown in _ROWS:
        values = (getattr(program, field) for program in plan.programs)
        table.add_row(label, *("-" if value is None else shown(value) for value in values))
    return table


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _branches(found: Sequence[Sequence[float]]) -> str:
    return "; ".join(" or ".join(map(_NUMBER, branches)) for branches in found) or "none"


def _counts(found: Mapping[str, Uncosted]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "nothing"


_MESH_ROWS = (
    ("weight_bytes", "weights, GB", 1e9, 2),
    ("rows", "sequences at once", 1, 0),
    ("step_us", "step, at least ms", 1e3, 2),
    ("collective_us", "its collectives, ms", 1e3, 2),
    ("first_token_us", "first token, ms", 1e3, 2),
    ("tokens_per_s", "tokens/s", 1, 0),
    ("requests_per_s", "requests/s", 1, 1),
)
"""Fields of `MeshBounds`, their labels, units and decimals."""
_NUMBER: Callable[[float], str] = "{:,.0f}".format
_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("mesh", "mesh", axes_text),
    ("rows", "sequences", _NUMBER),
    ("tokens", "tokens", _NUMBER),
    ("weight_bytes", "weights, MiB", _mib),
    ("cache_bytes", "KV cache, MiB", _mib),
    ("argument_bytes", "arguments, MiB", _mib),
    ("temp_bytes", "temporary, MiB", _mib),
    ("peak_bytes", "peak, MiB", _mib),
    ("fits", "fits", lambda fits: "yes" if fits else "NO"),
    ("estimated_step_us", "step, estimated us", _NUMBER),
    ("floor_step_us", "step, at least us", _NUMBER),
    ("inner_loops", "loops in a step", _NUMBER),
    ("cache_copies", "copies of the cache", _NUMBER),
    ("kernels", "kernels of a step", _NUMBER),
    ("collectives", "collectives of a step", _NUMBER),
    ("collective_bytes", "they send, MiB", _mib),
    ("collective_us", "collectives, us", _NUMBER),
    ("series_step_us", "step in series, us", _NUMBER),
    ("overlapped_step_us", "step overlapped, us", _NUMBER),
    ("mfu", "MFU in series", "{:.1%}".format),
    ("overlapped_mfu", "MFU overlapped", "{:.1%}".format),
    ("uncosted", "not in the estimate", _counts),
    ("branch_us", "branches, us", _branches),
    ("compile_seconds", "compiled in, s", "{:.1f}".format),
)
"""Fields of `ProgramPlan`, and how the table shows them. Bytes are those of one device."""


main = command(_parser, _run, "jaxllm plan")
