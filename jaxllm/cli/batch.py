"""``generate.py --input rows.jsonl --output out.jsonl``: answers all rows of a file.

The engine is a model that is loaded here, or actors of a Ray cluster (``--engine ray``).
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxllm.batch import BatchGenerator
from jaxllm.batch.constraints import CONSTRAINT_KEYS, constraint_source, only_one
from jaxllm.batch.generator import RowPlan
from jaxllm.batch.job.identity import ENVIRONMENT, checkpoint_digests
from jaxllm.batch.job.job import Job, RowEngine, StreamedJob, explained
from jaxllm.batch.job.journal import check_output, check_paths, started_elsewhere
from jaxllm.batch.job.ray_actors import RayEngine
from jaxllm.batch.memory import Prediction
from jaxllm.batch.row_tasks import (
    EMBED_KEYS,
    EMBED_RESULTS,
    SCORE_KEYS,
    SCORE_RESULTS,
    RowEmbedder,
    RowScorer,
)
from jaxllm.batch.rows import BatchOutput
from jaxllm.batch.tables import ColumnChoice, Source, read_source
from jaxllm.batch.tables.columns import generation_keys, row_template
from jaxllm.batch.tables.read import RESULTS
from jaxllm.batch.tables.source import OpenAIRequests, has_types, output_writer
from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.load import choose_dtypes, compute_dtype_of, open_checkpoint
from jaxllm.cli.batch_progress import BatchProgress
from jaxllm.cli.devices import DEFAULT_RESOURCES, RAY, local_mesh
from jaxllm.cli.options import (
    STREAM,
    check_model_flags,
    generation_fields,
    load_named,
    model_options,
)
from jaxllm.cli.process import reject, signals
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError, shortened
from jaxllm.common.progress import Reporter, duration
from jaxllm.generation.processors.grammar import llguidance
from jaxllm.generation.settings.resolve import DEFAULT_NEW_TOKENS, target_settings
from jaxllm.loading import read_generation_config, tokenizer_of, with_settings
from jaxllm.models.decoder import checked_generative
from jaxllm.models.joined import arranged_for_inference
from jaxllm.models.quantize import KEEP
from jaxllm.parallel.environment import devices, jax_settings, versions
from jaxllm.serve.http.batch_requests import BatchRequests
from jaxllm.tokenizers.settings import LANGUAGES

CUTS = ("truncation", "max_source_length")
"""Options that cut long texts."""
NO_SUCCESS = 1
"""Exit code of a job in which no row succeeded."""
CALIBRATION_SECONDS = 10.0
"""Seconds of decoding by which the time of a job is estimated; compiling comes on top."""
SHOWN_ERRORS = 10
SHOWN_CHARACTERS = 2000
"""Of the first prompt."""
BAR = 40
"""Characters of the longest bar of a histogram."""


def run_batch(arguments: argparse.Namespace, reporter: Reporter) -> int:
    """Runs the command.

    Returns:
        The exit code: 1 if no row succeeded, else 0, although some rows may have errors.
    """
    # Now, not after minutes of loading. With Ray the devices are for its actors.
    mesh = None if arguments.engine == RAY else local_mesh(arguments)
    if arguments.dry_run:
        return dry_run(arguments, mesh, reporter)
    source, identity, finished = checked_job(arguments)
    if finished:
        reporter.say(f"{arguments.output} is finished; there is nothing to resume")
        return 0
    for remark in source.remarks():
        reporter.say(remark)
    on_disk = arguments.output != STREAM
    if on_disk and (elsewhere := started_elsewhere(Path(arguments.output), identity)):
        reporter.say(f"{arguments.output} {elsewhere}")
    with contextlib.closing(CompileClock()) as clock:
        engine: RowEngine
        if arguments.engine == RAY:
            engine = ray_engine(arguments, source, clock, identity["--dtype"])
        else:
            are_requests = isinstance(source, OpenAIRequests)
            engine = load_engine(arguments, constraint(arguments), are_requests, mesh, reporter)()
        job: Job | StreamedJob
        if arguments.output == STREAM:
            job = StreamedJob(engine, source, sys.stdout.buffer)
        else:
            output = Path(arguments.output)
            job = Job(engine, source, output, identity, **resume_options(arguments))
        stop, number = signals.stop_after("row", quiet=arguments.quiet), None
        rows = contextlib.closing(job.run(clock))
        with BatchProgress(reporter, job, clock) as progress, rows as outputs:
            for _ in outputs:
                progress.update()
                if (number := stop()) is not None:
                    break
    if number is not None:
        if isinstance(job, Job):
            kept = job.resumed + job.engine.counts.rows
            again = arguments.command + ("" if arguments.resume else " --resume")
            reporter.say(f"stopped: {kept:,} of {len(source):,} rows are kept; continue with")
            reporter.say(again)
        return 128 + number
    report = job.report
    reporter.table(report.table())
    for line in explained(report.errors, report.first_errors):
        reporter.say(line)
    if not report.successes:  # said even with --quiet
        where = job.errors_path if isinstance(job, Job) else "the output"
        Reporter().say(f"no row succeeded: {where} has the error of each")
        return NO_SUCCESS
    if isinstance(job, Job):
        if report.errors:
            reporter.say(
                f"rows with errors and their inputs: {job.errors_path}; try them again with "
                "--retry-errors"
            )
        reporter.say(f"{job.output}, {job.report_path}")
    return 0


def checked_job(arguments: argparse.Namespace) -> tuple[Source, dict[str, Any], bool]:
    """The rows, the job's identity, and whether an earlier run has finished it.

    Raises:
        JaxLLMError: the input or the output is wrong, or of another job.
    """
    source = checked_source(arguments)
    identity = job_identity(arguments, chosen_platform(arguments))
    if arguments.output == STREAM:
        return source, identity, False
    output, whole = Path(arguments.output), {**identity, **source.identity}
    output_writer(output)
    return source, identity, check_output(output, whole, **resume_options(arguments))


def checked_source(arguments: argparse.Namespace) -> Source:
    """The rows of a job."""
    source = read_source(
        arguments.input,
        column_choice(arguments),
        dataset_name=arguments.dataset_name,
        split=arguments.split,
        delimiter=arguments.delimiter,
        keeps_types=has_types(arguments.output and Path(arguments.output)),
        results=SCORE_RESULTS if arguments.score else EMBED_RESULTS if arguments.embed else RESULTS,
    )
    check_task(arguments, source)
    columns = {"tgt_lang", "input_ids", "forced_bos_token_id", "decoder_start_token_id"}
    arguments.rows_name_languages = bool(columns.intersection(source.table.column_names()))
    source.check_rows()
    return source


def dry_run(arguments: argparse.Namespace, mesh: Mesh | None, reporter: Reporter) -> int:
    """Prints what the job would do, without doing it.

    Returns:
        The exit code: 1 if no row can run.
    """
    reject(
        arguments,
        ("resume", "retry_errors", "quiet"),
        "cannot be combined with --dry-run; remove one",
    )
    if arguments.output not in (None, STREAM):
        output_writer(Path(arguments.output))
        check_paths(Path(arguments.output))
    source = checked_source(arguments)
    if arguments.score or arguments.embed or isinstance(source, OpenAIRequests):
        raise InputError("--dry-run: only for rows that generate")
    price = arguments.price_per_hour
    if price is not None and not arguments.calibrate:
        raise InputError("--price-per-hour has no effect without --calibrate")
    if price is not None and not price >= 0:
        raise InputError(f"--price-per-hour: expected 0 or more, found {price}")
    options = generator_options(arguments, reporter, constraint(arguments))
    del options["announce"]  # the plan says it
    if arguments.calibrate:
        model, tokenizer = load_named(arguments, mesh, reporter)
    else:
        model, tokenizer = without_weights(arguments, mesh)
    engine = BatchGenerator(model, tokenizer, **options)
    plan = engine.plan(map(source.row, range(len(source))))
    reporter.table([("rows", f"{len(source):,}"), ("rows that can run", f"{len(plan.rows):,}")])
    for line in histogram([len(row.input_ids) for row in plan.rows]):
        reporter.say(line)
    if plan.rows:
        longest = max(plan.rows, key=lambda row: len(row.input_ids))
        where = f"{source.unit} {source.number(longest.index)}"
        reporter.say(f"the longest prompt: {len(longest.input_ids):,} tokens, {where}")
        first = plan.rows[0].input_ids
        text = str(first.tolist()) if tokenizer is None else tokenizer.decode(first.tolist())
        reporter.say(f"the first prompt: {shortened(text, SHOWN_CHARACTERS)}")
    context = model.config.context_length
    if count := sum(row.max_length > context for row in plan.rows if context is not None):
        reporter.say(f"rows that may exceed the model's context of {context:,} tokens: {count:,}")
    for line in refused(source, plan.errors):
        reporter.say(line)
    reporter.table([("memory", line) for memory in plan.memory for line in memory_lines(memory)])
    if arguments.calibrate and plan.rows:
        reporter.table(estimate(engine, source, plan, price))
    return 0 if plan.rows else 1


def without_weights(arguments: argparse.Namespace, mesh: Mesh | None) -> tuple[Any, Any]:
    """The model without weights, and its tokenizer."""
    from jaxllm.planning.abstract import abstract_model  # with the planner, which takes a second

    check_model_flags(arguments)
    message = "cannot be combined with --dry-run; add --calibrate"
    reject(arguments, ("architecture", "adapter"), message)
    if arguments.quantize == KEEP:
        raise InputError(f"--quantize {KEEP}: {message}")
    path, platform = resolve(arguments.model), chosen_platform(arguments)
    checkpoint = open_checkpoint(path)
    with checkpoint.weights:
        tokenizer = tokenizer_of(checkpoint)
        dtype = arguments.dtype or compute_dtype_of(path, platform)
        dtype, param_dtype = choose_dtypes(checkpoint.weights, dtype, arguments.param_dtype)
        fields: Mapping[str, Any] = {**checkpoint.config, **dict(arguments.config)}
        model = abstract_model(
            fields,
            mesh=mesh,
            dtype=dtype,
            param_dtype=param_dtype,
            quantize=arguments.quantize,
            quantize_embeddings=arguments.quantize_embeddings,
        )
        model = arranged_for_inference(model)
        return with_settings(model, read_generation_config(checkpoint), tokenizer), tokenizer


def histogram(lengths: Sequence[int]) -> list[str]:
    """Numbers of prompts by their tokens, as lines of text.

    >>> for line in histogram([5, 20, 25, 40]):
    ...     print(line)
    prompt tokens
         1 to 16     1  ####################
        17 to 32     2  ########################################
        33 to 64     1  ####################
    """
    classes = Counter(max(16, 1 << (length - 1).bit_length()) for length in lengths)
    if not classes:
        return []
    most, width = max(classes.values()), len(f"{max(classes.values()):,}")
    lines = ["prompt tokens"]
    for end, count in sorted(classes.items()):
        start = 1 if end == 16 else end // 2 + 1
        bar = "#" * max(1, round(BAR * count / most))
        lines.append(f"{start:6,} to {end:<6,} {count:{width},}  {bar}")
    return lines


def refused(source: Source, errors: Sequence[BatchOutput]) -> list[str]:
    """The rows that would have an error, one per line, as far as `SHOWN_ERRORS`."""
    if not errors:
        return []
    ordered = sorted(errors, key=lambda output: output.index)
    lines = [f"  {source.result(output)['error']}" for output in ordered[:SHOWN_ERRORS]]
    more = len(ordered) - SHOWN_ERRORS
    shown = [f"rows that would have an error: {len(ordered):,}", *lines]
    return [*shown, f"  and {more:,} more"] if more > 0 else shown


def estimate(
    engine: BatchGenerator, source: Source, plan: RowPlan, price: float | None
) -> list[tuple[str, str]]:
    """The time of the job, by the speed at which some of its rows are answered."""
    at_once = max((memory.slots for memory in plan.memory), default=1)
    sample = plan.rows[:: max(1, len(plan.rows) // (2 * at_once))]
    limits = {row.index: row.max_new_tokens for row in sample}
    tokens, used, allowed = 0, 0, 0
    with contextlib.closing(CompileClock()) as clock:
        start, seconds = time.monotonic(), 0.0
        while seconds < CALIBRATION_SECONDS:
            for output in engine.answer(source.row(row.index) for row in sample):
                used += sum(output.new_lengths)
                allowed += limits[output.index] * len(output.new_lengths)
                seconds = time.monotonic() - start - clock.seconds
                if seconds >= CALIBRATION_SECONDS and allowed:
                    break
            tokens += engine.counts.tokens
            if not allowed:  # every row of the sample failed
                return [("expected time", "unknown: no row of a sample could be answered")]
    share = used / allowed
    work = share * sum(row.max_new_tokens * row.samples for row in plan.rows)
    expected = work / (tokens / seconds)
    lines = [
        ("speed", f"{tokens / seconds:.0f} new tokens/s"),
        ("new tokens", f"about {work:,.0f}: rows used {share:.0%} of their limits"),
        ("expected time", f"about {duration(expected)}, compiling not counted"),
    ]
    if price is not None:
        amount = f"about {price * expected / 3600:.2f}, at {price:g} an hour"
        lines.append(("expected price", amount))
    return lines


def resume_options(arguments: argparse.Namespace) -> dict[str, bool]:
    """How a job goes on with an earlier one."""
    retry = bool(arguments.retry_errors)
    return {"resume": retry or bool(arguments.resume), "retry": retry}


def job_identity(arguments: argparse.Namespace, platform: str) -> dict[str, Any]:
    """All that results depend on besides the input; a resumed job must have the same.

    Args:
        platform: of the devices that answer the rows.
    """
    path, whole = arguments.model, bool(arguments.whole_digest)
    adapter = arguments.adapter and checkpoint_digests(arguments.adapter, whole=whole)
    names = ("context", "score", "embed", "prompt_name", *LANGUAGES, *CUTS)
    task = {name: getattr(arguments, name) for name in names}
    task = {name: value for name, value in task.items() if value}
    task |= constraint(arguments)  # an empty schema is one too: any JSON value
    fields = sorted(generation_fields(arguments).items())
    return {
        "--model": str(Path(path).resolve() if Path(path).exists() else path),
        **model_options(arguments, platform),
        "--seed": arguments.seed or 0,
        "--delimiter": arguments.delimiter,
        "--chat": arguments.chat,
        "--system": arguments.system,
        **{"--" + name.replace("_", "-"): value for name, value in task.items()},
        **{"--" + name.replace("_", "-"): value for name, value in fields},
        "--whole-digest": whole,
        **checkpoint_digests(resolve(path), whole=whole),
        **{f"adapter: {part}": digest for part, digest in (adapter or {}).items() if digest},
        **jax_settings(),
        ENVIRONMENT: versions() | ({} if arguments.engine == RAY else devices()),
    }


def column_choice(arguments: argparse.Namespace) -> ColumnChoice:
    """The keys that the task reads, and the columns that the options name."""
    columns: dict[str, Any] = {
        "prompt": arguments.prompt_column,
        "completion": arguments.completion_column,
        "template": row_template(arguments.template, "--template"),
        "system_template": row_template(arguments.system_template, "--system-template"),
        "keep": arguments.keep or (),
        "keep_prefix": arguments.keep_prefix or "",
    }
    if arguments.system_template is not None:
        if not arguments.chat:
            raise InputError("--system-template has no effect without --chat")
        if arguments.system is not None:
            raise InputError("--system-template cannot be combined with --system; remove one")
    if arguments.score:
        return ColumnChoice(SCORE_KEYS, **columns)
    if arguments.completion_column is not None:
        raise InputError("--completion-column has no effect without --score")
    return ColumnChoice(EMBED_KEYS if arguments.embed else generation_keys(), **columns)


def constraint(arguments: argparse.Namespace) -> dict[str, Any]:
    """The schema, regex or grammar of the job.

    Raises:
        InputError: there are several, or a schema is no JSON object.
        MissingExtraError: llguidance is not installed.
    """
    chosen = only_one({f"--{key}": getattr(arguments, key) for key in CONSTRAINT_KEYS})
    if chosen is None:
        return {}
    llguidance()  # before loading
    key = chosen[0].removeprefix("--")
    return {key: constraint_source(key, chosen[1], chosen[0])}


def check_task(arguments: argparse.Namespace, source: Source) -> None:
    """Raises InputError for options that the task, or the rows of this input, do not use."""
    if arguments.score and arguments.embed:
        raise InputError("--score cannot be combined with --embed; remove one of them")
    if arguments.prompt_name is not None and not arguments.embed:
        raise InputError("--prompt-name has no effect without --embed")
    if arguments.slots is not None and arguments.slots < 1:
        raise InputError(f"--slots: expected 1 or more, found {arguments.slots}")
    task = "--score" if arguments.score else "--embed" if arguments.embed else None
    constraint_keys = list(constraint(arguments))
    if task is not None or isinstance(source, OpenAIRequests):
        reject(arguments, CUTS, "is only for rows that generate from texts")
    if task is not None:
        fields = [name.replace("_", "-") for name in generation_fields(arguments)]
        given = [name for name in ("seed", "memory") if getattr(arguments, name) is not None]
        if options := [*fields, *given, *constraint_keys]:
            raise InputError(f"--{options[0]}: has no effect with {task}, which generates nothing")
    if not isinstance(source, OpenAIRequests):
        if arguments.context is not None:
            raise InputError("--context is only for OpenAI batch files; use --max-new-tokens")
        return
    if task is not None:
        raise InputError(f"{task} cannot be used on an OpenAI batch file; give prompts")
    if constraint_keys:
        raise InputError(
            f"--{constraint_keys[0]} has no effect on an OpenAI batch file; set response_format"
        )
    if arguments.chat:
        raise InputError("--chat: remove it; the url in an OpenAI batch file selects chats")


def load_engine(
    arguments: argparse.Namespace,
    constraint: Mapping[str, Any],
    are_requests: bool,
    mesh: Mesh | None,
    reporter: Reporter,
) -> Callable[[], RowEngine]:
    """Loads the model, and returns a function that makes an engine for rows.

    Args:
        constraint: of `constraint`.
        are_requests: the rows are requests of an OpenAI batch file.
    """
    chat_flag = "--chat" if arguments.chat else None
    model, tokenizer = load_named(arguments, mesh, reporter, chat_flag=chat_flag)
    path = arguments.model
    if tokenizer is not None:
        tokenizer = tokenizer.with_languages(arguments.src_lang, arguments.tgt_lang)
        if not (are_requests or arguments.embed or arguments.rows_name_languages):
            target_settings(model, tokenizer, generation_fields(arguments))
    elif arguments.src_lang is not None or arguments.tgt_lang is not None:
        raise InputError(f"--src-lang, --tgt-lang: {path} has no tokenizer; leave them out")
    rows: dict[str, Any] = {
        "batch_size": arguments.slots,
        "chat": arguments.chat,
        "system": arguments.system,
    }
    if arguments.embed:
        rows |= {"pooling": arguments.embed, "prompt_name": arguments.prompt_name}
        return partial(RowEmbedder, model, tokenizer, **rows)
    if arguments.score:
        return partial(RowScorer, model, tokenizer, **rows)
    model = checked_generative(model, str(path))
    if are_requests:
        name = Path(path).absolute().stem
        options = slot_options(arguments, reporter)
        return partial(
            BatchRequests, model, tokenizer, model_name=name, context=arguments.context, **options
        )
    options = generator_options(arguments, reporter, constraint)
    return partial(BatchGenerator, model, tokenizer, **options)


def memory_lines(memory: Prediction) -> list[str]:
    """What a pool takes, and how many rows of the job's own lengths would fit."""
    return [str(memory), memory.room] if memory.fits and memory.lengths else [str(memory)]


def slot_options(arguments: argparse.Namespace, reporter: Reporter) -> dict[str, Any]:
    """Options of every engine that generates in slots."""

    def announce(memory: Prediction) -> None:
        for line in memory_lines(memory):
            reporter.say(line)

    return {
        "slots": arguments.slots,
        "memory": arguments.memory,
        "seed": arguments.seed or 0,
        "announce": announce,
        **generation_fields(arguments),
    }


def generator_options(
    arguments: argparse.Namespace, reporter: Reporter, constraint: Mapping[str, Any]
) -> dict[str, Any]:
    """Options of `BatchGenerator`."""
    return {
        "chat": arguments.chat,
        "system": arguments.system,
        **{name: getattr(arguments, name) for name in (*LANGUAGES, *CUTS)},
        "default_new_tokens": DEFAULT_NEW_TOKENS,
        **constraint,
        **slot_options(arguments, reporter),
    }


def chosen_platform(arguments: argparse.Namespace) -> str:
    """Platform that answers the rows: that of actors, by what they take of the cluster, or ours."""
    if arguments.engine != RAY:
        return jax.default_backend()
    names = (arguments.actor_resources or DEFAULT_RESOURCES).keys()
    return "tpu" if "TPU" in names else "gpu" if "GPU" in names else "cpu"


def ray_engine(
    arguments: argparse.Namespace, source: Source, clock: CompileClock, dtype: str
) -> RayEngine:
    """The engine of ``--engine ray`` for the rows of a job.

    Args:
        dtype: compute dtype in all actors, which would choose it by their own devices.

    Raises:
        JaxLLMError: there is no such cluster.
    """
    # An actor has another working directory.
    absolute: dict[str, Any] = {"dtype": dtype}
    if Path(arguments.model).exists():
        absolute["model"] = str(Path(arguments.model).absolute())
    for name in ("adapter", "compile_cache"):
        if (path := getattr(arguments, name)) is not None:
            absolute[name] = path.absolute()
    load = partial(
        load_in_actor,
        argparse.Namespace(**{**vars(arguments), **absolute}),
        constraint(arguments),
        isinstance(source, OpenAIRequests),
    )
    return RayEngine(
        load,
        clock,
        actors=arguments.actors,
        resources=arguments.actor_resources or DEFAULT_RESOURCES,
        address=arguments.address,
    )


def load_in_actor(
    arguments: argparse.Namespace, constraint: Mapping[str, Any], are_requests: bool
) -> Callable[[], RowEngine]:
    """`load_engine` in an actor, on all devices that Ray lets it see."""
    reporter = Reporter(quiet=True)
    if arguments.matmul_precision is not None:
        jax.config.update("jax_default_matmul_precision", arguments.matmul_precision)
    return load_engine(arguments, constraint, are_requests, local_mesh(arguments), reporter)
