"""Exports configs as config.json objects, in a form that both transformers 4 and 5 read."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxllm.models.rotary_decoder import RotaryConfig
from jaxllm.models.t5.config import T5Config
from jaxllm.nn.rope import Rope


def config_to_json(config: Any, model_type: str, architecture: str) -> dict[str, Any]:
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
        raw["rope_theta"] = config.rotary.theta
        raw["rope_scaling"] = _rope_scaling(config.rotary)
    if isinstance(config, T5Config):
        raw["scale_decoder_outputs"] = config.scaled
        raw["is_encoder_decoder"] = "Encoder" not in architecture
    return raw


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    keys = {
        "default": (),
        "linear": ("factor",),
        "dynamic": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
        "longrope": ("factor", "attention_factor", "short_factor", "long_factor"),
        "yarn": (
            "factor",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        ),
    }[rope.rope_type]
    if rope.rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope.rope_type}
    for key in keys:
        value = getattr(rope, key)
        if value is not None:
            scaling[key] = list(value) if isinstance(value, tuple) else value
    if rope.rope_type in ("llama3", "longrope", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_positions
    return scaling
