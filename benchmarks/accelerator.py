"""jaxllm on an accelerator: its numbers against the CPU's, and its speed against the device's.

    python benchmarks/accelerator.py [MODEL] [--json FILE]

MODEL is a folder with config.json of a decoder-only model, or the name of a file in `shapes`, such
as llama8b; by default SmolLM2-135M's shape. Weights are random, so nothing is downloaded. Small
models of every family are compared with the CPU; then decoding, prefill, the batch engine and a
training step are measured in bfloat16 on one device, as shares of its bandwidth and FLOP/s. What
would begin after --minutes is left out and listed.

Without an accelerator the same programs are planned for --topology by its own compiler
(docs/plan.md); `--device cpu` measures the CPU itself. Where libtpu is installed and no TPU is
there, set JAX_PLATFORMS=cpu.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from device_checks import checks
from device_models import SMALL, SMOLLM2, random_model
from device_speed import Limits, Sizes, measurements

import jaxllm
from jaxllm.errors import MissingExtraError
from jaxllm.planning.abstract import read_source

SHAPES = Path(__file__).parent / "shapes"
TOPOLOGIES = ("h100", "v5e:2x2")


def main(argv: Sequence[str] | None = None) -> int:
    """Prints figures, and writes them as JSON; 0 if there are any and all numbers agree."""
    args = parser().parse_args(argv)
    shape = None if args.model is None else SHAPES / f"{args.model}.json"
    source = shape if shape is not None and shape.is_file() else args.model
    config = SMOLLM2 if source is None else read_source(source)[0]
    sizes = Sizes(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Sizes)})
    clock = Clock(60 * args.minutes)
    device = jax.devices()[0]
    if device.platform == "cpu" and args.device == "auto":
        print("no accelerator: programs are compiled for one, and nothing is measured")
        report = planned(config, args.topology or TOPOLOGIES, sizes, clock)
        succeeded = bool(report["plans"])
    else:
        report = measured(config, device, sizes, clock, args)
        succeeded = all(check["passed"] for check in report["checks"])
    report |= {"jax": jax.__version__, "seconds": round(clock.passed, 1), "skipped": clock.skipped}
    for name in clock.skipped:
        print(f"left out, the time is over: {name}")
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0 if succeeded else 1


def parser() -> argparse.ArgumentParser:
    lines = (__doc__ or "").splitlines()
    result = argparse.ArgumentParser(description=lines[0])
    result.add_argument("model", nargs="?", type=Path, metavar="MODEL")
    result.add_argument("--json", type=Path, metavar="FILE")
    result.add_argument("--device", choices=("auto", "cpu"), default="auto")
    result.add_argument("--minutes", type=float, default=8.0)
    result.add_argument("--topology", action="append", help=f"default: {', '.join(TOPOLOGIES)}")
    result.add_argument("--attn-implementation", default="auto")
    result.add_argument("--dtype", default="bfloat16")
    result.add_argument("--families", nargs="*", choices=tuple(SMALL), default=list(SMALL))
    for field in dataclasses.fields(Sizes):
        flag, many = "--" + field.name.replace("_", "-"), isinstance(field.default, tuple)
        result.add_argument(flag, type=int, default=field.default, nargs="+" if many else None)
    return result


@dataclasses.dataclass
class Clock:
    """Runs parts until the time is over, and notes those that it leaves out."""

    limit: float
    """Seconds."""
    skipped: list[str] = dataclasses.field(default_factory=list)
    started: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def passed(self) -> float:
        return time.perf_counter() - self.started

    def allows(self, name: str) -> bool:
        if self.passed < self.limit:
            return True
        self.skipped.append(name)
        return False


def measured(
    config: Any, device: Any, sizes: Sizes, clock: Clock, args: argparse.Namespace
) -> dict[str, Any]:
    """Checks and measures a device."""
    report: dict[str, Any] = {"device": device.device_kind, "platform": device.platform}
    report |= {"sizes": dataclasses.asdict(sizes), "dtype": args.dtype}
    report["checks"] = []
    for family in args.families:
        if clock.allows(f"checks of {family}"):
            for check in checks(family, device, args.attn_implementation):
                report["checks"].append(check.to_dict())
                verdict = "agrees" if check.passed else "DIFFERS"
                print(f"{check.name}: {verdict}, {check.difference:.2g}, at most {check.tolerance}")
    limits = Limits.of(device)
    report["limits"] = dataclasses.asdict(limits)
    print(
        f"{device.device_kind}: {limits.bandwidth / 1e9:.0f} GB/s read, "
        f"{limits.flops / 1e12:.3g} TFLOP/s ({limits.flops_source})"
    )
    model = random_model(config, device, args.dtype, args.attn_implementation)
    report["measurements"] = []
    for name, measure in measurements(model, sizes, limits):
        if clock.allows(name):
            measurement = measure()
            report["measurements"].append(dataclasses.asdict(measurement))
            print(line_of(measurement))
    return report


def line_of(measurement: Any) -> str:
    """A measurement as a line of text."""
    text = f"{measurement.name}: {1e3 * measurement.step_seconds:.2f} ms, "
    text += f"{measurement.tokens_per_second:,.0f} tokens/s"
    if measurement.share_of_bandwidth is not None:
        text += f", {measurement.share_of_bandwidth:.0%} of the bandwidth"
    if measurement.share_of_flops is not None:
        text += f", {measurement.share_of_flops:.0%} of the FLOP/s"
    return text


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
