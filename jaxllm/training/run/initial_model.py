"""Loads or creates the initial model of a run and its tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.hub import resolve, smollm2
from jaxllm.checkpoint.load import LoadProgress
from jaxllm.common.errors import ConfigError
from jaxllm.loading import load
from jaxllm.models.build_options import Options
from jaxllm.models.model import Card, Model
from jaxllm.models.registry import model_spec
from jaxllm.models.weights import parameters
from jaxllm.nn.attention import implementation_for
from jaxllm.tokenizers import Tokenizer, load_tokenizer, tokenizer_from_gguf
from jaxllm.tokenizers.byte_level import byte_tokenizer
from jaxllm.training.classifier import with_classifier
from jaxllm.training.lora import add_lora, is_trainable
from jaxllm.training.run.recipe import BUNDLED, BYTES, ModelSource, Recipe


def initial_model(
    recipe: Recipe, progress: LoadProgress | None = None
) -> tuple[Model[Any], Tokenizer]:
    """Loads or creates the model and tokenizer, with LoRA if the recipe has it.

    The same recipe gives the same weights, including random ones.

    Raises:
        ConfigError: the model has no tokenizer, or one with too many tokens.
        JaxLLMError: as `jaxllm.load` and `add_lora`.
    """
    source = recipe.model
    model, tokenizer = (
        new_model(source, recipe.seed) if source.path is None else loaded_model(source, progress)
    )
    if source.num_labels is not None:
        model = with_classifier(
            model,
            num_labels=source.num_labels,
            problem_type=source.problem_type,
            key=recipe.seed,
        )
    if source.tokenizer is not None:
        tokenizer = named_tokenizer(source.tokenizer)
    if tokenizer is None:
        raise ConfigError(f"model.tokenizer: {source.path} has none; name one")
    if len(tokenizer) > model.config.vocab_size:
        raise ConfigError(
            f"model.tokenizer: {len(tokenizer)} tokens, but the model has vocab_size "
            f"{model.config.vocab_size}"
        )
    if recipe.lora is not None:
        model = add_lora(model, recipe.lora, key=recipe.seed)
    return model, tokenizer


def loaded_model(
    source: ModelSource, progress: LoadProgress | None
) -> tuple[Model[Any], Tokenizer | None]:
    """Loads the checkpoint at `source.path`."""
    assert source.path is not None
    return load(
        smollm2() if source.path == BUNDLED else source.path,
        dtype=source.dtype,
        architecture=source.architecture,
        config=source.overrides,
        remat=source.remat,
        scan_layers=source.scan_layers,
        attn_implementation=source.attn_implementation,
        progress=progress,
    )


def new_model(source: ModelSource, seed: int) -> tuple[Model[Any], None]:
    """Creates a model of `source.config` with random weights in float32."""
    assert source.config is not None
    spec = model_spec(source.config, source.architecture)
    options = Options(
        dtype=jnp.dtype(source.dtype or "float32"),
        remat=source.remat,
        scan_layers=source.scan_layers,
        attn_implementation=implementation_for(source.attn_implementation, jax.default_backend()),
    )
    model = jax.jit(lambda: spec.make(spec.config, options, rngs=nnx.Rngs(seed)))()
    return model.with_card(Card(spec.config)), None


def named_tokenizer(name: str) -> Tokenizer | None:
    """Loads a tokenizer by name: bytes, the bundled model's, or that of a folder or Hub id."""
    if name == BYTES:
        return byte_tokenizer()
    if name == BUNDLED:
        with GGUFFile(smollm2()) as file:
            return tokenizer_from_gguf(file.metadata)
    return load_tokenizer(resolve(name, None))


def trainable_paths(recipe: Recipe, model: Model[Any]) -> Callable[[str], bool] | None:
    """Predicate of parameter paths that the recipe trains; None: all.

    Raises:
        ConfigError: a pattern of `trainable` matches no parameter.
    """
    if recipe.lora is not None:
        saved = model.checked_card("lora").modules_to_save
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
