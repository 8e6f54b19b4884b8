"""From a run's checkpoint to files that transformers and PEFT load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.checkpoint.peft import save_adapter
from jaxllm.checkpoint.save import write_json
from jaxllm.common.errors import ConfigError, MissingFileError, RunError
from jaxllm.common.strict_json import read_json
from jaxllm.loading import save_hf
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.lora import merge_lora
from jaxllm.training.output_files import write_text
from jaxllm.training.run.initial_model import starting_model, trained
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run_folder import CHECKPOINTS, base_of, check_base
from jaxllm.training.validation import from_plain

MAX_JSON_BYTES = 1 << 26
Which = int | Literal["best", "last"] | None


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model as a checkpoint has it. Under LoRA the adapters are still apart."""

    model: Any
    tokenizer: Tokenizer
    recipe: Recipe
    step: int


def load_run(
    folder: Path, step: Which = None, *, averaged: bool = True, model: str | None = None
) -> Trained:
    """The model of a run, which may still be going on.

    Args:
        folder: the run's `output_dir`.
        step: of the checkpoint; "best" by the metric of its evaluations, "last"; None: the best
            one if there were evaluations, else the last.
        averaged: the moving average of the weights, where the run keeps one.
        model: where the model that it began with is now; None: where it was.

    Raises:
        MissingFileError: there is no run, or no such checkpoint.
        RunError: the base model is not the one that LoRA was trained on.
        CheckpointError: no checkpoint is sound.
    """
    if not (folder / CHECKPOINTS).is_dir():
        raise MissingFileError(f"{folder}: not the folder of a run: it has no {CHECKPOINTS}/")
    with RunCheckpoints(folder / CHECKPOINTS, writable=False) as reading:
        record = reading.read()
        recipe = recipe_of(record.meta, folder)
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
                raise ConfigError("model: the run began with a new model, not with a checkpoint")
            source = dataclasses.replace(recipe.model, path=model)
            recipe = dataclasses.replace(recipe, model=source)
        start, tokenizer = starting_model(recipe)
        chooses = trained(recipe, start)
        params = parameters(start)
        frozen = {p: x for p, x in params.items() if chooses is not None and not chooses(p)}
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
    return Trained(with_parameters(start, arrays[name]), tokenizer, recipe, number)


def recipe_of(meta: Mapping[str, Any], folder: Path) -> Recipe:
    try:
        return from_plain(Recipe, meta["recipe"])
    except (KeyError, ConfigError) as error:
        raise RunError(f"{folder}: its checkpoint's recipe cannot be read ({error})") from None


def export(
    run: Path,
    out: Path,
    *,
    step: Which = None,
    adapter: bool = False,
    averaged: bool = True,
    dtype: Any = None,
    model: str | None = None,
) -> Trained:
    """Writes a run's model as a Hugging Face folder, or its LoRA as PEFT's files.

    Args:
        run: the run's `output_dir`.
        out: made; it must be empty if it is there.
        step, averaged, model: see `load_run`.
        adapter: PEFT's files of the LoRA alone; otherwise it is merged into the weights.
        dtype: of the written weights; None: as `jaxllm.save_hf` chooses.

    Raises:
        RunError: `out` holds something; or an adapter is asked of a run without LoRA.
        JaxLLMError: as `load_run`, `save_hf` and `save_adapter`.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out}: is there already; name a new folder")
    if adapter and dtype is not None:
        raise ConfigError("dtype: an adapter is written in float32; leave one of the two out")
    found = load_run(run, step, averaged=averaged, model=model)
    if adapter and found.recipe.lora is None:
        raise RunError(f"{run}: was trained without LoRA, so there is no adapter to export")
    if adapter:
        save_adapter(out, found.model, base_model=found.recipe.model.path)
        found.tokenizer.save(out)
        save_template(out, found)
        return found
    merged = found.model if found.recipe.lora is None else merge_lora(found.model)
    save_hf(out, merged, found.tokenizer, dtype=dtype)
    save_template(out, found)
    save_label_names(out / "config.json", found.recipe.data.label_names)
    return found


def save_template(folder: Path, found: Trained) -> None:
    """The chat template that the model was trained with, if it was not the tokenizer's own."""
    given = found.recipe.data.chat_template
    if given is None:
        return
    template = found.tokenizer.settings.chat_templates.get(given, given)
    write_text(folder / "chat_template.jinja", template)  # what transformers reads first
    path = folder / "tokenizer_config.json"
    write_json(path, {**read_object(path), "chat_template": template})


def save_label_names(path: Path, names: Sequence[str]) -> None:
    """The names of a classifier's classes, in its config."""
    if names:
        id2label = {str(number): name for number, name in enumerate(names)}
        label2id = {name: number for number, name in enumerate(names)}
        write_json(path, {**read_object(path), "id2label": id2label, "label2id": label2id})


def read_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found = read_json(path, max_bytes=MAX_JSON_BYTES)
    assert isinstance(found, dict)
    return found
