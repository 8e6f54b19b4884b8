"""Models with random weights for measurements of a device, which need no download."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxllm.models.build_options import Options
from jaxllm.models.model import model_shapes
from jaxllm.models.registry import model_spec
from jaxllm.nn.attention import implementation_for

SMOLLM2: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""config.json of SmolLM2-135M, as far as it shapes programs."""

SMALL: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 1000,
        "n_embd": 256,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 512,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 1000,
        "d_model": 256,
        "d_kv": 64,
        "d_ff": 512,
        "num_layers": 2,
        "num_heads": 4,
        "feed_forward_proj": "gated-gelu",
        "tie_word_embeddings": False,
        "dropout_rate": 0.0,
    },
}
"""One small model of each family, without dropout, whose draws depend on the attention kernel."""


def random_model(
    config: Mapping[str, Any], device: Any, dtype: Any, attn_implementation: str = "auto"
) -> Any:
    """A model of a config.json object on a device, with the same weights on every device.

    Matrices keep the size of what they multiply, so that logits have a standard deviation of 1 or
    more and a fault shows in them.
    """
    spec = model_spec(config)
    implementation = implementation_for(attn_implementation, device.platform)
    options = Options(dtype=dtype, param_dtype=dtype, attn_implementation=implementation)
    shapes = model_shapes(spec.make, spec.config, options)

    def draw(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        name = jax.tree_util.keystr(path)
        values = np.random.default_rng([*name.encode()]).standard_normal(leaf.shape, np.float32)
        if "norm" in name and "weight" in name:
            values = 1 + 0.2 * values
        elif len(leaf.shape) == 2:
            values *= 1 / np.sqrt(leaf.shape[1])
            if shapes.is_encoder_decoder and ".q." in name:
                values /= np.sqrt(spec.config.d_kv)  # T5 does not scale its scores
        return jax.device_put(values.astype(leaf.dtype), device)

    return jax.tree_util.tree_map_with_path(draw, shapes).with_card(shapes.card)
