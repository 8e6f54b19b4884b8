"""``generate.py --input rows.jsonl --output out.jsonl``: generates for all rows of a file."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path

from jaxllm import load
from jaxllm.batch import BatchGenerator
from jaxllm.batch.job.job import Input, Job
from jaxllm.batch.job.journal import is_finished
from jaxllm.checkpoint import bundled
from jaxllm.cli.batch_progress import BatchProgress
from jaxllm.cli.devices import leads, own_mesh
from jaxllm.cli.field_flags import given_fields
from jaxllm.cli.progress import Reporter
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.errors import InputError, RunError, UnsupportedError
from jaxllm.parallel.processes import together

DEFAULT_NEW_TOKENS = 256
_ONE_PROMPT = ("text", "prompt", "input_ids", "assistant_model")
_BATCH = ("output", "resume", "slots", "memory")


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Adds ``--input`` and the other batch options."""
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
    """Raises InputError if options of single prompts and of batches are mixed."""
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
    """Runs the batch command. The exit code is 0 even if some rows have errors; they are reported.

    Several processes share the rows. Steps that may fail in one process before the first row run
    under `together`, so that the others fail as well instead of waiting.
    """
    mesh = together(lambda: own_mesh(arguments), RunError)
    path = bundled.smollm2() if arguments.model is None else arguments.model
    seed = 0 if arguments.seed is None else arguments.seed
    fields, resume = given_fields(arguments), bool(arguments.resume)
    output = arguments.output
    settings = {
        "--model": str(Path(path).resolve() if Path(path).exists() else path),
        "--dtype": arguments.dtype,
        "--param-dtype": arguments.param_dtype,
        "--seed": seed,
        "--chat": arguments.chat,
        "--system": arguments.system,
        **{"--" + name.replace("_", "-"): value for name, value in sorted(fields.items())},
    }

    def check() -> tuple[Input, bool]:
        source = Input.read(arguments.input)
        if not source.lines:
            raise InputError(f"{arguments.input}: has no rows")
        return source, is_finished(output, {**settings, **source.settings}, resume=resume)

    def load_engine() -> BatchGenerator:
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
            seed=seed,
            chat=arguments.chat,
            system=arguments.system,
            default_new_tokens=DEFAULT_NEW_TOKENS,
            announce=lambda prediction: reporter.say(str(prediction)),
            **fields,
        )

    source, finished = together(check, RunError)  # before loading, which takes minutes
    if finished:
        reporter.say(f"{output} is finished; there is nothing to resume")
        return 0
    with contextlib.closing(CompileClock()) as clock:
        engine = together(load_engine, RunError)
        job = Job(engine, source, output, settings, resume=resume)
        try:
            with BatchProgress(reporter, job, clock) as progress:
                for _ in job.run(clock):
                    progress.update()
        except KeyboardInterrupt:
            reporter.say(f"stopped; go on with --resume (finished rows are in {job.journal_path})")
            raise
    if leads():
        reporter.table(job.report.table())
        reporter.say(f"{output}, {job.report_path}")
    return 0
