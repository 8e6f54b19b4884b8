"""Sets up a run from its recipe: model, tokenizer, data, evaluations, state and compiled step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
import time
import zipfile
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from jaxllm.auto import AutoTokenizer
from jaxllm.common.errors import (
    ConfigError,
    DataError,
    InputError,
    MissingFileError,
    RunError,
    naming_file,
)
from jaxllm.common.files import replacing
from jaxllm.common.hardware import default_device
from jaxllm.common.progress import progress_phase
from jaxllm.generation.inputs.arguments import PaddedBatch
from jaxllm.generation.settings.resolve import checked_lengths, merged_config
from jaxllm.loading import load
from jaxllm.models.build_options import Options
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Card, Model
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters
from jaxllm.parallel.placement import put_tree, row_share
from jaxllm.parallel.processes import gather_rows, in_all_processes
from jaxllm.parallel.sharding import check_heads, make_mesh, row_shards, tree_shardings
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.classifier import with_classifier
from jaxllm.training.data import (
    Batches,
    EpochBatches,
    ModelInfo,
    Peers,
    Source,
    make_batches,
    reference_logps,
)
from jaxllm.training.data.formats import problem_of
from jaxllm.training.data.pipeline import check_fields
from jaxllm.training.data.rows import find_files
from jaxllm.training.dpo import METRICS, DPOLoss
from jaxllm.training.evaluation import (
    EvalPrompt,
    EvalResult,
    Predicted,
    generation_rows,
    score_texts,
)
from jaxllm.training.lora import add_lora, is_trainable
from jaxllm.training.losses import Loss, loss_for, most_logits
from jaxllm.training.monitor.flops import ModelFlops, model_flops
from jaxllm.training.monitor.metrics_log import tensorboard_package, wandb_package
from jaxllm.training.optimizers import OptimizerConfig, make_optimizer, make_schedule
from jaxllm.training.run.recipe import BYTES, RULES, Evaluation, ModelSource, Recipe
from jaxllm.training.state import TrainState
from jaxllm.training.step import Step, make_train_step

NOT_DIVIDED = "cannot be split over {} devices (mesh: data * fsdp); give a multiple"
SECONDS = 10.0
"""Time between two progress reports while rows are encoded."""
LOWER_IS_BETTER = ("loss", "perplexity", "mse", "rejected")
REFERENCE_FILE = "reference_logps.npz"
"""File in the folder of a DPO run: computed at its start, read again when it resumes."""


def initial_model(
    recipe: Recipe, mesh: Mesh | None = None, rules: int = RULES
) -> tuple[Model[Any], Tokenizer]:
    """Loads or creates the model and tokenizer, with LoRA if the recipe has it.

    The same recipe gives the same weights, including random ones.

    Args:
        mesh: devices over which all weights are sharded from the start.
        rules: `RULES` of the run.

    Raises:
        ConfigError: the model has no tokenizer, or one with too many tokens.
        JaxLLMError: as `jaxllm.load` and `add_lora`.
    """
    source, tokenizer = recipe.model, None
    if source.path is None:
        model = new_model(source, recipe.seed, mesh)
    else:
        model, tokenizer = load(
            source.path,
            dtype=source.dtype,
            architecture=source.architecture,
            config=source.overrides,
            remat=source.remat,
            scan_layers=source.scan_layers,
            attn_implementation=source.attn_implementation,
            mesh=mesh,
        )
    if source.num_labels is not None:
        model = with_classifier(
            model,
            num_labels=source.num_labels,
            problem_type=source.problem_type,
            key=recipe.seed,
        )
    if source.tokenizer is not None:
        name = source.tokenizer
        tokenizer = byte_tokenizer() if name == BYTES else AutoTokenizer.from_pretrained(name)
    if tokenizer is None:
        raise ConfigError(f"model.tokenizer: {source.path} has no tokenizer; name another one")
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"model.tokenizer: has {len(tokenizer)} tokens, but the model's vocab_size is "
            f"{model.config.vocab_size}; name another tokenizer"
        )
    if recipe.lora is not None:
        model = add_lora(model, recipe.lora, key=recipe.seed, share_a=rules >= 2)
    return model, tokenizer


def new_model(source: ModelSource, seed: int, mesh: Mesh | None) -> Model[Any]:
    """Creates a model of `source.config` with random weights in float32."""
    assert isinstance(source.config, Mapping)  # a path is read by the recipe
    spec = model_spec(source.config, source.architecture)
    options = Options.on(
        default_device().platform,
        dtype=jnp.dtype(source.dtype or "float32"),
        remat=source.remat,
        scan_layers=source.scan_layers,
        attn_implementation=source.attn_implementation,
    )

    def make() -> Model[Any]:
        return spec.make(spec.config, options, rngs=nnx.Rngs(seed))

    shardings = None
    if mesh is not None:
        check_heads(spec.config.head_counts, mesh)
        shardings = tree_shardings(jax.eval_shape(make), mesh)
    with progress_phase("making the model"):
        model = jax.jit(make, out_shardings=shardings)()
    return model.with_card(Card(spec.config))


def trainable_paths(recipe: Recipe, model: Model[Any]) -> Callable[[str], bool] | None:
    """Predicate of parameter paths that the recipe trains; None: all.

    Raises:
        ConfigError: a pattern of `trainable` matches no parameter.
    """
    if recipe.lora is not None:
        saved = model.checked_card("lora").lora_modules("lora")
        return lambda path: is_trainable(path, saved)
    if not recipe.trainable:
        return None
    paths = parameters(model)
    patterns = [re.compile(pattern) for pattern in recipe.trainable]
    for pattern in patterns:
        if not any(map(pattern.search, paths)):
            raise ConfigError(
                f"trainable: {pattern.pattern!r} matches no parameter; there are "
                f"{', '.join(list(paths)[:4])}, ... {', '.join(list(paths)[-3:])}"
            )
    return lambda path: any(pattern.search(path) for pattern in patterns)


@dataclasses.dataclass(frozen=True)
class Setup:
    """A run before its first step, or before its state is restored."""

    recipe: Recipe
    mesh: Mesh
    tokenizer: Tokenizer
    info: ModelInfo
    state: TrainState
    step: Step
    flops: ModelFlops
    batches: Batches
    eval_loss: Loss
    """Loss without label smoothing and z-loss, which would distort the perplexity; DPO's own."""
    eval_batches: EpochBatches | None
    last_step: int
    """The step at which the run ends."""
    prompts: list[EvalPrompt]
    """Prompts to generate for at every evaluation."""


def set_up(recipe: Recipe, say: Callable[[str], None], rules: int = RULES) -> Setup:
    """Loads or makes the model, encodes the data, and creates the state on the mesh.

    Args:
        rules: `RULES` of the run.

    Raises:
        JaxLLMError: as the parts of the recipe raise, with the field or the row.
    """
    mesh = mesh_for(recipe)
    check_files_and_packages(recipe)
    model, tokenizer = initial_model(recipe, mesh if mesh.size > 1 else None, rules)
    info = ModelInfo.of(model)
    batches, eval_batches = load_data(recipe, tokenizer, info, mesh, say, rules)
    prompts = eval_prompts(recipe, model, tokenizer, info)
    last_step = recipe.last_step(batches.batches_per_epoch, rules)
    end = recipe.optimizer.schedule_steps
    if end is not None and last_step > end:
        rate = recipe.optimizer.learning_rate * (recipe.optimizer.final_factor or 0.0)
        say(
            f"the learning rate is {rate:g} from step {end} on (optimizer.schedule_steps), and the "
            f"run goes on to step {last_step}"
        )
    optimizer = make_optimizer(recipe.optimizer)
    state = TrainState.create(
        model,
        optimizer,
        key=recipe.seed,
        trainable=trainable_paths(recipe, model),
        ema=recipe.ema_decay is not None,
        donate=True,
    )
    model = state.model
    for pattern in set(recipe.optimizer.no_decay) - set(OptimizerConfig.no_decay):
        if not any(re.search(pattern, path) for path in state.params):
            raise ConfigError(
                f"optimizer.no_decay: {pattern!r} matches no trained parameter, such as "
                f"{next(iter(state.params))}"
            )
    smoothing = recipe.label_smoothing
    preferences = None if recipe.dpo is None else DPOLoss(recipe.dpo, most_logits(model))
    return Setup(
        recipe=recipe,
        mesh=mesh,
        tokenizer=tokenizer,
        info=info,
        state=put_tree(state, mesh, tree_shardings(state, mesh)),
        step=make_train_step(
            optimizer,
            preferences or loss_for(model, label_smoothing=smoothing, z_loss=recipe.z_loss),
            accumulation=recipe.accumulation,
            ema_decay=recipe.ema_decay,
            schedule=make_schedule(recipe.optimizer),
        ),
        flops=model_flops(model, None if not state.frozen else state.params.keys()),
        batches=batches,
        eval_loss=preferences or loss_for(model),
        eval_batches=eval_batches,
        last_step=last_step,
        prompts=prompts,
    )


def mesh_for(recipe: Recipe) -> Mesh:
    """The mesh of a recipe, over which the rows of its batches divide.

    Raises:
        ConfigError, InputError: there are not enough devices, or the rows do not divide.
    """
    sizes = recipe.mesh
    mesh = make_mesh(data=sizes.data, fsdp=sizes.fsdp, tensor=sizes.tensor)
    check_rows(recipe, mesh)
    return mesh


def check_rows(recipe: Recipe, mesh: Mesh) -> None:
    """Checks that the rows of every batch divide over the devices, before the run needs them to.

    Raises:
        ConfigError: those of the training or of the evaluation do not.
    """
    shards = row_shards(mesh)
    if recipe.batch_size % shards:
        raise ConfigError(f"batch_size: {recipe.batch_size} rows {NOT_DIVIDED.format(shards)}")
    rows = eval_batch_size(recipe)
    if recipe.eval_data is not None and rows % shards:
        raise ConfigError(
            f"evaluation.batch_size: {rows} rows (by default those of a training micro-batch) "
            f"{NOT_DIVIDED.format(shards)}"
        )


def load_data(
    recipe: Recipe,
    tokenizer: Tokenizer,
    info: ModelInfo,
    mesh: Mesh,
    say: Callable[[str], None],
    rules: int = RULES,
) -> tuple[Batches, EpochBatches | None]:
    """Loads the training batches, and the evaluation batches if the recipe has any."""
    part, parts = row_share(mesh)
    gather = functools.partial(gather_rows, error=DataError)
    made = functools.partial(
        make_batches,
        tokenizer=tokenizer,
        model=info,
        seed=recipe.seed,
        process_index=part,
        process_count=parts,
        peers=Peers(jax.process_index(), jax.process_count(), gather),
    )
    with section("data"):
        progress = rows_progress(say, "training data")
        group = True if rules < 2 else None
        batches = made(
            recipe.data, batch_size=recipe.batch_size, group_by_length=group, progress=progress
        )
    say(f"training data: {batches.summary}")
    if recipe.eval_data is None:
        return batches, None
    with section("eval_data"):
        size, progress = eval_batch_size(recipe), rows_progress(say, "evaluation data")
        evaluated = made(recipe.eval_data, batch_size=size, progress=progress)
        eval_batches = evaluated.in_order(size)
    check_metric(recipe, predicted(recipe, info))
    return batches, eval_batches


def eval_batch_size(recipe: Recipe) -> int:
    """Rows per evaluation batch."""
    return recipe.evaluation.batch_size or recipe.batch_size // recipe.accumulation


def eval_prompts(
    recipe: Recipe, model: Model[Any], tokenizer: Tokenizer, info: ModelInfo
) -> list[EvalPrompt]:
    """Prompts to generate for at every evaluation; empty without `evaluation.metrics`.

    Raises:
        JaxLLMError: `evaluation.fields` are wrong, or a prompt leaves no room for an answer.
    """
    if recipe.eval_data is None or not recipe.evaluation.metrics:
        return []
    fields, limit = recipe.evaluation.fields, recipe.evaluation.rows
    decoder = cast(GenerativeModel, model)
    config, _ = merged_config(decoder, None, fields)

    def check(ids: Sequence[int]) -> None:
        if not decoder.is_encoder_decoder:
            row = np.zeros((1, len(ids)), np.int32)
            checked_lengths(decoder, config, PaddedBatch(row, np.ones_like(row, bool)))

    return generation_rows(recipe.eval_data, tokenizer, info, limit, check=check)


def predicted(recipe: Recipe, info: ModelInfo) -> Predicted:
    """Kind of the model's predictions, which decides the metrics of an evaluation."""
    if recipe.dpo is not None:
        return "preferences"
    if info.kind != "classification":
        return "tokens"
    return "values" if problem_of(info) == "regression" else "labels"


def answer_metrics(evaluation: Evaluation) -> list[str]:
    """Names of the metrics of generated answers."""
    if not evaluation.metrics:
        return []
    return [f"eval_{name}" for name in score_texts([("a", "a")], evaluation.metrics)]


def check_metric(recipe: Recipe, *kinds: Predicted) -> None:
    """Checks that evaluations measure the metrics of `checkpoints` and `early_stopping`.

    Args:
        kinds: of the model's predictions; none: any, since the model is not read yet.

    Raises:
        ConfigError: no evaluation measures one, or `mode` would keep the worst checkpoint.
    """
    extra = {} if recipe.dpo is None else dict.fromkeys(METRICS, 0.0)
    result = EvalResult(loss=0.0, accuracy=0.0, count=1, extra=extra)
    kinds = kinds or (("tokens", "labels", "values") if recipe.dpo is None else ("preferences",))
    metrics = [*dict.fromkeys(name for kind in kinds for name in result.metrics(kind))]
    metrics += answer_metrics(recipe.evaluation)
    metric, mode = recipe.checkpoints.metric, recipe.checkpoints.mode
    watched = None if recipe.early_stopping is None else recipe.early_stopping.metric
    for field, name in (("checkpoints.metric", metric), ("early_stopping.metric", watched)):
        if name is not None and name not in metrics:
            raise ConfigError(f"{field}: unknown metric {name!r}; use {', '.join(metrics)}")
    expected = "min" if is_lower_better(metric) else "max"
    if mode != expected:
        better = "smaller" if expected == "min" else "larger"
        raise ConfigError(
            f"checkpoints.mode: {mode!r}, but a {better} {metric} is better; set mode: {expected}"
        )


def measured_on(recipe: Recipe, eval_batches: EpochBatches | None, metric: str) -> str | None:
    """Hash of all that an evaluation metric depends on besides the weights: the rows, and how
    answers are generated; None without `eval_data`. Values of two hashes are not compared."""
    if eval_batches is None:
        return None
    content, evaluation = [eval_batches.examples.digest], recipe.evaluation
    if metric in answer_metrics(evaluation):
        fields = dict(evaluation.fields)
        content.append(json.dumps([evaluation.rows, fields], sort_keys=True))
    return hashlib.sha256("\n".join(content).encode()).hexdigest()


def is_lower_better(metric: str) -> bool:
    """True if smaller values of an evaluation metric are better, by its name.

    >>> is_lower_better("eval_loss"), is_lower_better("eval_exact_match")
    (True, False)
    """
    return metric.endswith(LOWER_IS_BETTER)


def check_files_and_packages(recipe: Recipe) -> None:
    """Checks for missing files, fields and packages, before the model is loaded.

    Raises:
        DataError, MissingFileError: a path names no files.
        MissingExtraError: a package is not installed.
    """
    for name, data in (("data", recipe.data), ("eval_data", recipe.eval_data)):
        if data is None:
            continue
        if data.path is not None:
            try:
                find_files(data.path)
            except MissingFileError as error:
                raise MissingFileError(f"{name}.path: {error}") from None
        with section(name):
            check_fields(data)
    if recipe.tensorboard:
        tensorboard_package()
    if recipe.wandb is not None:
        wandb_package()
    if recipe.eval_data is not None and recipe.evaluation.metrics:
        score_texts([("a", "a")], recipe.evaluation.metrics)


@contextlib.contextmanager
def section(name: str) -> Generator[None]:
    """Prefixes errors in fields with the section of the recipe; errors in rows name their file."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except InputError as error:  # of a template
        raise ConfigError(f"{name}.{error}") from None


def rows_progress(
    say: Callable[[str], None],
    what: str,
    now: Callable[[], float] = time.monotonic,
    *,
    done_as: str = "rows are encoded",
) -> Callable[[int, int], None]:
    """Makes a progress callback that reports the number of finished rows every `SECONDS`."""
    last_report = now()

    def progress(done: int, total: int) -> None:
        nonlocal last_report
        if done < total and now() - last_report >= SECONDS:
            last_report = now()
            say(f"{what}: {done:,} of {total:,} {done_as}")

    return progress


def with_reference(
    setup: Setup, folder: Path, *, stored: bool, say: Callable[[str], None]
) -> Setup:
    """The setup of a DPO run with reference log-probabilities in its data; others are unchanged.

    The reference is the model of the setup, before its state is restored: with LoRA the base model,
    since new adapters change nothing. The first process writes the numbers to `REFERENCE_FILE`.

    Args:
        stored: read what an earlier start of the run stored; data that are new since then are
            computed. A missing file is computed again: `Batches.restore` compares digests.

    Raises:
        RunError: the file cannot be read or written.
    """
    if setup.recipe.dpo is None:
        return setup
    path = folder / REFERENCE_FILE
    earlier = read_logps(path) if stored else {}
    train = setup.batches.in_order(eval_batch_size(setup.recipe))
    results: dict[str, Float32[np.ndarray, "N 2"]] = {}

    def with_logps(name: str, source: Source, epoch: EpochBatches) -> Source:
        digest, what = epoch.examples.digest, f"reference of the {name} data"
        if digest not in earlier:
            start = time.perf_counter()
            progress = rows_progress(say, what, done_as="pairs are computed")
            earlier[digest] = reference_logps(setup.state.model, epoch, setup.mesh, progress)
            seconds = time.perf_counter() - start
            say(f"{what}: {len(earlier[digest]):,} pairs in {seconds:.1f} s")
        results[digest] = earlier[digest]
        return source.with_reference(earlier[digest])

    examples = with_logps("training", setup.batches.examples, train)
    batches = setup.batches.with_examples(examples)
    eval_batches = setup.eval_batches
    if eval_batches is not None:
        examples = with_logps("evaluation", eval_batches.examples, eval_batches)
        eval_batches = dataclasses.replace(eval_batches, examples=examples)

    def write() -> None:
        if jax.process_index() == 0:
            with naming_file(path, RunError, "written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as half, half.open("wb") as file:
                    np.savez(file, **results)  # pyright: ignore[reportArgumentType]

    in_all_processes(write, RunError)
    return dataclasses.replace(setup, batches=batches, eval_batches=eval_batches)


def read_logps(path: Path) -> dict[str, Any]:
    """Log-probabilities by the digest of their examples; empty if there is no file.

    Raises:
        RunError: the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise RunError(
            f"{path}: cannot be read ({error}); move it away, and the run computes it again"
        ) from None
