"""Checks of config fields: types, sizes, rates. Each raises ConfigError, naming the field.

Fields of one name mean the same in all families, so `check_fields` checks them by their names.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, TypeGuard

import numpy as np

from jaxllm.common.errors import ConfigError, UnsupportedError, quoted
from jaxllm.nn.mlp import activation

MAX_LAYERS = 4096
MAX_SIZE = 2**26
FULL, SLIDING = "full_attention", "sliding_attention"
"""Entries of `layer_types`."""

# fmt: off
SIZES = frozenset({
    "vocab_size", "num_labels", "hidden_size", "n_embd", "d_model", "word_embed_proj_dim",
    "intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
    "num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "attention_heads",
    "encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv",
    "max_position_embeddings", "n_positions", "seq_length", "sliding_window", "window_size",
    "sliding_window_pattern", "query_pre_attn_scalar", "pretraining_tp", "num_local_experts",
    "num_experts_per_tok", "decoder_sparse_step", "moe_intermediate_size",
})
DEPTHS = frozenset({
    "num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers",
})
RATES = frozenset({
    "dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "resid_dropout",
    "embed_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "layerdrop",
    "encoder_layerdrop", "decoder_layerdrop", "classifier_dropout", "router_jitter_noise",
})
POSITIVE = frozenset({
    "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "initializer_range", "init_std",
    "initializer_factor", "logit_scale", "rope_local_base_freq", "final_logit_softcapping",
    "attn_logit_softcapping",
})
ACTIVATIONS = frozenset({"hidden_act", "activation_function"})
# fmt: on


def coerce(key: str, value: object, hint: object) -> Any:
    """Converts a value to the annotated type, or raises ConfigError. Integers pass as floats."""
    if isinstance(value, np.generic):
        value = value.item()
    for option in _options(hint):
        if option is type(None) and value is None:
            return None
        if option is bool and isinstance(value, bool):
            return value
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is float and is_float32_number(value):
            return float(value)
        if option is str and isinstance(value, str):
            return value
        if (
            typing.get_origin(option) is tuple
            and isinstance(value, list | tuple)
            and None not in value
        ):
            inner = typing.get_args(option)[0]
            return tuple(coerce(key, v, inner) for v in value)
        if dataclasses.is_dataclass(option) and isinstance(value, option):  # the RoPE
            return value
    if value is None:  # null in a file: not set
        return None
    raise ConfigError(f"{key}: expected {spelled(hint)}, found {quoted(value)}")


def _options(hint: object) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def spelled(hint: object) -> str:
    """A type in words, without None."""
    options = [option for option in _options(hint) if option is not type(None)]
    return " or ".join(getattr(option, "__name__", str(option)) for option in options)


def is_float32_number(value: object) -> TypeGuard[float]:
    """True for numbers in the range of float32; JSON integers can have any length."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30


def check_fields(config: Any) -> None:
    """Checks the fields whose names are known to hold a size, a rate and so on, unless not set."""
    for name in (field.name for field in dataclasses.fields(config)):
        if getattr(config, name) is None:
            continue
        if name in SIZES:
            check_size(config, name)
        elif name in DEPTHS:
            check_size(config, name, limit=MAX_LAYERS)
        elif name in RATES:
            check_rate(config, name)
        elif name in POSITIVE:
            check_positive(config, name)
        elif name in ACTIVATIONS:
            activation(getattr(config, name), where=config.written_names.get(name, name))


def check_size(config: object, *names: str, limit: int = MAX_SIZE) -> None:
    """Checks that each named field is an integer in 1..limit."""
    for name in names:
        value = getattr(config, name)
        if not 1 <= value <= limit:
            raise ConfigError(f"{name}: expected 1 to {limit}, found {quoted(value)}")


def check_rate(config: object, *names: str) -> None:
    """Checks that each named field is a probability below 1."""
    for name in names:
        value = getattr(config, name)
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}: expected 0 <= rate < 1, found {quoted(value)}")


def check_positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value > 0:
            raise ConfigError(f"{name}: expected a number > 0, found {quoted(value)}")


def check_divides(config: object, whole: str, part: str) -> None:
    a, b = getattr(config, whole), getattr(config, part)
    if a % b:
        raise ConfigError(f"{whole}: {a} is not a multiple of {part}, {b}")


def check_layer_types(types: tuple[str, ...] | None, layers: int) -> None:
    """Checks that `layer_types`, if set, names full or sliding attention for each layer."""
    if types is None:
        return
    if len(types) != layers:
        raise ConfigError(f"layer_types: {len(types)} layers, but num_hidden_layers is {layers}")
    for name in types:
        if name not in (FULL, SLIDING):
            raise UnsupportedError(
                f"layer_types: expected {FULL} or {SLIDING}, found {quoted(name)}"
            )
