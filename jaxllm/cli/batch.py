"""``generate.py --input rows.jsonl --output out.jsonl``: answers all rows of a file."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.batch.job.file_digests import checkpoint_digests
from jaxllm.batch.job.inputs import Source, read_source
from jaxllm.batch.job.inputs.openai_requests import OpenAIRequests
from jaxllm.batch.job.job import Job, RowEngine
from jaxllm.batch.job.job_files import (
    ENVIRONMENT,
    check_output,
    read_json_file,
    report_file,
    started_elsewhere,
)
from jaxllm.batch.job.outputs import output_writer
from jaxllm.batch.job.streamed_job import StreamedJob
from jaxllm.checkpoint.hub import resolve
from jaxllm.cli import signals
from jaxllm.cli.batch_engines import check_task, column_choice, constraint, load_engine
from jaxllm.cli.batch_flags import STREAM
from jaxllm.cli.batch_progress import BatchProgress
from jaxllm.cli.batch_ray import actor_platform, ray_engine
from jaxllm.cli.devices import local_mesh
from jaxllm.cli.field_flags import generation_fields
from jaxllm.cli.model_flags import model_options, model_path
from jaxllm.cli.ray_flags import RAY
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.progress import Reporter
from jaxllm.parallel.environment import devices, jax_settings, versions

NO_SUCCESS = 1
"""Exit code of a job in which no row succeeded."""


def run_batch(arguments: argparse.Namespace, reporter: Reporter) -> int:
    """Runs the command.

    Returns:
        The exit code: 1 if no row succeeded, else 0, although some rows may have errors.
    """
    # Now, not after minutes of loading. With Ray the devices are for its actors.
    mesh = None if arguments.engine == RAY else local_mesh(arguments)
    source, identity, finished = checked_job(arguments)
    if finished:
        reporter.say(f"{arguments.output} is finished; there is nothing to resume")
        report = read_json_file(report_file(Path(arguments.output)))
        return exit_code(report["rows"] - sum(report["errors"].values()))
    for remark in remarks(arguments, source, identity):
        reporter.say(remark)
    with contextlib.closing(CompileClock()) as clock:
        engine = row_engine(arguments, source, mesh, clock, reporter, identity["--dtype"])
        job: Job | StreamedJob
        if arguments.output == STREAM:
            job = StreamedJob(engine, source, sys.stdout.buffer)
        else:
            output = Path(arguments.output)
            job = Job(engine, source, output, identity, resume=bool(arguments.resume))
        stop, number = signals.stop_after("row", quiet=arguments.quiet), None
        rows = contextlib.closing(job.run(clock))
        with BatchProgress(reporter, job, clock) as progress, rows as outputs:
            for _ in outputs:
                progress.update()
                if (number := stop()) is not None:
                    break
    if number is not None:
        if isinstance(job, Job):
            reporter.say(f"stopped; go on with --resume (finished rows are in {job.journal_path})")
        return 128 + number
    reporter.table(job.report.table())
    if isinstance(job, Job):
        reporter.say(f"{job.output}, {job.report_path}")
    return exit_code(job.report.successes)


def checked_job(arguments: argparse.Namespace) -> tuple[Source, dict[str, Any], bool]:
    """The rows, the job's identity, and whether an earlier run has finished it.

    Raises:
        JaxLLMError: the input or the output is wrong, or of another job.
    """
    source = read_source(
        arguments.input,
        column_choice(arguments),
        dataset_name=arguments.dataset_name,
        split=arguments.split,
    )
    check_task(arguments, source)
    source.check_rows()
    platform = actor_platform(arguments) if arguments.engine == RAY else jax.default_backend()
    identity = job_identity(arguments, platform)
    if arguments.output == STREAM:
        return source, identity, False
    output, whole = Path(arguments.output), {**identity, **source.identity}
    output_writer(output)
    return source, identity, check_output(output, whole, resume=bool(arguments.resume))


def remarks(
    arguments: argparse.Namespace, source: Source, identity: Mapping[str, Any]
) -> list[str]:
    """Remarks on the input, and on an environment that is not the one in which a job began."""
    elsewhere = None
    if arguments.output != STREAM:
        elsewhere = started_elsewhere(Path(arguments.output), identity)
    return source.remarks() + ([] if elsewhere is None else [f"{arguments.output} {elsewhere}"])


def row_engine(
    arguments: argparse.Namespace,
    source: Source,
    mesh: Mesh | None,
    clock: CompileClock,
    reporter: Reporter,
    dtype: str,
) -> RowEngine:
    """What answers the rows: a model that is loaded here, or actors of a Ray cluster.

    Args:
        dtype: compute dtype of all actors, whatever their devices are.
    """
    if arguments.engine == RAY:
        return ray_engine(arguments, source, clock, dtype)
    are_requests = isinstance(source, OpenAIRequests)
    return load_engine(arguments, constraint(arguments), are_requests, mesh, reporter)()


def exit_code(successes: int) -> int:
    """The exit code; an error is said even with ``--quiet``."""
    if successes:
        return 0
    Reporter().say("no row succeeded: the output has the `error` of each")
    return NO_SUCCESS


def job_identity(arguments: argparse.Namespace, platform: str) -> dict[str, Any]:
    """All that results depend on besides the input; a resumed job must have the same.

    Args:
        platform: of the devices that answer the rows.
    """
    path = model_path(arguments)
    task = {name: getattr(arguments, name) for name in ("context", "score", "embed")}
    task = {name: value for name, value in task.items() if value}
    task |= constraint(arguments)  # an empty schema is one too: any JSON value
    fields = sorted(generation_fields(arguments).items())
    return {
        "--model": str(Path(path).resolve() if Path(path).exists() else path),
        **model_options(arguments, platform),
        "--seed": arguments.seed or 0,
        "--chat": arguments.chat,
        "--system": arguments.system,
        **{f"--{name}": value for name, value in task.items()},
        **{"--" + name.replace("_", "-"): value for name, value in fields},
        "--whole-digest": bool(arguments.whole_digest),
        **checkpoint_digests(resolve(path), whole=bool(arguments.whole_digest)),
        **jax_settings(),
        ENVIRONMENT: versions() | ({} if arguments.engine == RAY else devices()),
    }
