"""Tiny models of the generation comparison, made from seeds, so that no weights are stored.

Every model has 96 tokens, of which 0 is only padding. The standard deviation of its logits is 1 or
more, so that a wrong term changes the chosen tokens.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

import tiny  # noqa: E402

VOCAB, PAD = 96, 0
_DECODER = {"vocab_size": VOCAB, "pad_token_id": PAD, "max_position_embeddings": 64}
_GPT2 = {"vocab_size": VOCAB, "pad_token_id": PAD, "n_positions": 64}
_T5 = {"vocab_size": VOCAB, "pad_token_id": PAD, "decoder_start_token_id": PAD, "eos_token_id": 1}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", _DECODER),
    "mistral": ("mistral", {**_DECODER, "sliding_window": 5}),
    "qwen3": ("qwen3", {**_DECODER, "sliding_window": 4}),
    "gpt2": ("gpt2", _GPT2),
    "t5": ("t5", _T5),
    "t5_relu": (
        "t5",
        {**_T5, "feed_forward_proj": "relu", "num_decoder_layers": 3, "d_model": 24},
    ),
    "llama_deep": ("llama", {**_DECODER, "num_hidden_layers": 6}),
    "llama_tied": ("llama", {**_DECODER, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    "gpt2_deep": ("gpt2", {**_GPT2, "n_layer": 4}),
    "mistral_deep": ("mistral", {**_DECODER, "num_hidden_layers": 4, "sliding_window": 5}),
}
"""Family in `tiny` and changes of its config, by name."""
EMBEDDING_SCALE = {"gpt2_deep": 0.3, "llama_tied": 0.3}
"""Factor of tied embeddings, whose logits would leave DoLa with one candidate."""
DRAFT_NOISE = 0.3
"""Relative noise on the weights of a draft."""


@functools.cache
def model(name: str) -> Any:
    """The jaxllm model `name`; `name` + "_draft" is the same model with noise on its weights."""
    base = name.removesuffix("_draft")
    family, changes = CONFIGS[base]
    made = scaled(tiny.make(family, **changes), EMBEDDING_SCALE.get(base, 1.0))
    return made if base == name else noisy(made)


def scaled(made: Any, factor: float) -> Any:
    """The model with its token embedding multiplied by `factor`."""

    def multiply(path: Any, leaf: jax.Array) -> jax.Array:
        return leaf * factor if "embed" in jax.tree_util.keystr(path) else leaf

    return jax.tree_util.tree_map_with_path(multiply, made).with_card(made.card)


def noisy(made: Any) -> Any:
    """The model with noise on every matrix, drawn by the path and shape of the parameter."""

    def add(path: Any, leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2:
            return leaf
        rng = np.random.default_rng([1, *jax.tree_util.keystr(path).encode()])
        noise = rng.standard_normal(leaf.shape) * float(jnp.std(leaf)) * DRAFT_NOISE
        return leaf + jnp.asarray(noise, leaf.dtype)

    return jax.tree_util.tree_map_with_path(add, made).with_card(made.card)


def is_encoder_decoder(name: str) -> bool:
    return name.startswith("t5")
