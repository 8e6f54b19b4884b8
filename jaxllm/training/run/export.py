"""Exports a run's checkpoint to files that transformers and PEFT load."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.peft import save_adapter
from jaxllm.common.errors import ConfigError, MissingFileError, RunError, naming_file
from jaxllm.common.files import (
    check_new_folder,
    new_folder,
    read_json,
    write_json,
    write_whole,
)
from jaxllm.common.validation import from_plain
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.saving import save_hf
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.lora import merge_lora
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import CHECKPOINTS, base_of, check_base
from jaxllm.training.run.setup import initial_model, trainable_paths

MAX_JSON_BYTES = 1 << 26
Which = int | Literal["best", "last"] | None


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """The model of a checkpoint, with unmerged LoRA."""

    model: Model[Any]
    tokenizer: Tokenizer
    recipe: Recipe
    step: int


def load_run(
    folder: Path, step: Which = None, *, averaged: bool = True, model: str | None = None
) -> TrainedModel:
    """Loads the model of a run, which may still be running.

    Args:
        folder: the run's `output_dir`.
        step: step of the checkpoint, "best" (by the evaluation metric) or "last"; None: the best
            one if there were evaluations, else the last.
        averaged: load the moving average of the weights, if the run keeps one.
        model: current path of the model that the run started from; None: the recipe's path.

    Raises:
        MissingFileError: the run or the checkpoint does not exist.
        RunError: the base model is not the one that the run started from.
        CheckpointError: no checkpoint is intact.
    """
    with naming_file(folder, RunError, "read"):
        has_checkpoints = (folder / CHECKPOINTS).is_dir()
    if not has_checkpoints:
        raise MissingFileError(f"{folder}: not the folder of a run: it has no {CHECKPOINTS}/")
    with RunCheckpoints(folder / CHECKPOINTS, writable=False) as reading:
        record = reading.read()
    try:
        recipe = from_plain(Recipe, record.meta["recipe"])
    except (KeyError, ConfigError) as error:
        raise RunError(f"{folder}: its checkpoint's recipe cannot be read ({error})") from None
    with RunCheckpoints(
        folder / CHECKPOINTS, writable=False, mode=recipe.checkpoints.mode
    ) as checkpoints:
        number = checkpoints.best() if step in (None, "best") else None
        if step == "best" and number is None:
            raise MissingFileError(f"{folder}: the run has no evaluation, so no best checkpoint")
        if isinstance(step, int):
            number = step
        if model is not None:
            if recipe.model.path is None:
                raise ConfigError("model: the run started from random weights, not a checkpoint")
            source = dataclasses.replace(recipe.model, path=model)
            recipe = dataclasses.replace(recipe, model=source)
        start, tokenizer = initial_model(recipe, rules=record.meta.get("rules", 1))
        is_trained = trainable_paths(recipe, start)
        params = parameters(start)
        frozen = {p: x for p, x in params.items() if is_trained and not is_trained(p)}
        check_base(record.meta["base"], base_of(start, frozen), folder)
        name = "ema" if averaged and recipe.ema_decay is not None else "params"
        target = {
            name: {
                path: jax.ShapeDtypeStruct(x.shape, jnp.float32)
                for path, x in params.items()
                if path not in frozen
            }
        }
        arrays, _, number = checkpoints.restore(number, target, subset=True)
    return TrainedModel(with_parameters(start, arrays[name]), tokenizer, recipe, number)


def export(
    run: Path,
    out: Path,
    *,
    step: Which = None,
    adapter: bool = False,
    averaged: bool = True,
    dtype: Any = None,
    model: str | None = None,
) -> TrainedModel:
    """Writes a run's model as a Hugging Face folder, or its LoRA as PEFT's files.

    Args:
        run: the run's `output_dir`.
        out: new or empty folder; it is complete, or unchanged after an error.
        step, averaged, model: see `load_run`.
        adapter: write only the LoRA, as PEFT's files; otherwise it is merged into the weights.
        dtype: dtype of the written weights; None: as `jaxllm.save_hf` chooses.

    Raises:
        RunError: `out` is not empty; or `adapter` for a run without LoRA.
        JaxLLMError: as `load_run`, `save_hf` and `save_adapter`.
    """
    check_new_folder(out)
    if adapter and dtype is not None:
        raise ConfigError("dtype: an adapter is written in float32; leave out dtype or adapter")
    trained = load_run(run, step, averaged=averaged, model=model)
    if adapter and trained.recipe.lora is None:
        raise RunError(f"{run}: was trained without LoRA, so there is no adapter to export")
    with new_folder(out) as folder:
        if adapter:
            save_adapter(folder, trained.model, base_model=trained.recipe.model.path)
            trained.tokenizer.save(folder)
        else:
            merged = trained.model if trained.recipe.lora is None else merge_lora(trained.model)
            save_hf(folder, merged, trained.tokenizer, dtype=dtype)
            save_label_names(folder / "config.json", trained.recipe.data.label_names)
        save_template(folder, trained)
    return trained


def save_template(folder: Path, trained: TrainedModel) -> None:
    """Writes the chat template of the run, if it is not the tokenizer's default."""
    name = trained.recipe.data.chat_template
    if name is None:
        return
    template = trained.tokenizer.settings.chat_templates.get(name, name)
    first = folder / "chat_template.jinja"  # transformers reads this first
    with naming_file(first, RunError, "written"):
        write_whole(first, template.encode())
    path = folder / "tokenizer_config.json"
    write_json(path, {**read_object(path), "chat_template": template})


def save_label_names(path: Path, names: Sequence[str]) -> None:
    """Writes the names of a classifier's classes to its config."""
    if names:
        id2label = {str(number): name for number, name in enumerate(names)}
        label2id = {name: number for number, name in enumerate(names)}
        write_json(path, {**read_object(path), "id2label": id2label, "label2id": label2id})


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; empty if the file does not exist."""
    if not path.exists():
        return {}
    content = read_json(path, max_bytes=MAX_JSON_BYTES)
    assert isinstance(content, dict)
    return content
