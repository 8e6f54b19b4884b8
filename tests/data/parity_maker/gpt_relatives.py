"""Cases of GPT-2's relatives: OPT, GPT-Neo, GPT-J and BLOOM."""

from __future__ import annotations

from collections.abc import Callable

from parity_maker.inputs import (
    ABSENT,
    TASKS,
    Case,
    Forward,
    Grad,
    classifier_calls,
    decoder_calls,
    decoder_only,
    labels_of,
    merged,
    prompts,
    random_state,
)
from parity_maker.layouts import old_gpt_neo, old_gptj, without_prefix

CASES: list[Case] = []

TOKENS = {"vocab_size": 51, "bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 0}
OPT = {
    **TOKENS,
    "model_type": "opt",
    "hidden_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 27,
    "max_position_embeddings": 29,
    "word_embed_proj_dim": 12,
    "activation_function": "gelu_new",
    "dropout": 0.2,
    "attention_dropout": 0.15,
    "init_std": 0.05,
}
GPT_NEO = {
    **TOKENS,
    "model_type": "gpt_neo",
    "hidden_size": 18,
    "num_layers": 3,
    "num_heads": 3,
    "intermediate_size": 37,
    "max_position_embeddings": 29,
    "attention_types": [[["global"], 1], [["local"], 2]],
    "window_size": 4,
    "activation_function": "silu",
    "resid_dropout": 0.2,
    "embed_dropout": 0.15,
    "attention_dropout": 0.05,
    "layer_norm_epsilon": 1e-3,
    "initializer_range": 0.03,
}
GPTJ = {
    **TOKENS,
    "model_type": "gptj",
    "n_embd": 18,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 37,
    "n_positions": 29,
    "rotary_dim": 4,
    "tie_word_embeddings": False,
    "activation_function": "silu",
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.15,
    "attn_pdrop": 0.05,
    "layer_norm_epsilon": 1e-3,
    "initializer_range": 0.03,
}
BLOOM = {
    **TOKENS,
    "model_type": "bloom",
    "hidden_size": 20,
    "n_layer": 2,
    "n_head": 5,
    "layer_norm_epsilon": 1e-3,
    "initializer_range": 0.03,
    "apply_residual_connection_post_layernorm": True,
    "hidden_dropout": 0.2,
    "attention_dropout": 0.15,
}
CONFIGS = {"opt": OPT, "gpt_neo": GPT_NEO, "gptj": GPTJ, "bloom": BLOOM}
CLASSES = {"opt": "OPT", "gpt_neo": "GPTNeo", "gptj": "GPTJ", "bloom": "Bloom"}


def decoder(
    name: str,
    covers: str,
    scaled: tuple[str, ...],
    *,
    width: int | None = None,
    grads: tuple[str, ...] = (),
    task: str | None = None,
    layout: Callable | None = None,
    positions: bool = True,
    types: bool = False,
    **fields,
) -> None:
    """With `grads` all calls of a decoder-only model, whose embeddings have that `width`; else one
    forward pass and greedy tokens. `scaled`: weights by which the logits are scaled. `positions`:
    whether the calls have `position_ids`; `types`: whether one has `token_type_ids`."""
    family = next(each for each in CONFIGS if name.startswith(each))
    config = merged(CONFIGS[family], fields)
    if task is not None:
        calls = classifier_calls(name, config, TASKS[task][3])
    elif grads:
        calls = decoder_calls(name, config, width)
        calls["grad"] = Grad(calls["labels"].inputs, grads)
    else:
        plain = Forward(decoder_only(random_state(name), config), hidden=True, attentions=True)
        calls = {"plain": plain, "generate": prompts(config)}
    if types:
        shape = calls["plain"].inputs["input_ids"].shape
        ids = random_state(f"{name}:types").randint(0, config["vocab_size"], shape)
        calls["token_type_ids"] = Forward({**calls["plain"].inputs, "token_type_ids": ids})
    for call in () if positions else calls.values():
        call.inputs.pop("position_ids", None)
    kind = "ForCausalLM" if task is None else "ForSequenceClassification"
    tied = config.get("tie_word_embeddings", True) and task is None
    extra = {} if layout is None else {"layout": layout}
    absent = ("lm_head.weight",) if tied else ()
    architecture = CLASSES[family] + kind
    CASES.append(Case(name, family, covers, architecture, config, calls, scaled, absent, **extra))


OPT_NORM = ("model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias")
OPT_LAYERS = "model.decoder.layers"
decoder(
    "opt_full",
    "narrow embeddings (word_embed_proj_dim), norms before sublayers, own head, gelu, gradients",
    OPT_NORM,
    width=12,
    grads=(
        "model.decoder.embed_tokens.weight",
        "model.decoder.embed_positions.weight",
        "model.decoder.project_in.weight",
        "model.decoder.project_out.weight",
        f"{OPT_LAYERS}.0.self_attn.q_proj.weight",
        f"{OPT_LAYERS}.1.self_attn.k_proj.weight",
        f"{OPT_LAYERS}.0.self_attn.v_proj.bias",
        f"{OPT_LAYERS}.1.self_attn.out_proj.weight",
        f"{OPT_LAYERS}.0.self_attn_layer_norm.weight",
        f"{OPT_LAYERS}.1.final_layer_norm.bias",
        f"{OPT_LAYERS}.0.fc1.weight",
        f"{OPT_LAYERS}.1.fc2.weight",
        "model.decoder.final_layer_norm.weight",
    ),
    tie_word_embeddings=False,
)
decoder(
    "opt_norm_last",
    "as opt-350m: norms after sublayers, narrow embeddings, tied, relu; no `model.` prefix",
    ("model.decoder.project_out.weight",),
    layout=without_prefix("model."),
    do_layer_norm_before=False,
    activation_function="relu",
)
decoder(
    "opt_plain",
    "as Galactica: no biases, norms without weights, no final norm, gelu (erf), own head",
    ("lm_head.weight",),
    enable_bias=False,
    layer_norm_elementwise_affine=False,
    _remove_final_layer_norm=True,
    word_embed_proj_dim=None,
    activation_function="gelu",
    tie_word_embeddings=False,
)
decoder(
    "opt_cls_single",
    f"sequence classification: {TASKS['single'][0]}; narrow embeddings",
    OPT_NORM,
    task="single",
    **labels_of(3),
)
NEO_LAYERS = "transformer.h"
LAST_NORM = ("transformer.ln_f.weight", "transformer.ln_f.bias")
decoder(
    "gpt_neo_full",
    "windows of 4 in layers 1 and 2, unscaled scores, own head, silu, gradients",
    LAST_NORM,
    width=18,
    grads=(
        "transformer.wte.weight",
        "transformer.wpe.weight",
        f"{NEO_LAYERS}.0.ln_1.weight",
        f"{NEO_LAYERS}.0.attn.attention.q_proj.weight",
        f"{NEO_LAYERS}.1.attn.attention.k_proj.weight",
        f"{NEO_LAYERS}.2.attn.attention.v_proj.weight",
        f"{NEO_LAYERS}.1.attn.attention.out_proj.bias",
        f"{NEO_LAYERS}.2.ln_2.bias",
        f"{NEO_LAYERS}.0.mlp.c_fc.weight",
        f"{NEO_LAYERS}.2.mlp.c_proj.weight",
        "transformer.ln_f.weight",
    ),
    types=True,
    tie_word_embeddings=False,
)
decoder(
    "gpt_neo_published",
    "fields of a published config.json: tied, intermediate_size null; no prefix, masks",
    LAST_NORM,
    layout=old_gpt_neo,
    num_layers=2,
    attention_types=[[["global", "local"], 1]],
    attention_layers=["global", "local"],
    intermediate_size=None,
    activation_function="gelu_new",
)
decoder(
    "gpt_neo_cls_single",
    f"sequence classification: {TASKS['single'][0]}",
    LAST_NORM,
    task="single",
    **labels_of(3),
)
decoder(
    "gptj_full",
    "RoPE on 4 of 6 features of a head, silu, head with a bias, gradients",
    LAST_NORM,
    width=18,
    grads=(
        "transformer.wte.weight",
        "transformer.h.0.ln_1.weight",
        "transformer.h.0.attn.q_proj.weight",
        "transformer.h.1.attn.k_proj.weight",
        "transformer.h.0.attn.v_proj.weight",
        "transformer.h.1.attn.out_proj.weight",
        "transformer.h.0.mlp.fc_in.weight",
        "transformer.h.1.mlp.fc_out.bias",
        "transformer.ln_f.bias",
        "lm_head.weight",
        "lm_head.bias",
    ),
    types=True,
)
decoder(
    "gptj_whole",
    "RoPE on whole heads, gelu tanh, n_inner null; attn.bias and attn.masked_bias buffers",
    LAST_NORM,
    layout=old_gptj,
    rotary_dim=6,
    n_inner=None,
    activation_function="gelu_new",
)
decoder(
    "gptj_cls_single",
    f"sequence classification: {TASKS['single'][0]}",
    LAST_NORM,
    task="single",
    **labels_of(3),
)
decoder(
    "bloom_full",
    "ALiBi of 5 heads, residuals from the norms, own head, dropout rates, gradients",
    LAST_NORM,
    width=20,
    positions=False,
    grads=(
        "transformer.word_embeddings.weight",
        "transformer.word_embeddings_layernorm.weight",
        "transformer.h.0.input_layernorm.weight",
        "transformer.h.0.self_attention.query_key_value.weight",
        "transformer.h.1.self_attention.query_key_value.bias",
        "transformer.h.1.self_attention.dense.weight",
        "transformer.h.0.post_attention_layernorm.bias",
        "transformer.h.0.mlp.dense_h_to_4h.weight",
        "transformer.h.1.mlp.dense_4h_to_h.bias",
        "transformer.ln_f.weight",
    ),
    tie_word_embeddings=False,
)
decoder(
    "bloom_published",
    "fields of a published config.json (n_embed), ALiBi of 4 heads, tied; no prefix",
    LAST_NORM,
    positions=False,
    layout=without_prefix("transformer."),
    hidden_size=ABSENT,
    n_embed=20,
    n_head=ABSENT,
    num_attention_heads=4,
    apply_residual_connection_post_layernorm=False,
    attention_softmax_in_fp32=True,
    bias_dropout_fusion=True,
    masked_softmax_fusion=True,
    n_inner=None,
    offset_alibi=100,
    pretraining_tp=4,
    seq_length=29,
    skip_bias_add=True,
    skip_bias_add_qkv=False,
    unk_token_id=0,
)
decoder(
    "bloom_cls_single",
    f"sequence classification: {TASKS['single'][0]}",
    LAST_NORM,
    positions=False,
    task="single",
    **labels_of(3),
)
