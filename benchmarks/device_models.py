"""Models with random weights for measurements of a device, which need no download."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.models.build_options import Options
from jaxllm.models.model import model_shapes
from jaxllm.models.registry import model_spec

HEAD_DIM = 64
"""Size of a head of each small model: the smallest that all attention kernels take."""

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 1000,
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
T5: dict[str, Any] = {
    "model_type": "t5",
    "vocab_size": 1000,
    "d_model": 256,
    "d_kv": HEAD_DIM,
    "d_ff": 512,
    "num_layers": 2,
    "num_heads": 4,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
    "dropout_rate": 0.0,
}
BART: dict[str, Any] = {
    "model_type": "bart",
    "vocab_size": 1000,
    "d_model": 256,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 512,
    "decoder_ffn_dim": 512,
    "max_position_embeddings": 512,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
QWEN2: dict[str, Any] = {
    **LLAMA,
    "use_sliding_window": True,
    "sliding_window": 100,
    "max_window_layers": 1,
}
GEMMA: dict[str, Any] = {**LLAMA, "head_dim": HEAD_DIM}
GEMMA2: dict[str, Any] = {
    **GEMMA,
    "sliding_window": 100,
    "query_pre_attn_scalar": HEAD_DIM,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "t5": T5,
    "mistral": {**LLAMA, "sliding_window": 100},
    "mixtral": {**LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": QWEN2,
    "qwen3": {**QWEN2, "head_dim": HEAD_DIM},
    "qwen3_moe": {
        **LLAMA,
        "head_dim": HEAD_DIM,
        "decoder_sparse_step": 2,
        "moe_intermediate_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "gemma3_text": {
        **GEMMA2,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "sliding_window_pattern": 2,
        "rope_local_base_freq": 100.0,
    },
    "phi3": {**LLAMA, "sliding_window": 100, "pad_token_id": 0},
    "cohere": {**LLAMA, "logit_scale": 0.7, "use_qk_norm": True},
    "opt": {
        "model_type": "opt",
        "vocab_size": 1000,
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "ffn_dim": 512,
        "max_position_embeddings": 512,
    },
    "gpt_neo": {
        "model_type": "gpt_neo",
        "vocab_size": 1000,
        "hidden_size": 256,
        "num_layers": 2,
        "num_heads": 4,
        "max_position_embeddings": 512,
        "attention_layers": ["global", "local"],
        "window_size": 100,
    },
    "gptj": {**GPT2, "rotary_dim": 32},
    "bloom": {
        "model_type": "bloom",
        "vocab_size": 1000,
        "hidden_size": 256,
        "n_layer": 2,
        "n_head": 4,
    },
    "bart": BART,
    "marian": BART,
    "mbart": BART,
    "m2m_100": {**BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    "pegasus": BART,
    "xglm": {
        "model_type": "xglm",
        "vocab_size": 1000,
        "d_model": 256,
        "num_layers": 2,
        "attention_heads": 4,
        "ffn_dim": 512,
        "max_position_embeddings": 512,
    },
    "umt5": T5,
    "t5gemma": {
        "model_type": "t5gemma",
        "vocab_size": 1000,
        "encoder": {name: value for name, value in GEMMA2.items() if name != "model_type"},
        "decoder": {name: value for name, value in GEMMA2.items() if name != "model_type"},
    },
}
"""One small model of each family. The first three have no dropout, since what it draws depends on
the attention kernel, and they are trained too."""
SMALL = {family: {**config, "model_type": family} for family, config in SMALL.items()}
UNSCALED = ("t5", "umt5", "gpt_neo")
"""Families that do not divide their scores by the square root of the size of a head."""


def shapes_on(
    config: Mapping[str, Any],
    device: Any,
    dtype: Any,
    attn_implementation: str = "auto",
    param_dtype: Any = None,
) -> Any:
    """The shapes of a model of a config.json object, as it would be built for a device."""
    spec = model_spec(config)
    options = Options.on(
        device.platform,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype if param_dtype is None else param_dtype),
        attn_implementation=attn_implementation,
    )
    return model_shapes(spec.make, spec.config, options)


def small_model(family: str, device: Any, dtype: Any, attn_implementation: str = "auto") -> Any:
    """The small model of a family on a device, with the same weights on every device.

    Matrices keep the size of what they multiply, so that logits have a standard deviation of 1 or
    more and a fault shows in them.
    """
    shapes = shapes_on(SMALL[family], device, dtype, attn_implementation)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng([*name.encode()]).standard_normal(leaf.shape, np.float32)
        if "norm" in name and "weight" in name:
            values = 0.2 * values + ("gemma" not in family)  # Gemma's norms add one
        elif len(leaf.shape) > 1:
            values *= 1 / np.sqrt(leaf.shape[-1])
            if family in UNSCALED and ".q." in name:
                values /= np.sqrt(HEAD_DIM)
        return jax.device_put(values.astype(leaf.dtype), device)

    return jax.tree_util.tree_map_with_path(draw, shapes).with_card(shapes.card)


def random_model(
    config: Mapping[str, Any],
    device: Any,
    dtype: Any,
    attn_implementation: str = "auto",
    param_dtype: Any = None,
) -> Any:
    """A model of a config.json object whose weights the device draws itself, which takes seconds
    where the processor would take minutes."""
    shapes = shapes_on(config, device, dtype, attn_implementation, param_dtype)
    leaves, structure = jax.tree.flatten(shapes)
    with jax.default_device(device):
        key = jax.random.key(0, impl="rbg")
        weights = [
            jax.device_put(_drawn(jax.random.fold_in(key, i), leaf.shape, leaf.dtype), device)
            for i, leaf in enumerate(leaves)
        ]
    return jax.tree.unflatten(structure, weights).with_card(shapes.card)


@partial(jax.jit, static_argnums=(1, 2))
def _drawn(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random matrices that keep the size of what they multiply, and vectors of ones."""
    if len(shape) < 2:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, dtype) * jnp.asarray(shape[-1] ** -0.5, dtype)
