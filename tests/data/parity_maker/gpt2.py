"""GPT-2 cases."""

from __future__ import annotations

import numpy as np

from parity_maker.inputs import (
    TASKS,
    Case,
    Forward,
    Generate,
    Grad,
    Inputs,
    classifier_calls,
    decoder_calls,
    decoder_only,
    keep_fraction,
    labels_of,
    merged,
    noise,
    padding_mask,
    prompts,
    random_state,
    with_labels,
)
from parity_maker.layouts import old_gpt2, with_tied_head

CASES: list[Case] = []

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 51,
    "n_positions": 29,
    "n_embd": 18,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 37,
    "activation_function": "gelu_new",
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.15,
    "attn_pdrop": 0.05,
    "layer_norm_epsilon": 1e-3,
    "initializer_range": 0.03,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "pad_token_id": 0,
}


def gpt2(name: str, covers: str, calls: dict | None = None, layout=None, **fields) -> None:
    config = merged(GPT2, fields)
    version = config.pop("version", "5.23.0")
    architecture = config.pop("architecture", "GPT2LMHeadModel")
    if calls is None:
        plain = Forward(decoder_only(random_state(name), config), hidden=True, attentions=True)
        calls = {"plain": plain, "generate": prompts(config)}
    absent = ("lm_head.weight",) if config.get("tie_word_embeddings", True) else ()
    extra = {} if layout is None else {"layout": layout}
    norm = ("transformer.ln_f.weight", "transformer.ln_f.bias")
    case = Case(name, "gpt2", covers, architecture, config, calls, norm, absent, **extra)
    CASES.append(case if version == case.version else Case(**{**vars(case), "version": version}))


base_calls = decoder_calls("gpt2_base", GPT2, 18)
types = random_state("gpt2_base:types").randint(0, 51, (3, 11))
base_calls["token_type_ids"] = Forward({**base_calls["plain"].inputs, "token_type_ids": types})
BLOCK = "transformer.h.1."
base_calls["grad"] = Grad(
    base_calls["labels"].inputs,
    (
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.h.0.attn.c_attn.weight",
        "transformer.h.0.attn.c_attn.bias",
        BLOCK + "ln_1.weight",
        BLOCK + "attn.c_proj.weight",
        BLOCK + "mlp.c_fc.weight",
        "transformer.ln_f.bias",
    ),
)
gpt2(
    "gpt2_base",
    "n_inner, relu, `transformer.` prefix, token_type_ids, gradients",
    base_calls,
    activation_function="relu",
)
gpt2(
    "gpt2_hub_layout",
    "as the oldest Hub file: no prefix, attn.bias and attn.masked_bias buffers; n_inner null",
    layout=old_gpt2,
    n_inner=None,
)
gpt2(
    "gpt2_unscaled",
    "scale_attn_weights false, gelu (erf); tied lm_head.weight in the file as well",
    layout=with_tied_head("lm_head.weight", "transformer.wte.weight"),
    scale_attn_weights=False,
    activation_function="gelu",
)
gpt2(
    "gpt2_inverse_layer",
    "scale_attn_by_inverse_layer_idx, silu, three layers",
    scale_attn_by_inverse_layer_idx=True,
    activation_function="silu",
    n_layer=3,
)
gpt2(
    "gpt2_reorder_upcast",
    "reorder_and_upcast_attn with scale_attn_by_inverse_layer_idx, gelu_pytorch_tanh",
    reorder_and_upcast_attn=True,
    scale_attn_by_inverse_layer_idx=True,
    activation_function="gelu_pytorch_tanh",
)
gpt2(
    "gpt2_untied",
    "own head, quick_gelu",
    tie_word_embeddings=False,
    activation_function="quick_gelu",
)


def cross_inputs(rng: np.random.RandomState) -> Inputs:
    return {
        "encoder_hidden_states": noise(rng, 3, 7, 18),
        "encoder_attention_mask": padding_mask((5, 7, 2), "right"),
    }


def cross_prompts(config: dict) -> Generate:
    def make(rng: np.random.RandomState) -> Inputs:
        return {**prompts(config).make(rng), **cross_inputs(rng)}

    return Generate(make)


rng = random_state("gpt2_cross")
plain, cross = decoder_only(rng, GPT2), cross_inputs(rng)
gpt2(
    "gpt2_cross",
    "add_cross_attention: encoder_hidden_states with and without their mask, and absent",
    {
        "plain": Forward({**plain, **cross}, hidden=True, attentions=True),
        "no_encoder_mask": Forward(
            {**plain, "encoder_hidden_states": cross["encoder_hidden_states"]}
        ),
        "no_encoder": Forward(plain),
        "labels": Forward({**with_labels(plain), **cross}),
        "generate": cross_prompts(GPT2),
    },
    add_cross_attention=True,
    scale_attn_by_inverse_layer_idx=True,
)
gpt2(
    "gpt2_head_mask",
    "head_mask [layers, heads] and [heads], with cross-attention (masked too)",
    {
        "plain": Forward(plain),
        "head_mask": Forward({**plain, "head_mask": keep_fraction(rng, 2, 3)}, hidden=True),
        "head_mask_1d": Forward({**plain, "head_mask": keep_fraction(rng, 3)}),
        "head_mask_cross": Forward(
            {**plain, **cross, "head_mask": keep_fraction(rng, 2, 3)}, hidden=True, attentions=True
        ),
    },
    version="4.57.6",
    add_cross_attention=True,
)
for task, (what, count, problem, labels) in TASKS.items():
    name = f"gpt2_cls_{task}"
    gpt2(
        name,
        f"sequence classification: {what}",
        classifier_calls(name, GPT2, labels),
        architecture="GPT2ForSequenceClassification",
        problem_type=problem,
        **labels_of(count),
    )
