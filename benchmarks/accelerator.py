"""jaxllm on an accelerator: its numbers against the CPU's, and its speed against the device's.

    python benchmarks/accelerator.py [--hf PYTHON] [--json FILE]
    python benchmarks/accelerator.py --attn-implementation triton cudnn blockwise [--json FILE]
    python benchmarks/accelerator.py MODEL [--json FILE]

Without MODEL, small models of every family are compared with the CPU, and then the cases of
`record_cases.py` are measured: Llama-8B, Flan-T5-XL and GPT-2-XL, decoding, prefill, the batch
engine and training. transformers runs the same models beside jaxllm if this Python has torch and
transformers, or if --hf names a Python that has them. The end is a table in Markdown. With
--attn-implementation only the cases of prefill and training are measured, and jaxllm alone, once
with each implementation, after a comparison of its numbers with the CPU's. With "mosaic" these are
the cases of decoding and of the batch engine, and with "auto" all.

MODEL is a folder with config.json of a decoder-only model, or the name of a file in `shapes`, such
as llama8b. Decoding, prefill, the batch engine and a training step of this model are measured.

Weights are random, so nothing is downloaded. All is measured in bfloat16 on one device, as shares
of its bandwidth and FLOP/s. What would not end within --minutes is left out and listed. `--small`
tries the record with small models. `--tuned FOLDER` keeps the kernels that XLA chose by timing
them, which the next run with this folder reads.

Without an accelerator the programs of MODEL (smollm2) are planned for --topology by its own
compiler (docs/plan.md); `--device cpu` measures the CPU itself. Where libtpu is installed and no
TPU is there, set JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from device_checks import THOROUGH, checks
from device_models import SMALL, random_model
from device_speed import Limits, Measurement, Sizes, measurements
from record import Clock, line_of_check, line_of_limits, record, succeeded
from record_cases import SHAPES

import jaxllm
from jaxllm.errors import MissingExtraError
from jaxllm.planning.abstract import read_source

TOPOLOGIES = ("h100", "v5e:2x2")
DTYPE = "bfloat16"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints figures, and writes them as JSON; 0 if there are any and all numbers agree."""
    arguments = parser()
    args = arguments.parse_args(argv)
    of_model = {field.name for field in dataclasses.fields(Sizes)} | {"dtype"}
    given = {name: value for name in of_model if (value := getattr(args, name)) is not None}
    implementations = args.attn_implementation or ["auto"]
    if args.model is None and given:
        arguments.error(f"--{min(given).replace('_', '-')} needs MODEL")
    for name in ("small", "hf", "tuned"):
        if args.model is not None and getattr(args, name):
            arguments.error(f"--{name} goes without MODEL")
    if args.model is not None and len(implementations) > 1:
        arguments.error("--attn-implementation takes one name with MODEL")
    options = {"dtype": given.pop("dtype", DTYPE), "attn_implementation": implementations[0]}
    sizes, clock, report = Sizes(**given), Clock(60 * args.minutes), None
    if args.model is None:
        default = ("llama",) if args.small else SMALL
        report = record(default if args.families is None else args.families, clock, args)
        passed = report is not None and succeeded(report)
    elif jax.default_backend() != "cpu" or args.device == "cpu":
        families = THOROUGH if args.families is None else args.families
        report = measured(config_of(args.model), families, sizes, clock, **options)
        passed = all(check["passed"] for check in report["checks"])
    if report is None:
        print("no accelerator: programs are compiled for one, and nothing is measured")
        config = config_of(args.model or Path("smollm2"))
        report = planned(config, args.topology or TOPOLOGIES, sizes, clock)
        passed = bool(report["plans"])
    report |= {"jax": jax.__version__, "seconds": round(clock.passed, 1), "skipped": clock.skipped}
    for name in clock.skipped:
        print(f"left out, the time is over: {name}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if passed else 1


def parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    result = argparse.ArgumentParser(description=lines[0])
    result.add_argument("model", nargs="?", type=Path, metavar="MODEL")
    result.add_argument("--hf", metavar="PYTHON", help="environment with torch; none: no peer")
    result.add_argument("--small", action="store_true", help="a record with small models")
    result.add_argument("--tuned", type=Path, metavar="FOLDER", help="choices of kernels to keep")
    result.add_argument("--json", type=Path, metavar="FILE")
    result.add_argument("--device", choices=("auto", "cpu"), default="auto")
    result.add_argument("--minutes", type=float, default=9.5)
    result.add_argument("--topology", action="append", help=f"default: {', '.join(TOPOLOGIES)}")
    result.add_argument("--families", nargs="*", choices=tuple(SMALL))
    result.add_argument("--attn-implementation", nargs="+", metavar="NAME", help="default: auto")
    result.add_argument("--dtype", help=f"default: {DTYPE}")
    for field in dataclasses.fields(Sizes):
        flag, many = "--" + field.name.replace("_", "-"), isinstance(field.default, tuple)
        result.add_argument(flag, type=int, nargs="+" if many else None)
    return result


def config_of(model: Path) -> Mapping[str, Any]:
    """The config.json object of a folder, or of a name in `shapes`."""
    shape = SHAPES / f"{model}.json"
    return read_source(shape if shape.is_file() else model)[0]


def measured(
    config: Mapping[str, Any],
    families: Sequence[str],
    sizes: Sizes,
    clock: Clock,
    *,
    dtype: str,
    attn_implementation: str,
) -> dict[str, Any]:
    """Checks a device, and measures it with one model."""
    device = jax.devices()[0]
    report: dict[str, Any] = {"device": device.device_kind, "platform": device.platform}
    report |= {"sizes": dataclasses.asdict(sizes), "dtype": dtype}
    report["checks"] = []
    for family in families:
        if clock.allows(f"checks of {family}"):
            for check in checks(family, device, attn_implementation):
                report["checks"].append(check.to_dict())
                print(line_of_check(report["checks"][-1]))
    limits = Limits.of(device)
    report["limits"] = dataclasses.asdict(limits)
    print(f"{device.device_kind}: {line_of_limits(report['limits'])}")
    report["measurements"] = []
    make = partial(random_model, config, device, dtype, attn_implementation)
    for name, measure in measurements(make, sizes, limits):
        if clock.allows(name):
            measurement = measure()
            report["measurements"].append(dataclasses.asdict(measurement))
            print(line_of(measurement))
    return report


def line_of(measurement: Measurement) -> str:
    """A measurement as a line of text."""
    text = f"{measurement.name}: {1e3 * measurement.step_seconds:.2f} ms, "
    text += f"{measurement.tokens_per_second:,.0f} tokens/s"
    if measurement.share_of_bandwidth is not None:
        text += f", {measurement.share_of_bandwidth:.0%} of the bandwidth"
    return text + f", {measurement.share_of_flops:.0%} of the FLOP/s"


def planned(config: Any, topologies: Sequence[str], sizes: Sizes, clock: Clock) -> dict[str, Any]:
    """Plans for topologies whose compilers are installed."""
    decode = {"prompt": sizes.prompt, "new": sizes.new}
    workloads: list[dict[str, Any]] = [
        {"program": "decode", "batch": batch, **decode} for batch in sizes.batches
    ]
    rows, tokens = sizes.prefill_rows, sizes.prefill_tokens
    workloads.append({"program": "prefill", "batch": rows, "prompt": tokens, "new": 1})
    workloads.append({"program": "batch", "slots": sizes.slots, **decode})
    rows, tokens = sizes.train_rows, sizes.train_tokens
    workloads.append({"program": "train", "batch": rows, "prompt": tokens})
    report: dict[str, Any] = {"plans": [], "missing": []}
    for topology in topologies:
        try:
            plan_workloads(config, topology, workloads, clock, report["plans"].append)
        except MissingExtraError as error:
            print(f"{topology}: {error}")
            report["missing"].append(f"{topology}: {error}")
    return report


def plan_workloads(
    config: Any,
    topology: str,
    workloads: Sequence[dict[str, Any]],
    clock: Clock,
    add: Callable[[dict[str, Any]], None],
) -> None:
    """Plans each workload, prints its figures and adds them."""
    for workload in workloads:
        name = ", ".join(str(value) for value in workload.values())
        if not clock.allows(f"{topology}: {name}"):
            continue
        plan = jaxllm.plan(config, topology, **workload)
        add(plan.to_dict())
        for program in plan.programs:
            estimate, floor = program.estimated_step_us, program.floor_step_us
            print(
                f"{topology}: {program.name} ({name}): temporary {program.temp_bytes} bytes, "
                f"estimated {estimate} us, at least {floor} us, {program.kernels} kernels, "
                f"loops {program.inner_loops}, copies of the cache {program.cache_copies}"
            )


if __name__ == "__main__":
    sys.exit(main())
