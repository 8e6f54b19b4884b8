"""Tiny models with random weights, one a family, for tests that need no stored reference.

Weights have standard deviations around 0.5, so that logits do, too, and a term that is left out
shows.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.models.build_options import Options
from jaxllm.models.model import model_shapes
from jaxllm.models.registry import model_spec
from jaxllm.nn.quantized import QuantizedExpertLinear

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 50,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 50,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 48,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
    },
}
FAMILIES = tuple(CONFIGS)
CONFIGS["bart"] = {
    "model_type": "bart",
    "vocab_size": 50,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
}
"""Families that differ in kind; most tests run on these alone."""
_TOKENS = {"pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
BART: dict[str, dict[str, Any]] = {
    "marian": {**CONFIGS["bart"], **_TOKENS, "model_type": "marian"},
    "mbart": {**CONFIGS["bart"], "model_type": "mbart", "decoder_start_token_id": 2},
    "m2m_100": {
        **CONFIGS["bart"],
        "model_type": "m2m_100",
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
    },
    "pegasus": {**CONFIGS["bart"], **_TOKENS, "model_type": "pegasus"},
}
"""BART's relatives."""
CONFIGS |= BART
CONFIGS["xglm"] = {
    "model_type": "xglm",
    "vocab_size": 50,
    "d_model": 32,
    "num_layers": 2,
    "attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
}
ROTARY: dict[str, dict[str, Any]] = {
    "mistral": {**CONFIGS["llama"], "model_type": "mistral", "sliding_window": 4},
    "qwen2": {
        **CONFIGS["llama"],
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
}
ROTARY["qwen3"] = {**ROTARY["qwen2"], "model_type": "qwen3", "head_dim": 8}
ROTARY["gemma"] = {**CONFIGS["llama"], "model_type": "gemma", "head_dim": 8, "pad_token_id": 0}
ROTARY["gemma2"] = {
    **CONFIGS["llama"],
    "model_type": "gemma2",
    "head_dim": 8,
    "sliding_window": 4,
    "query_pre_attn_scalar": 6,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 8.0,
}
ROTARY["gemma3_text"] = {
    **ROTARY["gemma2"],
    "model_type": "gemma3_text",
    "attn_logit_softcapping": None,
    "sliding_window_pattern": 2,
    "rope_local_base_freq": 100.0,
    "pad_token_id": 0,
}
ROTARY["phi3"] = {
    **CONFIGS["llama"],
    "model_type": "phi3",
    "pad_token_id": 0,
    "sliding_window": 4,
    "partial_rotary_factor": 0.75,
}
ROTARY["cohere"] = {
    **CONFIGS["llama"],
    "model_type": "cohere",
    "pad_token_id": 0,
    "logit_scale": 0.7,
    "use_qk_norm": True,
}
ROTARY["mixtral"] = {
    **CONFIGS["llama"],
    "model_type": "mixtral",
    "sliding_window": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.3,
}
ROTARY["qwen3_moe"] = {
    **CONFIGS["llama"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "use_sliding_window": True,
    "sliding_window": 4,
    "decoder_sparse_step": 2,  # the second layer has experts, the first none
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
}
"""Llama's relatives: windows in all layers, in the last, or in every other one; experts."""
CONFIGS |= ROTARY
_MODULE: dict[str, Any] = {
    name: value
    for name, value in ROTARY["gemma2"].items()
    if name not in ("model_type", "bos_token_id", "eos_token_id")
}
CONFIGS["t5gemma"] = {
    "model_type": "t5gemma",
    "encoder": _MODULE | {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 6},
    "decoder": _MODULE,
    "vocab_size": 50,
}
CONFIGS["opt"] = {
    "model_type": "opt",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 48,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": 24,
}
CONFIGS["gpt_neo"] = {
    "model_type": "gpt_neo",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "max_position_embeddings": 64,
    "attention_layers": ["global", "local"],
    "window_size": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS["gptj"] = {**CONFIGS["gpt2"], "model_type": "gptj", "rotary_dim": 6}
CONFIGS["bloom"] = {
    "model_type": "bloom",
    "vocab_size": 50,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 6,
    "pad_token_id": 3,
}
GPT_RELATIVES = ("opt", "gpt_neo", "gptj", "bloom")
"""GPT-2's relatives, one of them with ALiBi for a number of heads that is no power of two."""


def mostly(family: str) -> list[Any]:
    """All families for a parametrized test of which that of one runs by default."""
    return [
        name if name == family else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ]


def make(
    family: str | Mapping[str, Any],
    *,
    architecture: str | None = None,
    seed: int = 0,
    options: Options | None = None,
    **changes: Any,
) -> Any:
    """A model of that family's tiny config, or of a config.json object, with `changes`.

    Every parameter is drawn by its path and shape, so that two configs that differ in one field
    share all the weights that they can.
    """
    raw = {**(CONFIGS[family] if isinstance(family, str) else family), **changes}
    spec = model_spec(raw, architecture)
    options = Options() if options is None else options
    shapes = model_shapes(spec.make, spec.config, options)

    def draw(path, leaf):
        name = jax.tree_util.keystr(path)
        rng = np.random.default_rng([seed, *name.encode()])
        values = rng.standard_normal(leaf.shape)
        if "norm" in name and "weight" in name:
            values = 1 + 0.2 * values
        elif leaf.ndim >= 2 and "embed" not in name and "positions" not in name:
            values *= 1.5 / np.sqrt(leaf.shape[-1])
        return jnp.asarray(values, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes).with_card(shapes.card)


@functools.cache
def cached(family: str) -> Any:
    """The family's model as it is in CONFIGS; shared, so that its programs compile once."""
    return make(family)


def values(layer: Any) -> Any:
    """Float weights of a quantized layer, or of a quantized layer of all experts."""
    dequantize = type(layer.matrix).dequantized
    is_stack = isinstance(layer, QuantizedExpertLinear)
    return (jax.vmap(dequantize) if is_stack else dequantize)(layer.matrix)


def ids(rows: int = 2, columns: int = 9, *, seed: int = 0, vocab: int = 50) -> np.ndarray:
    """Token ids from 3 on: none of them is a special token."""
    return np.random.default_rng(seed).integers(3, vocab, (rows, columns))


def logits(model: Any, tokens: np.ndarray | None = None, **inputs: Any) -> np.ndarray:
    """Logits of one call; T5 gets the tokens on both sides."""
    tokens = ids() if tokens is None else tokens
    if model.is_encoder_decoder and "decoder_input_ids" not in inputs:
        inputs["decoder_input_ids"] = tokens[:, ::-1]
    return np.asarray(model(tokens, **inputs).logits)
