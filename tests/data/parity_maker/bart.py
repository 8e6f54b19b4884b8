"""BART cases: sides of different sizes, scaled embeddings, a bias of the logits."""

from __future__ import annotations

from collections.abc import Callable

from parity_maker.inputs import Beams, Case, Grad, Weights, merged
from parity_maker.layouts import with_sinusoids
from parity_maker.t5 import t5_calls

CASES: list[Case] = []
Layout = Callable[[Weights, dict], Weights]

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


def bart(
    name: str,
    covers: str,
    *,
    base: dict = BART,
    architecture: str = "BartForConditionalGeneration",
    grads: tuple[str, ...] = (),
    absent: tuple[str, ...] = (*EMBEDDINGS, "lm_head.weight"),
    layout: Layout = lambda weights, config: weights,
    **fields,
) -> None:
    """A case of BART or of a relative.

    Args:
        base: config that `fields` change.
        grads: parameters whose gradients are stored.
        absent: tensors that the file does not hold.
        layout: changes the file's tensors.
    """
    config = merged(base, fields)
    calls = t5_calls(name, config)
    if base is not BART:
        calls["generate_beams"] = Beams(calls["generate"].make)
    if grads:
        calls["grad"] = Grad(calls["labels"].inputs, grads)
    last = f"model.decoder.layers.{config['decoder_layers'] - 1}.final_layer_norm"
    if config["model_type"] in ("mbart", "m2m_100", "pegasus"):
        last = "model.decoder.layer_norm"  # they have a norm after the last layer
    norm = (f"{last}.weight", f"{last}.bias")
    family = config["model_type"]
    CASES.append(Case(name, family, covers, architecture, config, calls, norm, absent, layout))


bart(
    "bart_full",
    "scaled embeddings, gelu tanh, sides of different sizes, bias of the logits, gradients",
    grads=GRADS,
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

SINUSOIDS = tuple(f"model.{side}.embed_positions.weight" for side in ("encoder", "decoder"))
WITHOUT = {"model.encoder.embed_positions.weight", "model.encoder.layernorm_embedding.bias"}
WITHOUT |= {"model.decoder.embed_positions.weight"}
MARIAN = BART | {
    "model_type": "marian",
    "activation_function": "swish",
    "decoder_start_token_id": 2,
    "bad_words_ids": [[2]],
}
bart(
    "marian_full",
    "sinusoidal positions from 0, scaled embeddings, swish, start token pad, gradients",
    base=MARIAN,
    architecture="MarianMTModel",
    grads=tuple(name for name in GRADS if name not in WITHOUT),
    absent=(*EMBEDDINGS, *SINUSOIDS, "lm_head.weight"),
)
bart(
    "marian_separate",
    "an embedding for each side, a head of its own, no scale; positions in the file; gradients",
    base=MARIAN,
    architecture="MarianMTModel",
    grads=(*EMBEDDINGS, "lm_head.weight", "model.decoder.layers.2.fc2.weight"),
    absent=SINUSOIDS,
    layout=with_sinusoids,
    share_encoder_decoder_embeddings=False,
    tie_word_embeddings=False,
    scale_embedding=False,
)
bart(
    "mbart_full",
    "norms before sublayers, after the embeddings and at the end; labels end in the start token; "
    "gradients",
    base=BART | {"model_type": "mbart"},
    architecture="MBartForConditionalGeneration",
    grads=(*GRADS, "model.encoder.layer_norm.weight", "model.decoder.layer_norm.bias"),
)
bart(
    "m2m_100_full",
    "sinusoidal positions after the pad token's id, scaled embeddings, final norms; gradients",
    base=BART | {"model_type": "m2m_100"},
    architecture="M2M100ForConditionalGeneration",
    grads=(*(name for name in GRADS if name not in WITHOUT), "model.encoder.layer_norm.weight"),
    scale_embedding=False,
    encoder_layerdrop=0.05,
)
bart(
    "pegasus_full",
    "sinusoidal positions in the file, scaled embeddings, final norms, pad as start; gradients",
    base=BART | {"model_type": "pegasus", "decoder_start_token_id": 2},
    architecture="PegasusForConditionalGeneration",
    grads=(*(name for name in GRADS if name not in WITHOUT), "model.encoder.layer_norm.weight"),
    absent=(*EMBEDDINGS, "lm_head.weight"),
    layout=with_sinusoids,
)
