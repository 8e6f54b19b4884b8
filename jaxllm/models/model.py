"""The base class of all models: a config, and what a model carries beside its weights."""

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
    """The checkpoint that a model was read from, as far as saving the same files again needs it."""

    config: str
    """The text of config.json."""
    dtypes: tuple[tuple[str, str], ...]
    """(tensor name, dtype) of every tensor in the file."""
    copies: tuple[tuple[str, str], ...] = ()
    """(tensor name, our path) of tensors that repeat one of our parameters."""
    stripped: bool = False
    """Tensor names lack the base model's prefix."""
    file: str = ""
    quantised: bool = False


class Model(nnx.Module, Generic[C]):
    """A config and its weights, and metadata that no forward pass reads.

    Attributes other than weights are static: part of the pytree's structure, and so of the key of
    compiled programs. `without_metadata` resets those that programs should not depend on.
    """

    is_encoder_decoder = False

    config: C
    generation_config: Any
    """The checkpoint's `GenerationConfig`: defaults of `generate()`. None: there is none."""
    extra_eos_token_ids: tuple[int, ...]
    """The tokenizer's end token, which config.json may not name; it ends a sequence, too."""
    origin: Origin | None
    """The checkpoint that the model was loaded from."""
    modules_to_save: tuple[str, ...]
    """Paths of modules that are trained whole beside LoRA, and saved with the adapter."""

    def __init__(self, config: C):
        self.config = config
        self.generation_config = None
        self.extra_eos_token_ids = ()
        self.origin = None
        self.modules_to_save = ()


def without_metadata(model: M) -> M:
    """A copy for compiled programs, which models of one config share; the weights are shared."""
    return shallow_copy(model, generation_config=None, extra_eos_token_ids=(), origin=None)
