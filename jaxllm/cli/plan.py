"""``jaxllm plan MODEL``: what a model's programs cost on a TPU or GPU, compiled ahead of time.

Their own compilers say it, from config.json alone; nothing runs, and no weights are read.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from jaxllm.cli.devices import mesh_sizes
from jaxllm.cli.options import DTYPE_NAMES, add_model
from jaxllm.cli.process import Parser, run_parsed
from jaxllm.common.progress import Reporter
from jaxllm.models.quantize import FORMATS
from jaxllm.nn.attention import IMPLEMENTATIONS
from jaxllm.planning import Plan, plan

_EXAMPLES = """\
examples:
  jaxllm plan ~/models/llama --topology v5e:2x4 --mesh tensor=8 --program decode
  jaxllm plan ~/models/gpt2 --topology h100 --batch 8 --prompt 1024 --program train --json
"""


def main(argv: Sequence[str] | None = None, program: str = "jaxllm plan") -> int:
    """Entry point; returns the exit code."""
    return run_parsed(_parser(program), _run, argv)


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
        help="v5e:2x4, v6e:2x2, v5p:2x2x1, h100, h100:8 or cpu (default: %(default)s)",
    )
    parser.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="SIZES",
        help="shard over the first devices of the topology: data=2,tensor=4 (default: one device)",
    )
    sizes = (
        ("--batch", 8, "rows of prefill, decode loop and training step"),
        ("--prompt", 512, "tokens of a prompt, or of a row of the training step"),
        ("--new", 128, "new tokens of a row"),
        ("--slots", 64, "slots of the batch engine"),
    )
    for flag, default, text in sizes:
        parser.add_argument(
            flag, type=int, metavar="N", default=default, help=f"{text} (default: {default})"
        )
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
    parser.add_argument("--attn-implementation", default="auto", help=implementations)
    parser.add_argument("--remat", action="store_true", help="training recomputes activations")
    parser.add_argument("--scan-layers", action="store_true", help="training scans its layers")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    # The accelerator is described, not used: the process needs no other device than the CPU.
    jax.config.update("jax_platforms", "cpu")
    reporter = Reporter(quiet=arguments.json)
    result = plan(
        arguments.model,
        arguments.topology,
        mesh=arguments.mesh,
        batch=arguments.batch,
        prompt=arguments.prompt,
        new=arguments.new,
        slots=arguments.slots,
        dtype=arguments.dtype,
        program=arguments.program,
        attn_implementation=arguments.attn_implementation,
        remat=arguments.remat,
        scan_layers=arguments.scan_layers,
        quantize=arguments.quantize,
        progress=lambda name: reporter.say(f"compiling {name}"),
    )
    if arguments.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        console = Console(highlight=False)
        console.print(title_of(result), soft_wrap=True)
        console.print(plan_table(result))
    return 0


def title_of(plan: Plan) -> str:
    """Devices, mesh, dtype and workload of a plan."""
    place = f"{plan.devices} x {plan.device} of {plan.topology}"
    if plan.mesh is not None:
        place += " (" + ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items()) + ")"
    sizes = ", ".join(f"{name} {size}" for name, size in vars(plan.workload).items())
    return f"{place}, {plan.dtype}; {sizes}"


def plan_table(plan: Plan) -> Table:
    """The plan as a table with one column for each program."""
    table = Table("", *(Column(program.name, justify="right") for program in plan.programs))
    for field, label, format_value in _ROWS:
        table.add_row(
            label, *(_cell(getattr(program, field), format_value) for program in plan.programs)
        )
    return table


def _cell(value: object, format_value: Callable[[Any], str]) -> str:
    return "-" if value is None else format_value(value)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"


def _number(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _counts(found: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in found.items()) or "nothing"


_ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("weight_bytes", "weights, MiB", _mib),
    ("cache_bytes", "KV cache, MiB", _mib),
    ("argument_bytes", "arguments, MiB", _mib),
    ("temp_bytes", "temporary, MiB", _mib),
    ("peak_bytes", "peak, MiB", _mib),
    ("fits", "fits", lambda fits: "yes" if fits else "NO"),
    ("estimated_step_us", "step, estimated us", _number),
    ("floor_step_us", "step, at least us", _number),
    ("inner_loops", "loops in a step", _number),
    ("cache_copies", "copies of the cache", _number),
    ("kernels", "kernels of a step", _number),
    ("collectives", "collectives of a step", _number),
    ("collective_bytes", "bytes that they send, MiB", _mib),
    ("collective_us", "time of collectives, us", _number),
    ("series_step_us", "step, collectives in series, us", _number),
    ("overlapped_step_us", "step, collectives overlapped, us", _number),
    ("mfu", "MFU in series", _percent),
    ("overlapped_mfu", "MFU overlapped", _percent),
    ("uncosted", "not in the estimate", _counts),
    ("compile_seconds", "compiled in, s", lambda seconds: f"{seconds:.1f}"),
)
"""Fields of `ProgramPlan`, and how the table shows them. Bytes are those of one device."""
