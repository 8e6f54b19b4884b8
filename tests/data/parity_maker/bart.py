"""BART cases: sides of different sizes, scaled embeddings, a bias of the logits."""

from __future__ import annotations

from parity_maker.inputs import Case, Grad, merged
from parity_maker.t5 import t5_calls

CASES: list[Case] = []

BART = {
    "model_type": "bart",
    "vocab_size": 53,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 31,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 40,
    "activation_function": "gelu_new",
    "dropout": 0.2,
    "attention_dropout": 0.15,
    "activation_dropout": 0.25,
    "init_std": 0.05,
    "scale_embedding": True,
    "is_encoder_decoder": True,
    "pad_token_id": 2,
    "bos_token_id": 5,
    "eos_token_id": 4,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}
EMBEDDINGS = ("model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
GRADS = (
    "model.shared.weight",
    "model.encoder.embed_positions.weight",
    "model.encoder.layernorm_embedding.bias",
    "model.encoder.layers.0.self_attn.q_proj.weight",
    "model.encoder.layers.1.final_layer_norm.weight",
    "model.decoder.embed_positions.weight",
    "model.decoder.layers.0.self_attn.v_proj.bias",
    "model.decoder.layers.1.encoder_attn.k_proj.weight",
    "model.decoder.layers.2.encoder_attn_layer_norm.weight",
    "model.decoder.layers.2.fc2.weight",
)


def bart(name: str, covers: str, *, with_gradients: bool = False, **fields) -> None:
    config = merged(BART, fields)
    calls = t5_calls(name, config)
    if with_gradients:
        calls["grad"] = Grad(calls["labels"].inputs, GRADS)
    last = f"model.decoder.layers.{config['decoder_layers'] - 1}.final_layer_norm"
    absent = (*EMBEDDINGS, "lm_head.weight")
    norm = (f"{last}.weight", f"{last}.bias")
    architecture = "BartForConditionalGeneration"
    CASES.append(Case(name, "bart", covers, architecture, config, calls, norm, absent))


bart(
    "bart_full",
    "scaled embeddings, gelu tanh, sides of different sizes, bias of the logits, gradients",
    with_gradients=True,
)
bart(
    "bart_published",
    "embeddings without scale, relu, dropouts of 0, one decoder layer",
    scale_embedding=False,
    activation_function="relu",
    dropout=0.0,
    attention_dropout=0.0,
    activation_dropout=0.0,
    decoder_layers=1,
)
