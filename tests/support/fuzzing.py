"""Runs a function on many hostile files, each with a time and a memory limit, in a child process.

One child takes many files, because starting Python costs more than reading a file; it is started
again after it dies or is killed. A test then asserts that every outcome is harmless::

    outcomes = run_batch("fuzz_targets:load_tokenizer", files)
    assert not [outcome for outcome in outcomes if not outcome.harmless]
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import os
import random
import re
import resource
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120  # importing the target, on a busy machine
EXTREMES = (0, -1, 2**31, 2**40, 2**70, 1e300, -0.5, "", "x", "\ufdd0", None, True, [], {}, [[]])
"""Values that `mutate_json` sets."""
MAX_WAITS = 8  # for a child that does not run at all, times the limit of its CPU time


@dataclass(frozen=True)
class Outcome:
    """Outcome of one file.

    ``status`` is ``ok`` (the function returned), ``refused`` (it raised a JaxLLMError), ``escaped``
    (any other exception, panics and MemoryError included), ``hang`` or ``died`` (signal or exit).
    ``grown_mib`` is the child's peak of resident memory while it read the file, above what it used
    before.
    """

    path: Path
    status: str
    detail: str = ""
    seconds: float = 0.0
    grown_mib: float = 0.0

    @property
    def harmless(self) -> bool:
        return self.status in ("ok", "refused")


def fuzz_count(default: int) -> int:
    """Number of files to make: ``JAXLLM_FUZZ_N`` where it is set, else ``default``."""
    return int(os.environ.get("JAXLLM_FUZZ_N", default))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One to eight random edits: flipped, overwritten, deleted, doubled or truncated stretches."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        start = rng.randrange(len(result) + 1)
        stop = min(len(result), start + rng.choice((1, 2, 4, 8, 64, 1024)))
        match rng.randrange(6):
            case 0 if start < stop:
                result[start] ^= 1 << rng.randrange(8)
            case 1:
                result[start:stop] = rng.randbytes(stop - start)
            case 2:
                del result[start:stop]
            case 3:
                result[start:start] = result[start:stop]
            case 4:
                extreme = rng.choice((b"\x00", b"\x7f", b"\x80", b"\xff", b"9", b"["))
                result[start:stop] = extreme * (stop - start)
            case 5 if rng.random() < 0.2:
                del result[start:]
    return bytes(result)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, delete or swap values anywhere in the tree: files that are JSON, and wrong."""
    tree = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        node, parent, key = tree, None, None
        while isinstance(node, dict | list) and node and (parent is None or rng.random() < 0.85):
            parent = node
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            node = parent[key]
        if parent is None:
            return json.dumps(rng.choice(EXTREMES)).encode()
        match rng.randrange(4):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.append(rng.choice(parent))
            case 2 if isinstance(parent, dict):
                parent[rng.choice(("type", "x", "Ġ", "pattern"))] = parent[key]
            case _:
                parent[key] = copy.deepcopy(rng.choice(EXTREMES))
    return json.dumps(tree, ensure_ascii=False).encode()


def run_batch(
    target: str, files: Sequence[Path], seconds: float = 10, gib: float = 4
) -> list[Outcome]:
    """Call ``target`` (``"module:function"``) with each path; one outcome a file, in order."""
    outcomes: list[Outcome] = []
    child: _Child | None = None
    try:
        for path in files:
            if child is None:
                child = _Child(target, gib)
            outcome = child.run(path, seconds)
            outcomes.append(outcome)
            if outcome.status in ("hang", "died"):
                child.kill()
                child = None
    finally:
        if child is not None:
            child.kill()
    return outcomes


class _Child:
    def __init__(self, target: str, gib: float) -> None:
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
        self.process = subprocess.Popen(
            [sys.executable, __file__, target, str(gib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        ready = self._answer(START_SECONDS)
        if ready != b"ready\n":
            self.kill()
            raise RuntimeError(f"the child for {target} did not start: {ready!r}")

    def run(self, path: Path, seconds: float) -> Outcome:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{path}\n".encode())
        self.process.stdin.flush()
        # A child that waits for a processor on a busy machine does not hang: its CPU time counts.
        limit = self._cpu_seconds() + seconds
        for _ in range(MAX_WAITS):
            answer = self._answer(seconds)
            if answer is not None or self._cpu_seconds() >= limit:
                break
        if answer is None:
            return Outcome(path, "hang", f"no answer within {seconds} s of CPU time", seconds)
        if not answer:
            return Outcome(path, "died", f"exit status {self.process.wait()}")
        return Outcome(path, **json.loads(answer))

    def _answer(self, seconds: float) -> bytes | None:
        """One line; None when none comes in time, empty when the child is gone."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], seconds)
        return self.process.stdout.readline() if ready else None

    def _cpu_seconds(self) -> float:
        """CPU time of the child; wall time where there is no /proc."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


def _peak_kib(*, reset: bool = False) -> int:
    """Peak of resident memory; since the last reset, where there is a /proc.

    Not getrusage's figure, which begins with the parent's peak and never falls.
    """
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    assert peak is not None
    return int(peak[1])


def _serve(target: str, gib: float) -> None:
    """The child: a path a line on stdin, an outcome in JSON a line on stdout."""
    from jaxllm.common.errors import JaxLLMError

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the target prints must not mix with the answers
    module, _, name = target.partition(":")
    function = getattr(importlib.import_module(module), name)
    resource.setrlimit(resource.RLIMIT_AS, (int(gib * 2**30), int(gib * 2**30)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        before = _peak_kib(reset=True)
        start = time.perf_counter()
        try:
            function(Path(line.rstrip("\n")))
            status, detail = "ok", ""
        except JaxLLMError as error:
            status, detail = "refused", f"{type(error).__name__}: {error}"[:2000]
        except BaseException as error:  # a Rust panic is a BaseException
            status, detail = "escaped", f"{type(error).__name__}: {error}"[:2000]
        grown = _peak_kib() - before
        answer = {
            "status": status,
            "detail": detail,
            "seconds": round(time.perf_counter() - start, 3),
            "grown_mib": round(grown / 1024, 1),
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve(sys.argv[1], float(sys.argv[2]))
