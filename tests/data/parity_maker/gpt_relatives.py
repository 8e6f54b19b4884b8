"""Cases of GPT-2's relatives: OPT."""

from __future__ import annotations

from collections.abc import Callable

from parity_maker.inputs import (
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
from parity_maker.layouts import without_prefix

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
CONFIGS = {"opt": OPT}
CLASSES = {"opt": "OPT"}


def decoder(
    name: str,
    covers: str,
    scaled: tuple[str, ...],
    *,
    width: int | None = None,
    grads: tuple[str, ...] = (),
    task: str | None = None,
    layout: Callable | None = None,
    **fields,
) -> None:
    """With `grads` all calls of a decoder-only model, whose embeddings have that `width`; else one
    forward pass and greedy tokens. `scaled`: weights by which the logits are scaled."""
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
