"""T5Gemma cases: sides that differ in every field, windows, soft caps."""

from __future__ import annotations

from dataclasses import replace

from parity_maker.inputs import Case, Grad
from parity_maker.t5 import t5_calls

CASES: list[Case] = []

TOKENS = {"pad_token_id": 2, "bos_token_id": 3, "eos_token_id": 4}
COMMON = {"vocab_size": 53, "dropout_rate": 0.2, "attention_dropout": 0.1}
SIDE = {
    **TOKENS,
    **COMMON,
    "model_type": "t5_gemma_module",
    "hidden_size": 24,
    "intermediate_size": 31,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-3,
    "query_pre_attn_scalar": 7,
    "sliding_window": 2,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 9.0,
    "max_position_embeddings": 40,
    "initializer_range": 0.03,
}
DECODER = {"hidden_size": 20, "intermediate_size": 27, "num_hidden_layers": 2, "sliding_window": 3}
GRADS = (
    "model.encoder.embed_tokens.weight",
    "model.encoder.layers.0.self_attn.q_proj.bias",
    "model.encoder.layers.1.self_attn.k_proj.weight",
    "model.encoder.layers.2.post_feedforward_layernorm.weight",
    "model.encoder.norm.weight",
    "model.decoder.embed_tokens.weight",
    "model.decoder.layers.0.pre_self_attn_layernorm.weight",
    "model.decoder.layers.0.cross_attn.k_proj.weight",
    "model.decoder.layers.1.cross_attn.q_proj.weight",
    "model.decoder.layers.1.pre_cross_attn_layernorm.weight",
    "model.decoder.layers.1.post_cross_attn_layernorm.weight",
    "model.decoder.layers.1.mlp.down_proj.weight",
)


def t5gemma(name: str, covers: str, encoder: dict, decoder: dict, **fields) -> None:
    config = {
        "model_type": "t5gemma",
        "is_encoder_decoder": True,
        "encoder": {**SIDE, **encoder},
        "decoder": {**SIDE, **DECODER, "is_decoder": True, **decoder},
        "decoder_start_token_id": 3,
        **TOKENS,
        **COMMON,
        **fields,
    }
    widths = tuple(config[side]["hidden_size"] for side in ("encoder", "decoder"))
    calls = t5_calls(name, config, widths)
    calls["generate"] = replace(calls["generate"], use_cache=True)
    tied = config.get("tie_word_embeddings", True)
    if not tied:
        calls["grad"] = Grad(calls["labels"].inputs, GRADS)
    absent = ("lm_head.out_proj.weight",) if tied else ()
    architecture = "T5GemmaForConditionalGeneration"
    norm = ("model.decoder.norm.weight",)
    CASES.append(Case(name, "t5gemma", covers, architecture, config, calls, norm, absent))


t5gemma(
    "t5gemma_full",
    "sides of different sizes, activations, scales, soft caps, RoPEs (v5) and windows, biases, MQA "
    "in the decoder, own head, gradients",
    {
        "attention_bias": True,
        "hidden_activation": "gelu",
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 120.0},
        "attn_logit_softcapping": 5.0,
    },
    {
        "attention_bias": True,
        "hidden_activation": "silu",
        "head_dim": 8,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 70.0},
    },
    tie_word_embeddings=False,
)
t5gemma(
    "t5gemma_published",
    "fields of a published config.json: tied, no biases, windows in every other layer, v4 rope",
    {"rope_theta": 90.0, "hidden_size": 20},
    {"rope_theta": 90.0, "num_hidden_layers": 3},
)
