"""Runs the default tests on copies of the package with one seeded fault each.

Every patch in this folder is one plausible mistake in the package. The default tests have to catch
all of them; see README.md.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
TESTS_OF = {"loading": "checkpoint", "saving": "checkpoint", "pipeline_tasks": "test_pipelines.py"}
"""Tests of modules at the top of the package that have no test file of their own name."""
NO_TESTS = 5
"""Exit status of pytest if no test was selected."""


@dataclass(frozen=True)
class Fault:
    """One patch of this folder."""

    patch: Path
    description: str
    touched: tuple[str, ...]
    """Files that the patch changes, relative to the repository."""

    @property
    def name(self) -> str:
        return self.patch.stem

    @staticmethod
    def read(patch: Path) -> Fault:
        lines = patch.read_text().splitlines()
        notes = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
        touched = [line.removeprefix("+++ b/") for line in lines if line.startswith("+++ b/")]
        return Fault(patch, " ".join(notes), tuple(touched))


@dataclass(frozen=True)
class Result:
    """What became of one fault."""

    name: str
    description: str
    outcome: str
    """"caught", "NOT caught", "patch does not apply", "collection error", "timeout" or "broken"
    (pytest itself failed)."""
    test: str = ""
    """The failing test, or what went wrong."""
    stage: str = ""
    """The tests that ran last."""
    seconds: float = 0.0

    def line(self) -> str:
        parts = (f"{self.name:<44}", f"{self.outcome:<20}", f"{self.seconds:7.1f} s", self.test)
        return "  ".join(parts).rstrip()


def patches(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, of which the beginning is enough; all if there are none."""
    faults = [Fault.read(path) for path in sorted(FOLDER.glob("*.patch"))]
    if not names:
        return faults
    wanted = [Path(name).name.removesuffix(".patch") for name in names]
    unknown = [name for name in wanted if not any(f.name.startswith(name) for f in faults)]
    if unknown:
        raise SystemExit(f"no such patch: {', '.join(unknown)}; see {FOLDER}")
    return [fault for fault in faults if fault.name.startswith(tuple(wanted))]


def tests_of(path: str, tests: Path) -> list[str]:
    """Tests of a file of the package, the nearest first: those of its own folder, then those of the
    whole subpackage. Both are relative to `tests`; empty if the package has none there.

    `jaxllm/batch/job/journal.py` has batch/job and batch, `jaxllm/pipelines.py` test_pipelines.py.
    """
    package, *parents = PurePosixPath(path).with_suffix("").parts[1:]
    nearest = PurePosixPath(package, *parents[:-1])
    names = [str(nearest), package, f"test_{package}.py", TESTS_OF.get(package, "")]
    found = [name for name in dict.fromkeys(names) if name and (tests / name).exists()]
    return found[:2]


def stages_of(fault: Fault, copy: Path, *, package_only: bool) -> list[list[str]]:
    """Arguments of the pytest runs that look for a fault, one after the other."""
    own = dict.fromkeys(name for path in fault.touched for name in tests_of(path, copy / "tests"))
    stages, seen = [], []
    for name in own:
        stages.append([f"tests/{name}", *ignored(seen)])
        seen.append(f"tests/{name}")
    return stages if package_only else [*stages, ["tests", *ignored(seen)]]


def ignored(paths: Iterable[str]) -> list[str]:
    """Options that leave out these tests, and the check of the patches, which a patch fails."""
    return [f"--ignore={path}" for path in ("tests/seeded_faults", *paths)]


def copy_checkout(copy: Path) -> None:
    """Copies the tracked files of the working tree, with changes that are not committed."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        source = ROOT / name
        if source.is_symlink() or source.is_file():  # others are deleted
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, copy / name, follow_symlinks=False)


def git_environment(copy: Path) -> dict[str, str]:
    """An environment in which git sees no repository around a folder: it would apply patches to
    that, or leave out files beyond it."""
    return {**os.environ, "GIT_CEILING_DIRECTORIES": str(copy.parent)}


def apply(fault: Fault, copy: Path) -> str:
    """Applies a patch; returns what git says against it, or nothing."""
    command = ["git", "apply", str(fault.patch)]
    env = git_environment(copy)
    done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, check=False)
    forget_bytecode(fault, copy)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())


def restore(fault: Fault, copy: Path) -> None:
    """Puts the files of a patch back."""
    for name in fault.touched:
        shutil.copy2(ROOT / name, copy / name)
    forget_bytecode(fault, copy)


def forget_bytecode(fault: Fault, copy: Path) -> None:
    """Removes the bytecode of the files: Python goes by size and second of the last change."""
    for name in fault.touched:
        if name.endswith(".py"):
            Path(importlib.util.cache_from_source(copy / name)).unlink(missing_ok=True)


@dataclass(frozen=True)
class Tester:
    """Runs tests of a copy of the checkout.

    Attributes:
        work: folder for the copy and temporary files.
        cache: pytest's cache, which holds the compiled programs of all runs.
        jobs: worker processes; 1: none beside pytest's own.
        timeout: seconds of one run.
    """

    work: Path
    cache: Path
    jobs: int
    timeout: float

    @property
    def copy(self) -> Path:
        return self.work / "copy"

    @property
    def environment(self) -> Mapping[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.copy)}

    def check_import(self) -> None:
        """Ends the program unless the copy of the package is the one that tests import."""
        code = "import importlib.util as u; print(u.find_spec('jaxllm').origin)"
        # In another folder than the copy's: processes that tests start are there, too.
        command = [sys.executable, "-c", code]
        origin = subprocess.check_output(command, cwd=self.work, env=self.environment, text=True)
        if not Path(origin.strip()).is_relative_to(self.copy):
            raise SystemExit(f"tests would import {origin.strip()} instead of the copy")

    def run(self, arguments: Sequence[str]) -> tuple[str, str]:
        """Runs pytest up to the first failure.

        Returns:
            "passed" or one of the outcomes of `Result`, and the failing test or the reason.
        """
        report = self.work / "report.xml"
        report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *arguments, "-x", "-q", "--no-header"]
        command += ["-o", f"cache_dir={self.cache}", f"--basetemp={self.work / 'tmp'}"]
        command += [f"--junitxml={report}", "-o", "junit_family=xunit1"]
        if self.jobs > 1:
            command += ["-n", str(self.jobs), "--dist", "worksteal"]
        with (self.work / "output.txt").open("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=self.copy,
                env=self.environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                return "timeout", f"no result within {self.timeout:g} seconds"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if status in (0, NO_TESTS):
                return "passed", ""
            failed, uncollected = failures(report)
            if uncollected:
                return "collection error", uncollected[0]
            if failed:
                return "caught", failed[0]
            output.seek(0)
            last = output.read().strip().splitlines()[-1:]
            return "broken", f"exit status {status}: {' '.join(last)}"


def failures(report: Path) -> tuple[list[str], list[str]]:
    """Names of the tests that failed, and of the modules that could not be collected."""
    failed: list[str] = []
    uncollected: list[str] = []
    if not report.exists():
        return failed, uncollected
    for case in ElementTree.parse(report).iter("testcase"):
        problem = case.find("failure")
        problem = case.find("error") if problem is None else problem
        if problem is None:
            continue
        if problem.get("message") == "collection failure":
            uncollected.append(case.get("name", ""))
        else:
            failed.append(f"{case.get('file', case.get('classname'))}::{case.get('name')}")
    return failed, uncollected


def look_for(fault: Fault, tester: Tester, *, package_only: bool) -> Result:
    """Applies a patch, runs the tests until one fails, and takes the patch back."""
    start = time.perf_counter()

    def result(outcome: str, test: str = "", stage: str = "") -> Result:
        seconds = round(time.perf_counter() - start, 1)
        return Result(fault.name, fault.description, outcome, test, stage, seconds)

    if problem := apply(fault, tester.copy):
        return result("patch does not apply", f"{problem}; port it to the present code")
    arguments: list[str] = []
    try:
        for arguments in stages_of(fault, tester.copy, package_only=package_only):
            outcome, test = tester.run(arguments)
            if outcome != "passed":
                return result(outcome, test, arguments[0])
        return result("NOT caught", stage=arguments[0] if arguments else "no tests")
    finally:
        restore(fault, tester.copy)


def baseline(faults: Sequence[Fault], tester: Tester, *, package_only: bool) -> None:
    """Runs the tests without a fault, which also compiles the programs; ends the program if they do
    not pass, since they would then catch everything."""
    stages = [["tests", *ignored(())]]
    if package_only:
        paths = [path for fault in faults for path in fault.touched]
        own = dict.fromkeys(n for path in paths for n in tests_of(path, tester.copy / "tests"))
        stages = [[*(f"tests/{name}" for name in own), *ignored(())]]
    start = time.perf_counter()
    for arguments in stages:
        outcome, test = tester.run(arguments)
        if outcome != "passed":
            reason = "fails" if outcome == "caught" else outcome
            raise SystemExit(f"without any fault: {reason}: {test}; repair that first")
    print(f"without any fault: passed  {time.perf_counter() - start:.1f} s", flush=True)


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add: Any = parser.add_argument
    add("names", nargs="*", help="patches, or the beginning of their names; default: all")
    add("--package-only", action="store_true", help="only the tests of the touched package")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes (%(default)s)")
    add("--out", type=Path, metavar="FILE", help="write the results as JSON")
    add("--timeout", type=float, default=3600, help="seconds of one pytest run (%(default)s)")
    add("--no-baseline", action="store_true", help="do not run the tests without a fault first")
    add("--cache", type=Path, help="folder of pytest's cache (in the checkout's .pytest_cache)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    options = parsed(argv)
    faults = patches(options.names)
    cache = options.cache or ROOT / ".pytest_cache" / "seeded_faults"
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="seeded-faults-") as folder:
        work = Path(folder).resolve()
        tester = Tester(work, cache.resolve(), options.jobs, options.timeout)
        copy_checkout(tester.copy)
        tester.check_import()
        if not options.no_baseline:
            baseline(faults, tester, package_only=options.package_only)
        for fault in faults:
            results.append(look_for(fault, tester, package_only=options.package_only))
            print(results[-1].line(), flush=True)
            if options.out is not None:
                content = [asdict(result) for result in results]
                options.out.write_text(json.dumps(content, indent=2) + "\n")
    caught = sum(result.outcome == "caught" for result in results)
    print(f"{caught} of {len(results)} faults caught")
    return int(caught < len(results))


if __name__ == "__main__":
    sys.exit(main())
