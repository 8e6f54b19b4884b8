"""``generate --dry-run``: what a job of many prompts would do, without doing it."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Any

from jax.sharding import Mesh

from jaxllm.batch.generator import BatchGenerator, RowPlan
from jaxllm.batch.rows import BatchOutput
from jaxllm.batch.tables import Source
from jaxllm.checkpoint.hub import resolve
from jaxllm.checkpoint.load import open_checkpoint
from jaxllm.cli.options import model_options
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError, shortened
from jaxllm.common.progress import Reporter, duration
from jaxllm.loading import read_generation_config, tokenizer_of, with_settings
from jaxllm.planning.abstract import abstract_model

CALIBRATION_SECONDS = 10.0
"""Seconds of decoding by which the time of a job is estimated; compiling comes on top."""
SHOWN_ERRORS = 10
SHOWN_CHARACTERS = 2000
"""Of the first prompt."""
_BAR = 40


def run_dry(
    arguments: argparse.Namespace,
    source: Source,
    mesh: Mesh | None,
    reporter: Reporter,
    make_engine: Callable[[Any, Any], BatchGenerator],
    load: Callable[[], tuple[Any, Any]],
) -> int:
    """Prints the plan of a job.

    Args:
        make_engine: makes the engine of a model and a tokenizer.
        load: loads both; called with ``--calibrate`` only.

    Returns:
        The exit code: 1 if no row can run.
    """
    price = arguments.price_per_hour
    if price is not None and not arguments.calibrate:
        raise InputError("--price-per-hour has no effect without --calibrate")
    if price is not None and not price >= 0:
        raise InputError(f"--price-per-hour: expected 0 or more, found {price}")
    model, tokenizer = load() if arguments.calibrate else without_weights(arguments, mesh)
    engine = make_engine(model, tokenizer)
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
    reporter.table([("memory", str(memory)) for memory in plan.memory])
    if arguments.calibrate and plan.rows:
        reporter.table(estimate(engine, source, plan, price))
    return 0 if plan.rows else 1


def without_weights(arguments: argparse.Namespace, mesh: Mesh | None) -> tuple[Any, Any]:
    """The model without weights, and its tokenizer."""
    if arguments.architecture is not None:
        raise InputError("--architecture cannot be combined with --dry-run; add --calibrate")
    if arguments.adapter is not None:
        raise InputError("--adapter cannot be combined with --dry-run; add --calibrate")
    path = resolve(arguments.model)
    platform = None if mesh is None else mesh.devices.flat[0].platform
    dtype = model_options(arguments, platform or "cpu")["--dtype"]
    checkpoint = open_checkpoint(path)
    with checkpoint.weights:
        tokenizer = tokenizer_of(checkpoint)
        fields: Mapping[str, Any] = {**checkpoint.config, **dict(arguments.config)}
        model = abstract_model(fields, mesh=mesh, dtype=dtype, quantize=arguments.quantize)
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
        bar = "#" * max(1, round(_BAR * count / most))
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
    with closing(CompileClock()) as clock:
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
