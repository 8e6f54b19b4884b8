"""T5, mT5 and umT5 cases."""

from __future__ import annotations

from parity_maker.inputs import (
    ABSENT,
    Case,
    Forward,
    Grad,
    encoder_decoder,
    keep_fraction,
    merged,
    noise,
    random_state,
    seq2seq_labels,
    sources,
)
from parity_maker.layouts import old_t5

CASES: list[Case] = []

T5 = {
    "model_type": "t5",
    "vocab_size": 53,
    "d_model": 18,
    "d_kv": 5,
    "d_ff": 31,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 3,
    "relative_attention_num_buckets": 13,
    "relative_attention_max_distance": 19,
    "dropout_rate": 0.2,
    "layer_norm_epsilon": 1e-3,
    "initializer_factor": 0.7,
    "feed_forward_proj": "relu",
    "is_encoder_decoder": True,
    "pad_token_id": 2,
    "decoder_start_token_id": 3,
    "eos_token_id": 4,
}
EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def t5(
    name: str, covers: str, calls: dict | None = None, head=False, layout=None, **fields
) -> None:
    config = merged(T5, fields)
    version = config.pop("version", "5.23.0")
    architecture = config.pop("architecture", "T5ForConditionalGeneration")
    if calls is None:
        plain = Forward(encoder_decoder(random_state(name), config), hidden=True)
        calls = {"plain": plain, "generate": sources(config)}
    stack = "encoder" if architecture == "T5EncoderModel" else "decoder"
    absent = EMBEDDINGS if head else (*EMBEDDINGS, "lm_head.weight")
    norm = (f"{stack}.final_layer_norm.weight",)
    extra = {"version": version} | ({} if layout is None else {"layout": layout})
    CASES.append(Case(name, "t5", covers, architecture, config, calls, norm, absent, **extra))


def t5_calls(name: str, config: dict, widths: tuple[int, ...] = ()) -> dict:
    """The calls of a full case; `widths` are those of encoder and decoder, by default `d_model`."""
    rng = random_state(name)
    encoder_width, decoder_width = widths or (config["d_model"],) * 2
    plain = encoder_decoder(rng, config)
    bare = {k: plain[k][1:2] for k in ("input_ids", "decoder_input_ids")}
    embeds = {
        "inputs_embeds": noise(rng, 3, 11, encoder_width),
        "attention_mask": plain["attention_mask"],
        "decoder_inputs_embeds": noise(rng, 3, 7, decoder_width),
        "decoder_attention_mask": plain["decoder_attention_mask"],
    }
    no_decoder_mask = {k: v for k, v in plain.items() if k != "decoder_attention_mask"}
    return {
        "plain": Forward(plain, hidden=True, attentions=True),
        "bare": Forward(bare),
        "no_decoder_mask": Forward(no_decoder_mask),
        "labels": Forward(seq2seq_labels(rng, plain, config)),
        "embeds": Forward(embeds),
        "generate": sources(config),
    }


relu_calls = t5_calls("t5_relu", T5)
SELF = "block.0.layer.0.SelfAttention."
relu_calls["grad"] = Grad(
    relu_calls["labels"].inputs,
    (
        "shared.weight",
        "encoder." + SELF + "q.weight",
        "encoder." + SELF + "relative_attention_bias.weight",
        "encoder.block.1.layer.1.DenseReluDense.wi.weight",
        "encoder.final_layer_norm.weight",
        "decoder." + SELF + "relative_attention_bias.weight",
        "decoder.block.2.layer.1.EncDecAttention.k.weight",
        "decoder.block.2.layer.2.DenseReluDense.wo.weight",
    ),
)
t5(
    "t5_relu",
    "v1.0: relu, tied, scaled head; deeper decoder; pad 2, start 3; repeated embeddings and an "
    "unused cross-attention bias in the file; gradients",
    relu_calls,
    layout=old_t5,
)
V11 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 3}
t5(
    "t5_v11",
    "v1.1: gated-gelu (gelu_new), own unscaled head, deeper encoder",
    t5_calls("t5_v11", {**T5, **V11}),
    head=True,
    num_decoder_layers=1,
    **V11,
)
t5(
    "t5_gated_silu",
    "gated-silu, num_decoder_layers absent (= num_layers), tied",
    feed_forward_proj="gated-silu",
    num_decoder_layers=ABSENT,
)
t5("t5_gelu", "plain gelu (erf), tied", feed_forward_proj="gelu")
RESAVED = {
    "feed_forward_proj": "gated-gelu",
    "is_gated_act": True,
    "dense_act_fn": "gelu_new",
    "tie_word_embeddings": True,
    "scale_decoder_outputs": False,
}
t5(
    "t5_flan_resaved",
    "flan as transformers 5 re-saves it: tie_word_embeddings true, scale_decoder_outputs false, "
    "lm_head.weight present and its own",
    head=True,
    **RESAVED,
)
t5(
    "t5_tied_unscaled",
    "tie_word_embeddings false but no lm_head.weight in the file: tied, not scaled",
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
)
FAR = {"lengths": (45, 30), "targets": (28, 40)}
t5(
    "t5_far",
    "13 buckets, max_distance 19, sequences far past it; own unscaled head",
    {
        "plain": Forward(encoder_decoder(random_state("t5_far"), T5, **FAR)),
        "generate": sources(T5, (45, 30), 30),
    },
    head=True,
    tie_word_embeddings=False,
)
DEFAULT_BUCKETS = {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128}
t5(
    "t5_default_buckets",
    "32 buckets, max_distance 128, sequences past it",
    {
        "plain": Forward(
            encoder_decoder(random_state("t5_default_buckets"), T5, (140,), (135,)),
        )
    },
    **DEFAULT_BUCKETS,
)
encoder_inputs = encoder_decoder(random_state("t5_encoder"), T5)
encoder_only = {k: encoder_inputs[k] for k in ("input_ids", "attention_mask")}
t5(
    "t5_encoder",
    "T5EncoderModel: last hidden state, hidden states, attentions, inputs_embeds",
    {
        "plain": Forward(encoder_only, hidden=True, attentions=True),
        "bare": Forward({"input_ids": encoder_only["input_ids"][1:2]}),
        "embeds": Forward(
            {
                "inputs_embeds": noise(random_state("t5_encoder:embeds"), 3, 11, 18),
                "attention_mask": encoder_only["attention_mask"],
            }
        ),
    },
    architecture="T5EncoderModel",
    feed_forward_proj="gated-gelu",
)
rng = random_state("t5_head_mask")
masked = encoder_decoder(rng, T5)
masks = {
    "head_mask": keep_fraction(rng, 2, 3),
    "decoder_head_mask": keep_fraction(rng, 3, 3),
    "cross_attn_head_mask": keep_fraction(rng, 3, 3),
}
t5(
    "t5_head_mask",
    "head_mask, decoder_head_mask, cross_attn_head_mask, each alone and together",
    {
        "plain": Forward(masked),
        **{key: Forward({**masked, key: value}) for key, value in masks.items()},
        "all_masks": Forward({**masked, **masks}, hidden=True, attentions=True),
    },
    version="4.57.6",
)
MT5 = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
t5(
    "mt5",
    "mT5: gated-gelu, own unscaled head",
    head=True,
    model_type="mt5",
    architecture="MT5ForConditionalGeneration",
    **MT5,
)
UMT5 = {"model_type": "umt5", "architecture": "UMT5ForConditionalGeneration"}
t5(
    "umt5",
    "umT5: a relative bias in every layer, own unscaled head",
    t5_calls("umt5", T5),
    head=True,
    version="4.57.6",
    **UMT5,
    **MT5,
)
t5(
    "umt5_tied",
    "umT5 with tie_word_embeddings true: tied and scaled",
    **UMT5,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=True,
)
