"""Coverage-guided fuzzing with atheris (libFuzzer): files that reach new lines of jaxllm are kept.

    python tests/support/coverage_fuzz.py --seconds 60 [TARGET ...]

Each target of `fuzz_targets` runs in a process of its own, from the files of `fuzz_seeds` and those
that earlier runs kept in build/fuzz. Ends with 1 if one raised something else than a JaxLLMError,
took more than 10 seconds for a file or 4 GiB of memory; its file is then in build/fuzz/faults.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "fuzz"
INSTRUMENTED = [
    *(f"jaxllm.{name}" for name in ("batch", "checkpoint", "common", "models", "tokenizers")),
    *("jaxllm.generation.settings", "jaxllm.training.run"),
]


def fuzz(target: str, seconds: int) -> None:
    """Runs one target in this process; ends it."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        from fuzz_seeds import fault_files, seeds
        from fuzz_targets import TARGETS
    from fuzzing import mutate_json

    from jaxllm.errors import JaxLLMError

    corpus = FOLDER / "corpus" / target
    for folder in (corpus, FOLDER / "faults"):
        folder.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp())
    actual = [path.read_bytes() for name, path in fault_files() if name == target]
    for number, data in enumerate([*seeds(target, work), *actual]):
        (corpus / f"seed-{number}").write_bytes(data)

    def run(data: bytes) -> None:
        path = work / f"file.{target}"
        path.write_bytes(data)
        with contextlib.suppress(JaxLLMError):
            TARGETS[target](path)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        """Changes bytes, or half of the time values of JSON."""
        rng = random.Random(seed)
        if data[:1] in (b"{", b"[") and rng.random() < 0.5:
            try:
                return mutate_json(data, rng)[:max_size]
            except (ValueError, RecursionError, IndexError):
                pass  # not JSON, or empty
        return atheris.Mutate(data, max_size)

    options = [f"-max_total_time={seconds}", "-timeout=10", "-rss_limit_mb=4096"]
    options += ["-max_len=1000000", f"-artifact_prefix={FOLDER / 'faults' / target}-"]
    atheris.Setup([sys.argv[0], *options, str(corpus)], run, custom_mutator=change)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*")
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # in a process of its own
    options = parser.parse_args()
    if options.only:
        fuzz(options.only, options.seconds)
        return 0
    from fuzz_targets import TARGETS

    failed, figures = [], {}
    for target in options.targets or TARGETS:
        command = [sys.executable, __file__, "--only", target, "--seconds", str(options.seconds)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        numbers = re.findall(r"#(\d+)\s.* cov: (\d+)", done.stderr)
        runs, lines = numbers[-1] if numbers else ("0", "0")
        start = re.search(r"INITED cov: (\d+)", done.stderr)
        figures[target] = {"runs": int(runs), "edges": int(lines)}
        figures[target]["edges of the seeds"] = int(start[1]) if start else 0
        print(target, json.dumps(figures[target]), "ok" if done.returncode == 0 else "FAULT")
        if done.returncode != 0:
            failed.append(target)
            print(done.stderr[-4000:])
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
