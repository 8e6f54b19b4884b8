"""Random tiny models for `precision.py`, and the losses of a text; needs no torch."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

CONTEXT = 512
"""Tokens of a window of text, each of which begins anew."""
TOKENS = 96
"""Tokens of the stored sample."""
VOCAB = 64

_ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _ROTARY),
    "t5": ("T5ForConditionalGeneration", "T5Config", _T5),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", {**_ROTARY, "use_sliding_window": False}),
    "mt5": ("MT5ForConditionalGeneration", "MT5Config", _T5),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_ROTARY, "use_sliding_window": False}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_ROTARY, "sliding_window": 6}),
    "umt5": ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
}
"""Name -> the reference's class, its config's class, and fields of the config."""


def draw_config(rng: np.random.Generator, case: str) -> dict[str, Any]:
    """A random config of a family."""
    config = dict(CASES[case][2])
    tied = {"tie_word_embeddings": bool(rng.integers(2))}
    if "n_embd" in config:
        config["activation_function"] = str(rng.choice(["gelu_new", "gelu", "relu"]))
        config["scale_attn_by_inverse_layer_idx"] = bool(rng.integers(2))
        return config
    if "d_model" in config:
        kind = rng.choice(["relu", "gated-gelu", "gated-silu", "gelu"])
        return {**config, **tied, "feed_forward_proj": str(kind)}
    if case == "llama":
        config |= {"attention_bias": bool(rng.integers(2)), "mlp_bias": bool(rng.integers(2))}
    return {**config, **tied, "rope_theta": float(rng.choice([100.0, 10000.0]))}


def inputs(rng: np.random.Generator, case: str) -> dict[str, np.ndarray]:
    """Arguments of a call."""
    given = {"input_ids": rng.integers(3, VOCAB, (2, 12))}
    if "d_model" in CASES[case][2]:
        given["decoder_input_ids"] = rng.integers(3, VOCAB, (2, 7))
    return given


@jax.jit
def _log_probabilities(model: Any, ids: Any) -> Any:
    return jax.nn.log_softmax(model(ids[None]).logits[0].astype("float32"))


def token_losses(model: Any, ids: np.ndarray) -> np.ndarray:
    """Negative log-likelihood of every token of a text but the first."""
    scores = np.asarray(_log_probabilities(model, ids))
    return -scores[np.arange(len(ids) - 1), ids[1:]].astype(np.float64)
