"""Everything that follows from a recipe before the first step."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

from jax.sharding import Mesh

from jaxllm.common.errors import ConfigError
from jaxllm.generation.call.merging import merged_config
from jaxllm.parallel.placement import put_tree, row_share
from jaxllm.parallel.sharding import make_mesh, tree_shardings
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data import Batches, Epoch, ModelInfo, epoch_batches, make_batches
from jaxllm.training.data.labels import problem_of
from jaxllm.training.data.rows import find_files
from jaxllm.training.evaluation.evaluate import EvalResult, Prompt, check_room_for_answer
from jaxllm.training.evaluation.generation_metrics import score_texts
from jaxllm.training.evaluation.generation_rows import generation_rows
from jaxllm.training.losses import Loss, loss_for
from jaxllm.training.monitor.flops import ModelFlops, model_flops
from jaxllm.training.monitor.sinks import tensorboard_package, wandb_package
from jaxllm.training.optimizers import make_optimizer, make_schedule
from jaxllm.training.run.initial_model import starting_model, trained
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.state import TrainState
from jaxllm.training.step import Step, make_train_step

LESS_IS_BETTER = ("loss", "perplexity", "mse")
SECONDS = 10.0
"""Between lines about rows that are being encoded."""


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run that is ready to begin, or to be brought to where it stopped."""

    recipe: Recipe
    mesh: Mesh
    tokenizer: Tokenizer
    info: ModelInfo
    state: TrainState
    step: Step
    flops: ModelFlops
    batches: Batches
    eval_loss: Loss
    """Without smoothing and z-loss, which are no part of a perplexity."""
    eval_batches: Epoch | None
    prompts: list[Prompt]
    """What to generate for at every evaluation."""


def set_up(recipe: Recipe, say: Callable[[str], None]) -> Setup:
    """Loads or makes the model, encodes the data, creates the state on the mesh.

    Raises:
        JaxLLMError: whatever a part of the recipe finds wrong, with the field or the row.
    """
    sizes = recipe.mesh
    mesh = make_mesh(data=sizes.data, fsdp=sizes.fsdp, tensor=sizes.tensor)
    part, parts = row_share(mesh)
    check_files_and_packages(recipe)
    began = time.perf_counter()
    model, tokenizer = starting_model(recipe)
    say(f"model: {time.perf_counter() - began:.1f} s to load or make it")
    info = info_of(model)
    shared: dict[str, Any] = {"model": info, "process_index": part, "process_count": parts}
    with section("data"):
        batches = make_batches(
            recipe.data,
            tokenizer,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
            progress=now_and_then(say, "training data"),
            **shared,
        )
    say(f"training data: {batches.counts}; {batches.batches_per_epoch} steps an epoch")
    eval_batches, prompts = None, []
    if recipe.eval_data is not None:
        rows = recipe.evaluation.batch_size or recipe.batch_size // recipe.accumulation
        with section("eval_data"):
            eval_batches = epoch_batches(
                recipe.eval_data,
                tokenizer,
                batch_size=rows,
                progress=now_and_then(say, "evaluation data"),
                **shared,
            )
        check_metric(recipe, info)
        if recipe.evaluation.metrics:
            fields, limit = recipe.evaluation.fields, recipe.evaluation.rows
            merged_config(model, None, fields)  # what is wrong there raises now
            prompts = generation_rows(
                recipe.eval_data,
                tokenizer,
                info,
                limit,
                check=lambda ids: check_room_for_answer(model, ids, fields),
            )
    end = recipe.optimizer.schedule_steps
    if end is not None and recipe.max_steps > end:
        rate = recipe.optimizer.learning_rate * (recipe.optimizer.final_factor or 0.0)
        say(
            f"the learning rate is {rate:g} from step {end} on (optimizer.schedule_steps), and the "
            f"run goes on to step {recipe.max_steps} (max_steps)"
        )
    optimizer = make_optimizer(recipe.optimizer)
    state = TrainState.create(
        model,
        optimizer,
        key=recipe.seed,
        trainable=trained(recipe, model),
        ema=recipe.ema_decay is not None,
    )
    smoothed = {"label_smoothing": recipe.label_smoothing, "z_loss": recipe.z_loss}
    return Setup(
        recipe=recipe,
        mesh=mesh,
        tokenizer=tokenizer,
        info=info,
        state=put_tree(state, mesh, tree_shardings(state, mesh)),
        step=make_train_step(
            optimizer,
            loss_for(model, **smoothed),
            accumulation=recipe.accumulation,
            ema_decay=recipe.ema_decay,
            schedule=make_schedule(recipe.optimizer),
        ),
        flops=model_flops(model, None if not state.frozen else state.params.keys()),
        batches=batches,
        eval_loss=loss_for(model),
        eval_batches=eval_batches,
        prompts=prompts,
    )


def check_files_and_packages(recipe: Recipe) -> None:
    """What is missing is told at once, not after minutes in which the model is loaded.

    Raises:
        DataError, MissingFileError: a path names no files.
        MissingExtraError: a package is not installed.
    """
    for data in (recipe.data, recipe.eval_data):
        if data is not None and data.path is not None:
            find_files(data.path)
    if recipe.tensorboard:
        tensorboard_package()
    if recipe.wandb is not None:
        wandb_package()
    if recipe.eval_data is not None and recipe.evaluation.metrics:
        score_texts([("a", "a")], recipe.evaluation.metrics)


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Puts the recipe's section before an error in one of its fields; rows have their file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def now_and_then(
    say: Callable[[str], None], what: str, now: Callable[[], float] = time.monotonic
) -> Callable[[int, int], None]:
    """Says how many rows are encoded, each time that `SECONDS` have passed."""
    said = now()

    def progress(done: int, total: int) -> None:
        nonlocal said
        if done < total and now() - said >= SECONDS:
            said = now()
            say(f"{what}: {done:,} of {total:,} rows are encoded")

    return progress


def predicted(info: ModelInfo) -> Literal["tokens", "labels", "values"]:
    """What the model's labels are, which names the metrics of an evaluation."""
    if info.kind != "classification":
        return "tokens"
    return "values" if problem_of(info) == "regression" else "labels"


def check_metric(recipe: Recipe, info: ModelInfo) -> None:
    """The metric that the best checkpoint is chosen by is one that evaluations give, and `mode` is
    the one that suits it.

    Raises:
        ConfigError: it is not.
    """
    known = [*EvalResult(loss=0.0, accuracy=0.0, count=1).metrics(predicted(info))]
    if recipe.evaluation.metrics:
        known += [f"eval_{name}" for name in score_texts([("a", "a")], recipe.evaluation.metrics)]
    if recipe.checkpoints.metric not in known:
        raise ConfigError(
            f"checkpoints.metric: no {recipe.checkpoints.metric!r} is measured; there are "
            f"{', '.join(known)}"
        )
    metric, mode = recipe.checkpoints.metric, recipe.checkpoints.mode
    wanted = "min" if metric.endswith(LESS_IS_BETTER) else "max"
    if mode != wanted:  # or the worst would be kept
        better = "smaller" if wanted == "min" else "larger"
        raise ConfigError(
            f"checkpoints.mode: {mode!r}, but a {better} {metric} is better; set mode: {wanted}"
        )


def info_of(model: Any) -> ModelInfo:
    """What the data must know, with the end tokens of the model's generation config."""
    info = ModelInfo.of(model)
    settings = model.generation_config
    ends = getattr(settings, "eos_token_id", None)
    if ends is None:
        return info
    listed = (ends,) if isinstance(ends, int) else tuple(ends)
    return dataclasses.replace(
        info, eos_token_ids=tuple(dict.fromkeys(info.eos_token_ids + listed))
    )
