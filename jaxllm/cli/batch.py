"""``generate.py --input rows.jsonl --output out.jsonl``: answers all rows of a file."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxllm import load
from jaxllm.batch import BatchGenerator
from jaxllm.batch.job.job import Input, Job
from jaxllm.batch.job.journal import is_finished
from jaxllm.checkpoint import bundled
from jaxllm.cli.batch_progress import BatchProgress
from jaxllm.cli.devices import is_main_process, local_mesh
from jaxllm.cli.field_flags import generation_fields
from jaxllm.cli.progress import Reporter
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import InputError, RunError, UnsupportedError
from jaxllm.parallel.processes import together

DEFAULT_NEW_TOKENS = 256
_ONE_PROMPT = ("text", "prompt", "input_ids", "assistant_model")
_BATCH = ("output", "resume", "slots", "memory")


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
    group.add_argument("--slots", type=int, help="rows that are decoded side by side, at most")
    group.add_argument("--memory", help="bytes to use in all, such as 12GB")


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises InputError where options of one prompt and of many are mixed."""
    if arguments.input is None:
        for name in _BATCH:
            if getattr(arguments, name) is not None:
                raise InputError(f"--{name} has no effect without --input")
        return
    for name in _ONE_PROMPT:
        if getattr(arguments, name) is not None:
            shown = "PROMPT" if name == "text" else "--" + name.replace("_", "-")
            raise InputError(f"{shown}: not together with --input")
    if arguments.output is None:
        raise InputError("--output: --input needs a file for the results")
    if arguments.show_special_tokens:
        raise InputError("--show-special-tokens: not together with --input; output_ids has them")


def run_batch(arguments: argparse.Namespace, reporter: Reporter) -> int:
    """Runs the command; the exit code is 0 although some rows may have errors, which are reported.

    Several processes share the rows. Steps that may fail in one of them before it answers any are
    done `together`, so that none waits for it.
    """
    mesh = together(lambda: local_mesh(arguments), RunError)
    output, resume = arguments.output, bool(arguments.resume)
    settings = job_settings(arguments)

    def check() -> tuple[Input, bool]:
        source = Input.read(arguments.input)
        if not source.lines:
            raise InputError(f"{arguments.input}: has no rows")
        return source, is_finished(output, {**settings, **source.settings}, resume=resume)

    source, finished = together(check, RunError)  # now, not after minutes of loading
    if finished:
        reporter.say(f"{output} is finished; there is nothing to resume")
        return 0
    with contextlib.closing(CompileClock()) as clock:
        engine = together(lambda: load_engine(arguments, mesh, reporter), RunError)
        job = Job(engine, source, output, settings, resume=resume)
        try:
            with BatchProgress(reporter, job, clock) as progress:
                for _ in job.run(clock):
                    progress.update()
        except KeyboardInterrupt:
            reporter.say(f"stopped; go on with --resume (finished rows are in {job.journal_path})")
            raise
    if is_main_process():
        reporter.table(job.report.table())
        reporter.say(f"{output}, {job.report_path}")
    return 0


def job_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """All options that results depend on; a resumed job must have the same."""
    path = model_path(arguments)
    fields = sorted(generation_fields(arguments).items())
    return {
        "--model": str(Path(path).resolve() if Path(path).exists() else path),
        "--dtype": arguments.dtype,
        "--param-dtype": arguments.param_dtype,
        "--seed": arguments.seed or 0,
        "--chat": arguments.chat,
        "--system": arguments.system,
        **{"--" + name.replace("_", "-"): value for name, value in fields},
    }


def load_engine(
    arguments: argparse.Namespace, mesh: Mesh | None, reporter: Reporter
) -> BatchGenerator:
    """Loads the model and makes its engine."""
    path = model_path(arguments)
    with reporter.phase(f"loading {Path(path).resolve().name}") as update:
        model, tokenizer = load(
            path,
            dtype=arguments.dtype,
            param_dtype=arguments.param_dtype,
            allow_nonfinite=arguments.allow_nonfinite,
            mesh=mesh,
            progress=update,
        )
    if not hasattr(model, "decode"):
        raise UnsupportedError(f"{path}: a {type(model).__name__} generates no text")
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


def model_path(arguments: argparse.Namespace) -> str | Path:
    """The model that was named, or the bundled one."""
    return bundled.smollm2() if arguments.model is None else arguments.model
