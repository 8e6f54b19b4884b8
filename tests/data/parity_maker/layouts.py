"""Layouts of weight files that exist on the Hub: renamed keys, repeated tensors, buffers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from parity_maker.inputs import Weights

SIDES = ("encoder", "decoder")


def without_prefix(prefix: str) -> Callable[[Weights, dict], Weights]:
    """Saved from the base model: no `model.` / `transformer.` before the names."""
    return lambda weights, config: {k.removeprefix(prefix): v for k, v in weights.items()}


def with_inv_freq(weights: Weights, config: dict) -> Weights:
    """Llama files of 2023 hold each layer's rotary frequencies; readers skip them."""
    frequencies = np.linspace(1, 0.1, config["head_dim"] // 2, dtype=np.float32)
    name = "model.layers.{}.self_attn.rotary_emb.inv_freq"
    layers = range(config["num_hidden_layers"])
    return weights | {name.format(i): frequencies for i in layers}


def split_experts(weights: Weights) -> Weights:
    """Gate and up projections of stacked experts apart: transformers 5 has them in one tensor.

    A stack gets the name of an expert's tensor, with ``{e}`` for its number.
    """
    split = {}
    for name, x in weights.items():
        module, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            parts = zip(("gate_proj", "up_proj"), np.split(x, 2, axis=1), strict=True)
        elif module.endswith("experts"):
            parts = [(leaf, x)]
        else:
            split[name] = x
            continue
        split |= {f"{module}.{{e}}.{part}.weight": stack for part, stack in parts}
    return split


def one_expert_a_tensor(weights: Weights, config: dict) -> Weights:
    """As in all published files, and as save_pretrained writes them."""
    single = {}
    for name, x in split_experts(weights).items():
        stack = x if "{e}" in name else [x]
        single |= {name.replace("{e}", str(number)): tensor for number, tensor in enumerate(stack)}
    return single


MIXTRAL = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def mixtral_name(name: str) -> str:
    """Mixtral's own name of a tensor of experts or a router."""
    for old, new in MIXTRAL.items():
        name = name.replace(old, new)
    return name


def mixtral(weights: Weights, config: dict) -> Weights:
    return {mixtral_name(k): v for k, v in one_expert_a_tensor(weights, config).items()}


def old_gpt2(weights: Weights, config: dict) -> Weights:
    """openai-community/gpt2: no prefix, and each block's causal mask and its fill value."""
    weights = without_prefix("transformer.")(weights, config)
    n = config["n_positions"]
    mask = np.tril(np.ones((1, 1, n, n), np.float32))
    for i in range(config["n_layer"]):
        weights[f"h.{i}.attn.bias"] = mask
        weights[f"h.{i}.attn.masked_bias"] = np.array(-1e4, np.float32)
    return weights


def old_gpt_neo(weights: Weights, config: dict) -> Weights:
    """EleutherAI/gpt-neo: no prefix, and each block's causal mask and its fill value."""
    weights = without_prefix("transformer.")(weights, config)
    return with_masks(weights, config["max_position_embeddings"], "h.{}.attn.attention")


def old_gptj(weights: Weights, config: dict) -> Weights:
    """EleutherAI/gpt-j-6b: each block's causal mask and its fill value."""
    return with_masks(weights, config["n_positions"], "transformer.h.{}.attn")


def with_masks(weights: Weights, n: int, name: str) -> Weights:
    """The two layers' causal masks of n positions, and their fill values."""
    for i in range(2):
        weights[f"{name.format(i)}.bias"] = np.tril(np.ones((1, 1, n, n), np.uint8))
        weights[f"{name.format(i)}.masked_bias"] = np.array(-1e9, np.float32)
    return weights


def with_tied_head(head: str, embedding: str) -> Callable[[Weights, dict], Weights]:
    """The tied head is in the file as well, equal to the embedding."""
    return lambda weights, config: {**weights, head: weights[embedding].copy()}


def old_t5(weights: Weights, config: dict) -> Weights:
    """google-t5 files repeat the embedding, and hold a cross-attention bias that nobody uses."""
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    shape = config["relative_attention_num_buckets"], config["num_heads"]
    return weights | {
        "encoder.embed_tokens.weight": weights["shared.weight"].copy(),
        "decoder.embed_tokens.weight": weights["shared.weight"].copy(),
        bias: np.full(shape, 3.0, np.float32),
    }


def with_sinusoids(weights: Weights, config: dict) -> Weights:
    """Pegasus's files and Marian's old ones hold the tables of sinusoidal positions."""
    width, rows = config["d_model"], config["max_position_embeddings"]
    rates = np.power(10000, np.arange(0, width, 2) / width)
    angles = np.arange(rows)[:, None] / rates
    table = np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
    return weights | {f"model.{side}.embed_positions.weight": table for side in SIDES}
