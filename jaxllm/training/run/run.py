"""A whole run: from a recipe to checkpoints, metrics and a report; stopped and gone on with."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import RunError
from jaxllm.parallel.processes import together
from jaxllm.training.data.rows import find_files
from jaxllm.training.evaluation.evaluate import Sample
from jaxllm.training.monitor.flops import peak_flops
from jaxllm.training.monitor.metrics_log import MetricsLog, NoLog
from jaxllm.training.monitor.progress import TrainingProgress
from jaxllm.training.monitor.report import finish_report
from jaxllm.training.monitor.run_card import DataFile, RunCard, make_run_card, write_run_card
from jaxllm.training.monitor.samples import AFTER, BEFORE, paired, read_samples, write_samples
from jaxllm.training.monitor.sinks import Sink, TensorBoardSink, WandbSink
from jaxllm.training.output_files import writing
from jaxllm.training.run.loop import Loop
from jaxllm.training.run.recipe import DataConfig, Recipe
from jaxllm.training.run.run_folder import (
    CHECKPOINTS,
    abstract,
    base_of,
    check_ahead,
    check_base,
    check_new,
    check_same,
    folder_of,
    saved_steps,
)
from jaxllm.training.run.setup import Setup, set_up
from jaxllm.training.state import TrainState, parameter_count
from jaxllm.training.step import TRAINED
from jaxllm.training.validation import to_plain


@dataclasses.dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    folder: Path
    step: int
    stopped_by: int | None
    """The signal that ended it early, if one did."""
    model: Any
    """With the weights of the last step, averaged where the run keeps an average."""
    tokenizer: Any
    metrics: Mapping[str, Any]
    """Of the last step that this process did."""


def train(
    recipe: Recipe,
    *,
    resume: bool = False,
    quiet: bool = False,
    stop: Callable[[], int | None] = lambda: None,
) -> RunResult:
    """Trains as the recipe says, up to `max_steps`.

    In several processes all of them call this, on a folder that they share; the first one writes.

    Args:
        recipe: its `output_dir` holds everything that the run writes.
        resume: go on with the run in that folder; where there is none yet, begin one.
        quiet: show nothing; damaged checkpoints are warnings of the logger "jaxllm".
        stop: asked after every step; the number of a signal ends the run there, saved.

    Raises:
        RunError: the folder holds another run, or is written to by one; too many batches in a row
            without a finite gradient.
        JaxLLMError: as the parts of the recipe raise.
    """
    folder, settings = folder_of(recipe), recipe.checkpoints
    leads = jax.process_index() == 0
    quiet = quiet or not leads
    console = Console(stderr=True, quiet=quiet, highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False, style="dim")

    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(
            RunCheckpoints(
                folder / CHECKPOINTS,
                keep=settings.keep,
                mode=settings.mode,
                on_saved=lambda step, seconds, size: say(
                    f"saved step {step}: {size / 1e6:.1f} MB in {seconds:.1f} s"
                ),
                on_problem=None if quiet else say,
            )
        )
        if not resume:
            together(lambda: check_new(folder), RunError)
        there = resume and bool(saved_steps(folder))
        if there:
            check_same(checkpoints.read().meta["recipe"], recipe, folder)
        setup = set_up(recipe, say)
        base = base_of(setup.state.model, setup.state.frozen)
        state, evaluated = setup.state, False
        if there:
            state, evaluated = brought_back(checkpoints, setup, base, folder)
        start = int(state.step)
        check_ahead(start, recipe.max_steps, folder)
        if resume:
            say(f"going on from step {start}" if there else "nothing is saved yet: a new run")
        at = start if resume else None
        card = card_of(setup, at)
        log, sinks, card = together(
            lambda: opened(stack, setup, folder, card, at) if leads else (NoLog(), [], card),
            RunError,
        )
        progress = stack.enter_context(
            TrainingProgress(
                recipe.max_steps,
                start=start,
                peak=peak_flops(),
                every=recipe.log_every,
                quiet=quiet,
                console=console,
            )
        )
        keep = (lambda samples: write_samples(folder / AFTER, samples)) if leads else no_samples
        loop = Loop(setup, checkpoints, progress, log, sinks, base, keep)
        if start == 0:
            sample_before(folder, loop, state)
        state, signal = loop.until(recipe.max_steps, state, stop, evaluated=evaluated)
        checkpoints.wait()
        if leads:
            shown = paired(*(read_samples(folder / name) for name in (BEFORE, AFTER)))
            finish_report(folder, card, samples=shown, say=say)
        return RunResult(
            folder=folder,
            step=int(state.step),
            stopped_by=signal,
            model=state.model if state.ema is None else state.averaged_model,
            tokenizer=setup.tokenizer,
            metrics=loop.last,
        )


def brought_back(
    checkpoints: RunCheckpoints, setup: Setup, base: Mapping[str, Any], folder: Path
) -> tuple[TrainState, bool]:
    """The state and the data's position of the last sound checkpoint; whether it was evaluated."""
    state = setup.state
    target = {name: abstract(getattr(state, name)) for name in TRAINED}
    arrays, meta, _ = checkpoints.restore(target=target)
    check_base(meta["base"], base, folder)
    setup.batches.restore(meta["data"])
    return state.replace(**arrays), meta.get("evaluated", False)


def opened(
    stack: contextlib.ExitStack, setup: Setup, folder: Path, card: RunCard, at: int | None
) -> tuple[MetricsLog, list[Sink], RunCard]:
    """What the numbers of steps are written to, closed with the stack; and the card as written."""
    log = stack.enter_context(MetricsLog(folder, resume_at=at))
    card = write_run_card(folder, card)
    sinks = further_sinks(setup.recipe, folder, card, at)
    return log, [stack.enter_context(contextlib.closing(sink)) for sink in sinks], card


def card_of(setup: Setup, resumed_at: int | None) -> RunCard:
    """The run's card: data by their hashes, parameters by their number."""
    recipe, state = setup.recipe, setup.state
    data = {"train": file_of(recipe.data, setup.batches.examples)}
    if recipe.eval_data is not None and setup.eval_batches is not None:
        data["eval"] = file_of(recipe.eval_data, setup.eval_batches.examples)
    count = parameter_count(state.params)
    return make_run_card(
        config=to_plain(recipe),
        data=data,
        total_parameters=count + parameter_count(state.frozen),
        trainable_parameters=count,
        resumed_at=resumed_at,
    )


def file_of(config: DataConfig, examples: Any) -> DataFile:
    """What the data are read from; a data set of the Hub has no files here."""
    if config.path is None:
        return DataFile(str(config.dataset), examples.sha256, 0)
    named = (config.path,) if isinstance(config.path, str) else config.path
    sizes = (file.stat().st_size for file in find_files(config.path))
    return DataFile(", ".join(map(str, named)), examples.sha256, sum(sizes))


def further_sinks(recipe: Recipe, folder: Path, card: RunCard, at: int | None) -> Iterator[Sink]:
    if recipe.tensorboard:
        yield TensorBoardSink(folder, resume_at=at)
    if recipe.wandb is not None:
        yield WandbSink(folder, config=card.config, project=recipe.wandb, resume_at=at)


def sample_before(folder: Path, loop: Loop, state: TrainState) -> None:
    """Keeps the model's answers before the first step; those of an earlier attempt go."""
    if jax.process_index() == 0:
        for name in (BEFORE, AFTER):
            with writing(folder / name):
                (folder / name).unlink(missing_ok=True)
    count = loop.recipe.evaluation.samples
    if not loop.setup.prompts or not count:
        return
    with loop.progress.phase("generating before training"):
        found = loop.generate(state.model, loop.setup.prompts[:count]).samples
    if jax.process_index() == 0:
        write_samples(folder / BEFORE, found)


def no_samples(samples: Sequence[Sample]) -> None:
    """Another process keeps them."""
