"""Names of a model's modules in PEFT's files, and the limits of that format."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from jaxllm.common.errors import UnsupportedError
from jaxllm.models.classifier import SequenceClassifier
from jaxllm.models.decoder_only import CausalLM
from jaxllm.models.lora import base_entries, table_of
from jaxllm.models.model import Model
from jaxllm.models.weights import Entry

CONFIG = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


def weight_entries(model: Model[Any]) -> dict[str, Entry]:
    """Table entries of the base model's weights, by the module's Hugging Face name."""
    return {
        entry.tensor.removesuffix(".weight"): entry
        for entry in base_entries(model)
        if entry.tensor.endswith(".weight")
    }


def paths_of(entry: Entry) -> list[str]:
    """Paths of our modules that share one Hugging Face weight."""
    return [ours.removesuffix(".weight") for ours in entry.parameters]


def task_of(model: Model[Any]) -> str:
    """PEFT's task type of a model."""
    if isinstance(model, SequenceClassifier):
        return "SEQ_CLS"
    if isinstance(model, CausalLM):
        return "CAUSAL_LM"
    return "SEQ_2_SEQ_LM" if model.is_encoder_decoder else "FEATURE_EXTRACTION"


def check_tied(model: Model[Any], paths: Container[str]) -> None:
    """Raises UnsupportedError if several modules share a weight: PEFT would untie them."""
    headless = getattr(model, "lm_head", True) is None  # tied to the embedding
    for pattern, ours in table_of(model).copies:
        if ours in paths and (headless or "lm_head" not in pattern):
            raise UnsupportedError(
                f"modules_to_save: {ours} is used in several places, which PEFT's files cannot "
                "say; write the merged model (merge_lora, save_hf) instead"
            )
