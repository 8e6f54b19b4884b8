"""``generate.py --input rows.jsonl --output out.jsonl``: answers all rows of a file."""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from pathlib import Path
from typing import Any, Self

import jax
from jax.sharding import Mesh
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from jaxllm.batch import BatchGenerator
from jaxllm.batch.job.job import InputFile, Job
from jaxllm.batch.job.job_files import check_output, read_json_file, report_file
from jaxllm.checkpoint.file_digests import checkpoint_digests
from jaxllm.checkpoint.hub import resolve
from jaxllm.cli import signals
from jaxllm.cli.devices import is_main_process, local_mesh
from jaxllm.cli.field_flags import generation_fields
from jaxllm.cli.model_flags import load_named, model_path
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import InputError, RunError, UnsupportedError
from jaxllm.common.progress import Reporter
from jaxllm.generation.settings.lengths import DEFAULT_NEW_TOKENS
from jaxllm.parallel.processes import together

NO_SUCCESS = 1
"""Exit code of a job in which no row succeeded."""
PLAIN_SECONDS = 30.0
"""Seconds between two lines of progress where there is no terminal."""
_ONE_PROMPT = ("text", "prompt", "input_ids", "assistant_model")
_BATCH = ("output", "resume", "slots", "memory", "whole_digest")


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--input`` and the other options of batches."""
    group = parser.add_argument_group("many prompts")
    group.add_argument(
        "--input",
        type=Path,
        metavar="ROWS",
        help="JSONL: a prompt, messages or input_ids a line, perhaps an id, a seed and fields",
    )
    group.add_argument("--output", type=Path, help="JSONL: a result a line, in the same order")
    group.add_argument(
        "--resume", action="store_true", default=None, help="go on with a job that was stopped"
    )
    group.add_argument("--slots", type=int, help="maximum number of rows that are decoded at once")
    group.add_argument("--memory", help="bytes to use in all, such as 12GB")
    group.add_argument(
        "--whole-digest",
        action="store_true",
        default=None,
        help="for --resume: compare all bytes of the weights, not samples of them",
    )


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises InputError where options of one prompt and of many are mixed."""
    if arguments.input is None:
        for name in _BATCH:
            if getattr(arguments, name) is not None:
                flag = "--" + name.replace("_", "-")
                raise InputError(f"{flag} has no effect without --input")
        return
    for name in _ONE_PROMPT:
        if getattr(arguments, name) is not None:
            shown = "PROMPT" if name == "text" else "--" + name.replace("_", "-")
            raise InputError(f"{shown}: not together with --input")
    if arguments.output is None:
        raise InputError("--output: --input needs a file for the results")
    for name in ("input", "output"):
        if str(getattr(arguments, name)) == "-":
            raise InputError(
                f"--{name} -: a batch reads and writes files, so that it can be resumed; give a "
                "file (such as rows.jsonl)"
            )
    if arguments.show_special_tokens:
        raise InputError("--show-special-tokens: not together with --input; output_ids has them")


def run_batch(arguments: argparse.Namespace, reporter: Reporter) -> int:
    """Runs the command.

    Several processes share the rows. Steps that may fail in one of them before it answers any are
    done `together`, so that none waits for it.

    Returns:
        The exit code: 1 if no row succeeded, else 0, although some rows may have errors.
    """
    mesh = together(lambda: local_mesh(arguments), RunError)
    output, resume = arguments.output, bool(arguments.resume)

    def check() -> tuple[InputFile, dict[str, Any], bool]:
        source = InputFile.read(arguments.input)
        source.check_rows()
        identity = job_identity(arguments)
        whole = {**identity, **source.identity}
        finished = check_output(output, whole, resume=resume, process=jax.process_index())
        return source, identity, finished

    # Now, not after minutes of loading.
    source, identity, finished = together(check, RunError)
    if finished:
        reporter.say(f"{output} is finished; there is nothing to resume")
        report = read_json_file(report_file(output))
        return exit_code(report["rows"] - sum(report["errors"].values()), reporter)
    with contextlib.closing(CompileClock()) as clock:
        engine = together(lambda: load_engine(arguments, mesh, reporter), RunError)
        job = Job(engine, source, output, identity, resume=resume)
        stop, number = signals.stop_after("row", quiet=arguments.quiet), None
        rows = contextlib.closing(job.run(clock))
        with BatchProgress(reporter, job, clock) as progress, rows as outputs:
            for _ in outputs:
                progress.update()
                if (number := stop()) is not None:
                    break
    if number is not None:
        reporter.say(f"stopped; go on with --resume (finished rows are in {job.journal_path})")
        return 128 + number
    if not is_main_process():
        return 0
    reporter.table(job.report.table())
    reporter.say(f"{output}, {job.report_path}")
    return exit_code(job.report.successes, reporter)


def exit_code(successes: int, reporter: Reporter) -> int:
    if successes:
        return 0
    reporter.say("no row succeeded: each line of the output has its `error`")
    return NO_SUCCESS


def job_identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """All that results depend on besides the input; a resumed job must have the same."""
    path = model_path(arguments)
    fields = sorted(generation_fields(arguments).items())
    return {
        "--model": str(Path(path).resolve() if Path(path).exists() else path),
        "--dtype": arguments.dtype,
        "--param-dtype": arguments.param_dtype,
        "--seed": arguments.seed or 0,
        "--chat": arguments.chat,
        "--system": arguments.system,
        **({"--architecture": arguments.architecture} if arguments.architecture else {}),
        **({"--config": dict(arguments.config)} if arguments.config else {}),
        **{"--" + name.replace("_", "-"): value for name, value in fields},
        "--whole-digest": bool(arguments.whole_digest),
        **checkpoint_digests(resolve(path), whole=bool(arguments.whole_digest)),
    }


def load_engine(
    arguments: argparse.Namespace, mesh: Mesh | None, reporter: Reporter
) -> BatchGenerator:
    """Loads the model and makes its engine."""
    model, tokenizer = load_named(arguments, mesh, reporter)
    if not hasattr(model, "decode"):
        name = model_path(arguments)
        raise UnsupportedError(f"{name}: a {type(model).__name__} generates no text")
    return BatchGenerator(
        model,
        tokenizer,
        slots=arguments.slots,
        memory=arguments.memory,
        seed=arguments.seed or 0,
        chat=arguments.chat,
        system=arguments.system,
        default_new_tokens=DEFAULT_NEW_TOKENS,
        announce=lambda prediction: reporter.say(str(prediction)),
        **generation_fields(arguments),
    )


class BatchProgress:
    """Progress of a job: a bar on a terminal, a plain line every half minute elsewhere.

    A context manager. What it shows is true while a program is compiled, too: the bar and the
    lines are updated by a thread, not by finished rows.
    """

    def __init__(self, reporter: Reporter, job: Job, clock: CompileClock) -> None:
        self._reporter, self._job, self._clock = reporter, job, clock
        self._is_terminal = reporter.console.is_terminal
        self._bar = Progress(
            _StatusColumn(self),
            BarColumn(),
            TextColumn("{task.completed}/{task.total} rows"),
            TimeElapsedColumn(),
            console=reporter.console,
            transient=True,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task("", total=len(job.source.lines))
        self._start = time.monotonic()
        self._earlier_compile_seconds = clock.seconds
        self._of_process = f" of process 0 of {job.processes}" if job.processes > 1 else ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._say_lines, daemon=True)

    def __enter__(self) -> Self:
        self._bar.__enter__()
        if not self._is_terminal:
            self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()
        self._bar.stop()

    def update(self) -> None:
        """Counts a finished row."""
        done, total = self._rows()
        self._bar.update(self._task, completed=done, total=total)
        if self._of_process and done == total:
            self._reporter.say("process 0 has answered its rows; waiting for the others")

    def _rows(self) -> tuple[int, int]:
        job = self._job
        return job.resumed + job.engine.counts.rows, job.resumed + job.share

    def _say_lines(self) -> None:
        while not self._stopped.wait(PLAIN_SECONDS):
            done, total = self._rows()
            self._reporter.say(f"{done} of {total} rows{self._of_process}, {self.status()}")

    def status(self) -> str:
        """Speeds and remaining time, compilation and rows with errors excluded."""
        counts = self._job.engine.counts
        compile_seconds = self._clock.seconds_so_far - self._earlier_compile_seconds
        compiling = f"compiling {compile_seconds:.1f} s"
        errors = counts.errors.total()
        rows = counts.rows - errors
        parts = [compiling] if self._clock.started is not None else []
        if rows:
            seconds = max(time.monotonic() - self._start - compile_seconds, 1e-9)
            parts += [
                f"{rows / seconds:.1f} rows/s, {counts.prompt_tokens / seconds:.0f} prompt and "
                f"{counts.new_tokens / seconds:.0f} new tokens/s",
                *([] if parts else [compiling]),
                f"{left(seconds, counts.new_token_limit_done, counts.new_token_limit)} left",
            ]
        elif not parts:
            parts = ["decoding" if counts.program_calls else "preparing", compiling]
        if errors:
            parts.append(f"{errors} errors")
        return ", ".join(parts)


class _StatusColumn(ProgressColumn):
    """The status, rendered whenever the bar is drawn."""

    def __init__(self, progress: BatchProgress) -> None:
        super().__init__()
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.status())


def left(seconds: float, tokens_done: int, tokens: int) -> str:
    """Estimates the remaining time, assuming that rows end as early before their limits as so far.

    >>> left(60.0, 100, 400), left(60.0, 0, 400)
    ('3:00', '?')
    """
    if not tokens_done:
        return "?"
    rest = round(seconds * (tokens - tokens_done) / tokens_done)
    hours, minutes = divmod(rest // 60, 60)
    return f"{hours}:{minutes:02}:{rest % 60:02}" if hours else f"{minutes}:{rest % 60:02}"
