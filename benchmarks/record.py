"""The record of a device: the cases of `record_cases`, each engine alone, as one Markdown table.

Each engine runs in a process of its own, so that its memory is free when the next one starts. The
process that asks them uses no device.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from protocol import Peer
from record_cases import CASES, Case

WORKERS = Path(__file__).parent / "workers"
HF_PACKAGES = ("torch", "transformers")
GRACE = 20.0
"""Seconds after the end of the time at which a case that still runs is stopped."""
CHECK_SECONDS = 3.0
"""About what the checks of one family take on an H200, whose programs are compiled in threads."""
WHOLE_ROWS, STEPS = ("prefill", "train"), ("decode", "engine")
KINDS = {"auto": (*STEPS, *WHOLE_ROWS), "mosaic": STEPS}
"""Kinds of cases that an implementation of attention computes; `WHOLE_ROWS` of all others."""
UNITS = {"decode": "a step", "prefill": "a call", "engine": "all rows", "train": "a step"}


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

    @property
    def left(self) -> float:
        return max(0.0, self.limit - self.passed)

    def allows(self, name: str, seconds: float = 0.0) -> bool:
        """True if a part of about so many seconds would end in time."""
        if self.passed + seconds < self.limit:
            return True
        self.skipped.append(name)
        return False


class Engine:
    """A worker that measures one case after the other, and is started again if it dies."""

    def __init__(self, name: str, python: str, worker: str, **environment: str) -> None:
        self.name = name
        self.info: dict[str, Any] = {}
        """What the worker says of itself when it has started."""
        self._start = lambda: Peer(name, python, str(WORKERS / worker), alone=True, **environment)
        self._peer: Peer | None = None

    def start(self) -> Peer:
        if self._peer is None:
            self._peer = self._start()
            self.info = self._peer.info
        return self._peer

    def measure(
        self, cases: Sequence[tuple[Case, float]], clock: Clock
    ) -> dict[str, dict[str, Any]]:
        """The answers to cases of about so many seconds, as far as the time allows, by name."""
        answers: dict[str, dict[str, Any]] = {}
        for case, seconds in cases:
            if clock.allows(f"{self.name}: {case.name}", seconds):
                answers[case.name] = self._answer(case, clock)
                print(f"{self.name}: {line_of(case, answers[case.name])}", flush=True)
        if self._peer is not None:
            self._peer.close()
        return answers

    def _answer(self, case: Case, clock: Clock) -> dict[str, Any]:
        """The answer to one case. A worker that goes on after the end of the time is stopped."""
        try:
            peer = self.start()
            timer = threading.Timer(clock.left + GRACE, peer.process.kill)
            timer.start()
            try:
                return peer.measure(case)
            finally:
                timer.cancel()
        except (RuntimeError, OSError) as error:
            if self._peer is not None:
                self._peer.close()
                self._peer = None
            return {"error": str(error)} if clock.left else {"left_out": "the time is over"}


def record(
    families: Iterable[str], clock: Clock, args: argparse.Namespace
) -> dict[str, Any] | None:
    """Measures jaxllm, then transformers, and prints a table. None: there is no accelerator."""
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""} if args.device == "cpu" else {}
    kept = {} if args.tuned is None else keep_tuning(args.tuned)
    jaxllm = Engine("jaxllm", sys.executable, "jaxllm_device_worker.py", **on_cpu, **kept)
    peer = jaxllm.start()
    if jaxllm.info["platform"] == "cpu" and args.device == "auto" and not args.small:
        peer.close()
        return None
    families = tuple(families)
    seconds = 0.0 if args.small else CHECK_SECONDS * len(families)
    checks = [Case(name="checks", kind="checks", families=families, seconds=seconds)]
    cases = [case.smaller() if args.small else case for case in CASES]
    if (names := args.attn_implementation) is not None:
        checks = [case.with_attention(name) for case in checks for name in names]
        cases = [
            case.with_attention(name)
            for case in cases
            for name in names
            if case.kind in KINDS.get(name, WHOLE_ROWS)
        ]
    asked = [*(checks if families else ()), *cases]
    answers = {"jaxllm": jaxllm.measure([(case, case.seconds) for case in asked], clock)}
    engines = [jaxllm]
    if (python := hf_python(args.hf)) is not None:
        engines.append(Engine("transformers", python, "hf_device_worker.py", **on_cpu))
        own = [(case, case.peer_seconds) for case in cases if case.peer_seconds is not None]
        answers["transformers"] = engines[-1].measure(own, clock)
    found = [answers["jaxllm"].pop(case.name, {"checks": []}) for case in checks]
    report = {
        "date": datetime.date.today().isoformat(),
        **jaxllm.info,
        "version": {engine.name: engine.info.get("version") for engine in engines},
        "checks": [check for answer in found for check in answer.get("checks", [answer])],
        "cases": [
            {"name": case.name, "goal": case.goal}
            | {name: given[case.name] for name, given in answers.items() if case.name in given}
            for case in cases
        ],
    }
    print(f"\n{caption(report)}\n\n" + "\n".join(table(report["cases"])) + "\n")
    return report


def keep_tuning(folder: Path) -> dict[str, str]:
    """Environment in which XLA keeps the kernels that it chose by timing them, and JAX no program.

    A second run then compiles all programs, and times nothing.
    """
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder.resolve())}
    return cache | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}


def hf_python(given: str | None) -> str | None:
    """The Python of transformers: the one that is given, or this one if it has the packages."""
    if given is not None:
        return None if given == "none" else given
    has_packages = all(importlib.util.find_spec(name) for name in HF_PACKAGES)
    return sys.executable if has_packages else None


def succeeded(report: dict[str, Any]) -> bool:
    """True if the numbers agree and no case of jaxllm failed."""
    failed = [case for case in report["cases"] if "error" in case.get("jaxllm", {})]
    return not failed and all(check.get("passed") for check in report["checks"])


def line_of(case: Case, answer: dict[str, Any]) -> str:
    """An answer in words."""
    if "checks" in answer:
        return "\n".join(["numbers beside the CPU's", *map(line_of_check, answer["checks"])])
    if (reason := missing(answer)) is not None:
        return f"{case.name}: {reason}"
    text = f"{case.name}: {duration(answer['step_seconds'])}"
    text += f" {UNITS[case.kind]}, {answer['tokens_per_second']:,.0f} tokens/s"
    if "floor_seconds" in answer:
        text += f", {share(answer):.0%} of the floor"
        text += f"; {answer['programs']} programs compiled in {answer['compile_seconds']:.1f} s"
    return text


def line_of_check(check: dict[str, Any]) -> str:
    verdict = "agrees" if check["passed"] else "DIFFERS"
    return f"{check['name']}: {verdict}, {check['difference']:.2g}, at most {check['tolerance']}"


def line_of_limits(limits: dict[str, Any]) -> str:
    return (
        f"{limits['bandwidth'] / 1e9:,.0f} GB/s ({limits['bandwidth_source']}; a sum reads "
        f"{limits['read_bandwidth'] / 1e9:,.0f}), {limits['flops'] / 1e12:.3g} TFLOP/s "
        f"({limits['flops_source']})"
    )


def missing(answer: dict[str, Any]) -> str | None:
    """Why there is no measurement; None if there is one."""
    if "left_out" in answer:
        return f"left out, {answer['left_out']}"
    return f"failed, {answer['error']}" if "error" in answer else None


def share(answer: dict[str, Any]) -> float:
    return answer["floor_seconds"] / answer["step_seconds"]


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


def caption(report: dict[str, Any]) -> str:
    """What the table was measured with."""
    versions = "; ".join(filter(None, report["version"].values()))
    return (
        f"{report['device']}, {report['date']}, random weights in bfloat16; "
        f"{line_of_limits(report['limits'])}. {versions}."
    )


def table(cases: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A Markdown table of all cases, and a list of those without a measurement of jaxllm.

    A step is a token of all rows, a prefill, a training step, or the run of the batch engine.
    """
    names = ("case", "step", "tokens/s", "whole call, tokens/s", "floor", "share of the floor")
    names += ("goal", "compiling", "transformers: step", "whole call, tokens/s", "ratio")
    yield f"| {' | '.join(names)} |"
    yield f"|{'---|' * len(names)}"
    reasons: list[str] = []
    for case in cases:
        own, peer = (case.get(name, {}) for name in ("jaxllm", "transformers"))
        if "step_seconds" in own:
            yield f"| {' | '.join(cells(case, own, peer))} |"
        else:
            reasons.append(f"- {case['name']}: {missing(own) or 'left out, the time is over'}")
    if reasons:
        yield from ("", *reasons)


def cells(case: dict[str, Any], own: dict[str, Any], peer: dict[str, Any]) -> Iterator[str]:
    """One row of the table."""
    seconds, floor, goal = own["step_seconds"], own["floor_seconds"], case["goal"]
    yield case["name"] + (f", {own['slots']} slots" if own["slots"] else "")
    yield duration(seconds)
    yield f"{own['tokens_per_second']:,.0f}"
    yield whole_call(own)
    yield duration(floor)
    yield f"{share(own):.0%}"
    yield f"{goal:.0%}: {duration(floor / goal)}"
    yield f"{own['compile_seconds']:.1f} s, {own['programs']} programs"
    if "step_seconds" not in peer:
        yield from (missing(peer) or "", "", "")
        return
    yield duration(peer["step_seconds"])
    yield whole_call(peer)
    yield f"{peer['step_seconds'] / seconds:.1f}"


def whole_call(answer: dict[str, Any]) -> str:
    tokens = answer["whole_tokens_per_second"]
    return "" if tokens is None else f"{tokens:,.0f}"
