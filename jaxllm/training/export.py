"""From a run's checkpoint to files that transformers and PEFT load."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxllm.checkpoint.peft import save_adapter
from jaxllm.checkpoint.runs import RunCheckpoints
from jaxllm.errors import ConfigError, MissingFileError, RunError
from jaxllm.loading import save_hf
from jaxllm.models.weights import parameters, with_parameters
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.lora import merge_lora
from jaxllm.training.recipe import Recipe
from jaxllm.training.recipe_file import build
from jaxllm.training.run_folder import CHECKPOINTS, base_of, check_base
from jaxllm.training.start import starting_model, trained

Which = int | Literal["best", "last"] | None


@dataclasses.dataclass(frozen=True)
class Trained:
    """A run's model as a checkpoint has it. Under LoRA the adapters are still apart."""

    model: Any
    tokenizer: Tokenizer
    recipe: Recipe
    step: int


def load_run(folder: Path, step: Which = None, *, averaged: bool = True) -> Trained:
    """The model of a run, which may still be going on.

    Args:
        folder: the run's `output_dir`.
        step: of the checkpoint; "best" by the metric of its evaluations, "last"; None: the best
            one if there were evaluations, else the last.
        averaged: the moving average of the weights, where the run keeps one.

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
        model, tokenizer = starting_model(recipe)
        chooses = trained(recipe, model)
        params = parameters(model)
        frozen = {p: x for p, x in params.items() if chooses is not None and not chooses(p)}
        check_base(record.meta["base"], base_of(model, frozen), folder)
        name = "ema" if averaged and recipe.ema_decay is not None else "params"
        target = {
            name: {
                path: jax.ShapeDtypeStruct(x.shape, jnp.float32)
                for path, x in params.items()
                if path not in frozen
            }
        }
        arrays, _, number = checkpoints.restore(number, target, subset=True)
    return Trained(with_parameters(model, arrays[name]), tokenizer, recipe, number)


def recipe_of(meta: Mapping[str, Any], folder: Path) -> Recipe:
    try:
        return build(Recipe, meta["recipe"])
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
) -> Trained:
    """Writes a run's model as a Hugging Face folder, or its LoRA as PEFT's files.

    Args:
        run: the run's `output_dir`.
        out: made; it must be empty if it is there.
        step, averaged: see `load_run`.
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
    found = load_run(run, step, averaged=averaged)
    if adapter and found.recipe.lora is None:
        raise RunError(f"{run}: was trained without LoRA, so there is no adapter to export")
    if adapter:
        save_adapter(out, found.model, base_model=found.recipe.model.path)
        found.tokenizer.save(out)
        return found
    model = found.model if found.recipe.lora is None else merge_lora(found.model)
    save_hf(out, model, found.tokenizer, dtype=dtype)
    return found
