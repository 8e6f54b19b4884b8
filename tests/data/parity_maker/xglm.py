"""XGLM cases."""

from __future__ import annotations

from parity_maker.inputs import (
    Case,
    Forward,
    Grad,
    decoder_calls,
    decoder_only,
    noise,
    padding_mask,
    random_state,
)

CASES: list[Case] = []

XGLM = {
    "model_type": "xglm",
    "vocab_size": 53,
    "d_model": 20,
    "num_layers": 2,
    "attention_heads": 5,
    "ffn_dim": 31,
    "max_position_embeddings": 40,
    "activation_function": "gelu_new",
    "dropout": 0.2,
    "attention_dropout": 0.15,
    "activation_dropout": 0.25,
    "init_std": 0.05,
    "scale_embedding": True,
    "pad_token_id": 5,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "decoder_start_token_id": 4,
}
GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.1.self_attn.out_proj.bias",
    "model.layers.1.fc1.weight",
    "model.layers.1.final_layer_norm.weight",
    "model.layer_norm.bias",
)
NORM = ("model.layer_norm.weight", "model.layer_norm.bias")
CALLS = decoder_calls("xglm_full", XGLM, XGLM["d_model"])
CALLS["grad"] = Grad(CALLS["labels"].inputs, GRADS)


def xglm(name: str, covers: str, config: dict, calls: dict, absent: tuple[str, ...]) -> None:
    CASES.append(Case(name, "xglm", covers, "XGLMForCausalLM", config, calls, NORM, absent))


xglm(
    "xglm_full",
    "sinusoidal positions from 2, of which that of the pad token's id, 5, is zero; gradients",
    XGLM,
    CALLS,
    ("lm_head.weight",),
)
CROSS = XGLM | {
    "add_cross_attention": True,
    "tie_word_embeddings": False,
    "scale_embedding": False,
    "activation_function": "relu",
}
rng = random_state("xglm_cross")
plain = decoder_only(rng, CROSS, side="right")
states = {
    "encoder_hidden_states": noise(rng, 3, 6, CROSS["d_model"]),
    "encoder_attention_mask": padding_mask((6, 2, 4), "right"),
}
xglm(
    "xglm_cross",
    "cross-attention, a head of its own, embeddings without scale",
    CROSS,
    {"plain": Forward({**plain, **states}, hidden=True, attentions=True)},
    (),
)
