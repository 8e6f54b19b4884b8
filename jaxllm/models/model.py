"""Base class of all models: config, weights and checkpoint metadata."""

from __future__ import annotations

import dataclasses
from typing import Any, Generic, TypeVar

from flax import nnx

from jaxllm.models.config import ModelConfig
from jaxllm.nn.blocks import shallow_copy

C = TypeVar("C", bound=ModelConfig)
M = TypeVar("M")


@dataclasses.dataclass(frozen=True)
class Origin:
    """Metadata of a model's checkpoint, needed to save the same files again."""

    config: str
    """Text of config.json."""
    dtypes: tuple[tuple[str, str], ...]
    """(tensor name, dtype) of every tensor in the file."""
    copies: tuple[tuple[str, str], ...] = ()
    """(tensor name, our path) of tensors that are copies of another parameter."""
    stripped: bool = False
    """True if tensor names lack the base model's prefix."""
    file: str = ""
    """Path of the checkpoint."""
    quantised: bool = False


class Model(nnx.Module, Generic[C]):
    """Config, weights, and metadata that the forward pass does not use.

    Attributes other than weights are static: part of the pytree's structure, and so of the key of
    compiled programs. `without_metadata` resets those that programs should not depend on.
    """

    is_encoder_decoder = False

    config: C
    generation_config: Any
    """`GenerationConfig` of the checkpoint: defaults of `generate()`. None: there is none."""
    extra_eos_token_ids: tuple[int, ...]
    """End token of the tokenizer, which config.json may lack; it also ends a sequence."""
    origin: Origin | None
    """Metadata of the checkpoint that the model was loaded from, if any."""
    modules_to_save: tuple[str, ...]
    """Paths of modules that are fully trained beside LoRA, and saved with the adapter."""

    def __init__(self, config: C):
        self.config = config
        self.generation_config = None
        self.extra_eos_token_ids = ()
        self.origin = None
        self.modules_to_save = ()


def without_metadata(model: M) -> M:
    """A copy without metadata, so that models of one config share programs; shares weights."""
    return shallow_copy(model, generation_config=None, extra_eos_token_ids=(), origin=None)
