"""`train`: runs a recipe to checkpoints, metrics and a report; supports stop and resume."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.orbax.leaves import digests
from jaxllm.checkpoint.orbax.steps import numbered
from jaxllm.common.arguments import checked
from jaxllm.common.errors import ConfigError, InputError, RunError, naming_file
from jaxllm.common.files import expanded
from jaxllm.common.hardware import device_report
from jaxllm.common.precision import matmul_precision
from jaxllm.common.progress import Reporter, reports_to
from jaxllm.common.validation import from_plain, to_plain
from jaxllm.models.model import Model
from jaxllm.models.registry import architecture_of
from jaxllm.parallel.environment import changed_environment, changes, jax_settings
from jaxllm.parallel.processes import in_all_processes
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.settings import OTHER_IDS, TOKEN_IDS
from jaxllm.training.data import Source
from jaxllm.training.data.examples import require_grain
from jaxllm.training.data.rows import find_files
from jaxllm.training.monitor.flops import peak_flops
from jaxllm.training.monitor.metrics_log import MetricsLog, Sink, TensorBoardSink, WandbSink
from jaxllm.training.monitor.progress import TrainingProgress
from jaxllm.training.monitor.report import (
    AFTER,
    BEFORE,
    finish_report,
    write_samples,
)
from jaxllm.training.monitor.run_card import DataFile, RunCard, flat, make_run_card, write_run_card
from jaxllm.training.run.loop import Loop, patience_of
from jaxllm.training.run.recipe import (
    CHANGEABLE,
    RULES,
    DataConfig,
    Recipe,
    find_recipe,
    read_recipe,
)
from jaxllm.training.run.setup import (
    Setup,
    check_metric,
    measured_on,
    mesh_for,
    set_up,
    with_reference,
)
from jaxllm.training.state import TRAINED, Params, TrainState

CHECKPOINTS = "checkpoints"
DTYPE = "model.dtype"


@dataclasses.dataclass(frozen=True)
class RunResult:
    """The result of `train`."""

    folder: Path
    step: int
    stopped_by: int | None
    """Number of the signal that ended the run; None: it reached its end."""
    stopped_early: str | None
    """Why `early_stopping` ended the run; None: it did not."""
    model: Model[Any]
    """The model after the last step, with averaged weights if the run keeps an average."""
    tokenizer: Tokenizer
    metrics: Mapping[str, Any]
    """Metrics of the last step of this process."""


def train(
    recipe: Recipe | Mapping[str, Any] | str | PathLike[str],
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
    stop: Callable[[], int | None] = lambda: None,
) -> RunResult:
    """Trains according to a recipe, up to `max_steps` or the end of the last epoch.

    Every process calls this, with a shared folder; the first process writes.

    ::

        result = jaxllm.train("smollm2_lora_chat", {"output_dir": "runs/chat", "max_steps": 12})

    Args:
        recipe: a recipe, its fields as a dictionary, its YAML file, or the name of one that comes
            with the package. The run writes to its `output_dir`.
        overrides: fields that replace those of the file, under dotted names such as
            ``"optimizer.learning_rate"``.
        resume: resume the run in that folder, or start one if there is none.
        quiet: show nothing; damaged checkpoints are warnings of the logger "jaxllm".
        stop: called after every step; if it returns a signal number, the run saves and ends.

    Raises:
        RunError: the folder holds another run, or another process writes to it; or too many
            consecutive batches have no finite gradient.
        JaxLLMError: as the parts of the recipe raise.
    """
    kinds = (Recipe, Mapping, str, PathLike)
    checked(recipe, kinds, "recipe", "a recipe, its fields, its file or its name")
    if isinstance(recipe, Mapping):
        recipe = read_recipe({}, {**recipe, **(overrides or {})})
    elif not isinstance(recipe, Recipe):
        recipe = read_recipe(find_recipe(os.fspath(recipe)), overrides)
    elif overrides is not None:
        raise InputError("overrides: only for a recipe that is read from a file")
    require_grain()
    folder = folder_of(recipe)
    check_metric(recipe)  # what is wrong here is told before there is a folder
    mesh_for(recipe)
    leads = jax.process_index() == 0
    reporter = Reporter(quiet=quiet or not leads)
    say = reporter.say
    with contextlib.ExitStack() as stack:
        stack.enter_context(matmul_precision(recipe.model.matmul_precision))
        checkpoints = stack.enter_context(
            RunCheckpoints(
                folder / CHECKPOINTS,
                keep=recipe.checkpoints.keep,
                mode=recipe.checkpoints.mode,
                on_saved=lambda step, seconds, size: say(
                    f"saved step {step}: {size / 1e6:.1f} MB in {seconds:.1f} s"
                ),
                on_problem=None if reporter.console.quiet else say,
            )
        )
        with reports_to(reporter):
            setup, base, saved = start_or_resume(recipe, folder, checkpoints, resume, say)
        state, start = setup.state, int(setup.state.step)
        resume_at = start if resume else None
        card = card_of(setup, resume_at)
        log, sinks, card = in_all_processes(
            lambda: (
                open_logs(stack, recipe, folder, card, resume_at) if leads else (None, [], card)
            ),
            RunError,
        )
        for line in device_report():
            say(line)
        peak = peak_flops()
        say(f"MFU 100% would be {peak}")
        last, every = setup.last_step, recipe.evaluation.every or setup.last_step
        has_evaluations = setup.eval_batches is not None
        progress = TrainingProgress(
            last,
            start=start,
            peak=peak,
            every=recipe.log_every,
            evaluations_after=lambda step: has_evaluations * (-(-last // every) - step // every),
            quiet=reporter.console.quiet,
            console=reporter.console,
        )
        stack.enter_context(progress)
        patience = patience_of(recipe, saved, partial(measured_on, recipe, setup.eval_batches))
        after = folder / AFTER if leads else None
        meta = {
            "recipe": to_plain(recipe),
            "base": base,
            "settings": settings_of(state.model, setup.tokenizer),
            "rules": saved.get("rules", 1) if saved else RULES,
        }
        loop = Loop(setup, checkpoints, progress, log, sinks, meta, patience, after)
        before, now = ({**x.versions, **x.devices} for x in ([card.starts[-1], *card.starts])[-2:])
        if (change := changed_environment(before, now)) is not None:
            say(f"{folder} {change}")
        if start == 0:
            sample_before(folder, loop, state)
        evaluated = saved.get("evaluated", False)
        state, signal = loop.run_to(last, state, stop, evaluated=evaluated)
        checkpoints.wait()
        checkpoints.delete_expired()
        if leads:
            finish_report(folder, card, peak=peak, ended=loop.stopped_early, say=say)
        return RunResult(
            folder=folder,
            step=int(state.step),
            stopped_by=signal,
            stopped_early=loop.stopped_early,
            model=state.model if state.ema is None else state.averaged_model,
            tokenizer=setup.tokenizer,
            metrics=loop.last,
        )


def start_or_resume(
    recipe: Recipe,
    folder: Path,
    checkpoints: RunCheckpoints,
    resume: bool,
    say: Callable[[str], None],
) -> tuple[Setup, dict[str, Any], Mapping[str, Any]]:
    """Sets up a new run, or restores a run from its last checkpoint.

    Returns:
        The setup, `base_of` its model, and the checkpoint's metadata, empty for a new run.
    """
    if not resume:
        in_all_processes(lambda: check_new(folder), RunError)
    has_checkpoint, rules = resume and bool(numbered(folder / CHECKPOINTS)), RULES
    if has_checkpoint:
        meta = checkpoints.read().meta
        # Fields that are new since then have their defaults.
        before = fixed_fields(to_plain(from_plain(Recipe, meta["recipe"])))
        rules = meta.get("rules", 1)
        now = fixed_fields(to_plain(recipe))
        before[DTYPE] = now[DTYPE] = None  # the settings have the dtype that was chosen
        check_unchanged(before, now, folder)
    setup = set_up(recipe, say, rules)
    # LoRA's reference is the frozen model.
    is_reference = recipe.dpo is not None and recipe.lora is None
    reference = setup.state.params if is_reference else None
    base = base_of(setup.state.model, setup.state.frozen, reference)
    if has_checkpoint:  # before another model's log-probabilities are stored
        check_base(checkpoints.read().meta["base"], base, folder)
    setup = with_reference(setup, folder, stored=has_checkpoint, say=say)
    saved: Mapping[str, Any] = {}
    if has_checkpoint:
        state, saved = restore(checkpoints, setup, base, folder)
        setup = dataclasses.replace(setup, state=state)
    start = int(setup.state.step)
    if start > setup.last_step:
        raise RunError(
            f"{folder}: the run is at step {start}, beyond its last one, {setup.last_step}; set a "
            "larger max_steps, or epochs"
        )
    if resume:
        say(f"resuming at step {start}" if has_checkpoint else "no checkpoint yet: a new run")
    return setup, base, saved


def restore(
    checkpoints: RunCheckpoints, setup: Setup, base: Mapping[str, Any], folder: Path
) -> tuple[TrainState, Mapping[str, Any]]:
    """Restores state and data position from the last intact checkpoint; also returns its
    metadata."""
    state = setup.state
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        {name: getattr(state, name) for name in TRAINED},
    )
    for name in TRAINED:  # the devices may have no room for two states
        jax.tree.map(lambda x: x.delete(), getattr(state, name))
    arrays, meta, _ = checkpoints.restore(target=target)
    check_unchanged(meta["settings"], settings_of(state.model, setup.tokenizer), folder)
    check_base(meta["base"], base, folder)
    setup.batches.restore(meta["data"])
    return state.replace(**arrays), meta


def open_logs(
    stack: contextlib.ExitStack, recipe: Recipe, folder: Path, card: RunCard, resume_at: int | None
) -> tuple[MetricsLog, list[Sink], RunCard]:
    """Opens the log and the sinks of the recipe, which the stack closes, and writes the card."""
    log = stack.enter_context(MetricsLog(folder, resume_at=resume_at))
    card = write_run_card(folder, card)
    sinks: list[Sink] = []
    if recipe.tensorboard:
        sinks.append(TensorBoardSink(folder, resume_at=resume_at))
        stack.callback(sinks[-1].close)
    if recipe.wandb is not None:
        sinks.append(
            WandbSink(folder, config=card.config, project=recipe.wandb, resume_at=resume_at)
        )
        stack.callback(sinks[-1].close)
    return log, sinks, card


def card_of(setup: Setup, resumed_at: int | None) -> RunCard:
    """Makes the run card, with hashes of the data and parameter counts."""
    recipe, state = setup.recipe, setup.state
    data = {"train": file_of(recipe.data, setup.batches.examples)}
    if recipe.eval_data is not None and setup.eval_batches is not None:
        data["eval"] = file_of(recipe.eval_data, setup.eval_batches.examples)
    trained, frozen = (sum(x.size for x in y.values()) for y in (state.params, state.frozen))
    return make_run_card(
        config=to_plain(recipe),
        data=data,
        total_parameters=trained + frozen,
        trainable_parameters=trained,
        resumed_at=resumed_at,
    )


def file_of(config: DataConfig, examples: Source) -> DataFile:
    """Path, hash and size of the data files; for a Hub data set only name and hash."""
    if config.path is None:
        return DataFile(str(config.dataset), examples.sha256, 0)
    paths = (config.path,) if isinstance(config.path, str) else config.path
    sizes = (file.stat().st_size for file in find_files(config.path))
    return DataFile(", ".join(map(str, paths)), examples.sha256, sum(sizes))


def sample_before(folder: Path, loop: Loop, state: TrainState) -> None:
    """Saves the model's answers before the first step, replacing those of an earlier attempt."""
    if jax.process_index() == 0:
        for name in (BEFORE, AFTER):
            with naming_file(folder / name, RunError, "written"):
                (folder / name).unlink(missing_ok=True)
    count = loop.recipe.evaluation.samples
    if not loop.setup.prompts or not count:
        return
    with loop.progress.phase("generating before training"):
        samples = loop.generate(state.model, loop.setup.prompts[:count]).samples
    if jax.process_index() == 0:
        write_samples(folder / BEFORE, samples)


def folder_of(recipe: Recipe) -> Path:
    """Returns the recipe's `output_dir`.

    Raises:
        ConfigError: the recipe has none.
    """
    if recipe.output_dir is None:
        raise ConfigError("output_dir: missing; name the folder of the run with --output-dir")
    return expanded(recipe.output_dir)


def check_new(folder: Path) -> None:
    """Checks that a folder holds no run.

    Raises:
        RunError: the folder holds a run; the message says how to resume it.
    """
    steps, metrics = numbered(folder / CHECKPOINTS), folder / "metrics.jsonl"
    if steps or (metrics.exists() and metrics.stat().st_size):
        last = f", saved at step {max(steps)}" if steps else ""
        raise RunError(
            f"{folder}: holds a run already{last}; continue it with --resume, or name another "
            "folder"
        )


def settings_of(model: Model[Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """What a run computes with besides its recipe and data."""
    version = tokenizer.ids_version(tokenizer.file_names)
    ids = {TOKEN_IDS: version} if version > 1 else {}
    return {DTYPE: model.dtype.name, "tokenizer": tokenizer.digest(), **ids, **jax_settings()}


def check_unchanged(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Raises RunError, which names them, if settings are not those that a run was started with."""
    if before.get(TOKEN_IDS) != now.get(TOKEN_IDS):
        raise RunError(f"{folder}: {TOKEN_IDS}: {OTHER_IDS}")
    if changed := changes(before, now):
        raise RunError(
            f"{folder}: the run was started with other settings ({changed}); resume with those, or "
            "start a new run in another folder"
        )


def fixed_fields(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a recipe that cannot change when a run resumes, under dotted names."""
    return {
        name: value
        for name, value in flat(plain).items()
        if not any(f"{name}.".startswith(f"{field}.") for field in CHANGEABLE)
    }


def base_of(model: Model[Any], frozen: Params, reference: Params | None = None) -> dict[str, Any]:
    """Config, generation config, and digests of the frozen parameters, which checkpoints omit.

    Args:
        reference: trained parameters before the first step, if a run compares with them (DPO).
    """
    config = flat(model.config.to_json(*architecture_of(model)))
    settings = model.generation_config
    generation = {} if settings is None else json.loads(json.dumps(settings.to_json()))

    # Floats as float32, which is exact, since another device may keep the same weights in another
    # dtype; one by one, so that there is one copy at a time.
    def digest(params: Params) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, x in sorted(params.items()):
            is_float = jnp.issubdtype(x.dtype, jnp.floating)
            found |= digests({path: x.astype(jnp.float32) if is_float else x})
        return found

    base = {"config": config, "generation_config": generation, "tensors": digest(frozen)}
    return base if reference is None else {**base, "reference": digest(reference)}


def check_base(saved: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    """Checks that configs and frozen parameters are those that the run started from.

    Raises:
        RunError: they differ.
    """
    before, tensors = saved["tensors"], now["tensors"]
    if "reference" in now:  # an export has none
        before, tensors = {**before, **saved["reference"]}, {**tensors, **now["reference"]}
    paths = before.keys() | tensors.keys()
    differing = sorted(path for path in paths if before.get(path) != tensors.get(path))
    what = changes(saved["config"], now["config"]) or changes(
        saved["generation_config"], now["generation_config"]
    )
    if differing:
        what = f"{len(differing)} of its tensors differ, such as {differing[0]}"
    if what:
        raise RunError(
            f"{folder}: the base model is not the one that the run started from ({what}); give the "
            "same checkpoint"
        )
