"""LoRA in training: splits parameters into trained and frozen ones.

Re-exports `LoraConfig`, `add_lora` and `merge_lora` of `jaxllm.models.lora`, and `with_parameters`
of `jaxllm.models.weights`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from jaxllm.models.lora import LoraConfig, add_lora, lora_layers, merge_lora
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters, with_parameters


def is_trainable(path: str, modules_to_save: Iterable[str] = ()) -> bool:
    """True for trained parameters: LoRA's matrices, and the modules that are trained in full.

    >>> is_trainable("backbone.stack.blocks.0.attn.q.lora_a")
    True
    >>> is_trainable("backbone.stack.blocks.0.attn.q.weight")
    False
    >>> is_trainable("score.weight", modules_to_save=("score",))
    True
    """
    module, _, name = path.rpartition(".")
    return name.startswith("lora_") or module in modules_to_save


def partition(model: Model[Any]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """Splits the parameters of a model with LoRA into (trained, frozen), by path.

    ``with_parameters(model, trained)`` is the way back: a model with these arrays.
    """
    saved = model.checked_card("partition").lora_modules("partition")
    params = parameters(model)
    trained = {path: x for path, x in params.items() if is_trainable(path, saved)}
    return trained, {path: x for path, x in params.items() if path not in trained}


__all__ = [
    "LoraConfig",
    "add_lora",
    "is_trainable",
    "lora_layers",
    "merge_lora",
    "partition",
    "with_parameters",
]
