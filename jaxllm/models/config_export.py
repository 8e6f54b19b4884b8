"""Exports configs as config.json objects, in a form that both transformers 4 and 5 read."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.models.config import ModelConfig
from jaxllm.models.rotary_decoder import RotaryConfig
from jaxllm.models.t5.config import T5Config
from jaxllm.nn.rope_config import rope_to_config


def config_to_json(config: ModelConfig, model_type: str, architecture: str) -> dict[str, Any]:
    """A config.json object from which the config class's `from_dict` restores an equal config.

    >>> from jaxllm.models.gpt2 import GPT2Config
    >>> raw = config_to_json(GPT2Config(n_layer=2), "gpt2", "GPT2LMHeadModel")
    >>> GPT2Config.from_dict(raw) == GPT2Config(n_layer=2)
    True
    """
    if isinstance(config, T5Config) and config.bias_per_layer:
        model_type, architecture = "umt5", architecture.replace("T5", "UMT5", 1)
    raw: dict[str, Any] = {"architectures": [architecture], "model_type": model_type}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("rope", "bias_per_layer", "num_labels", "problem_type"):
            continue
        if value is None and field.name in ("head_dim", "is_gated_act", "dense_act_fn"):
            continue  # transformers takes null for a value
        raw[field.name] = list(value) if isinstance(value, tuple) else value
    if config.num_labels != 2:
        raw["id2label"] = {str(i): f"LABEL_{i}" for i in range(config.num_labels)}
    if config.problem_type is not None:
        raw["problem_type"] = config.problem_type
    if isinstance(config, RotaryConfig):
        raw |= rope_to_config(config.rotary)
    if isinstance(config, T5Config):
        raw["scale_decoder_outputs"] = config.scaled
        raw["is_encoder_decoder"] = "Encoder" not in architecture
    return raw
