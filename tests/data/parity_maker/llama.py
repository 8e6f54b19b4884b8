"""Llama cases."""

from __future__ import annotations

import numpy as np

from parity_maker.inputs import (
    ABSENT,
    TASKS,
    Case,
    Forward,
    Grad,
    Rope,
    classifier_calls,
    decoder_calls,
    decoder_only,
    labels_of,
    merged,
    prompts,
    random_state,
)
from parity_maker.layouts import with_inv_freq, without_prefix

CASES: list[Case] = []

LLAMA = {
    "model_type": "llama",
    "vocab_size": 51,
    "hidden_size": 20,
    "intermediate_size": 27,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "hidden_act": "silu",
    "max_position_embeddings": 40,
    "initializer_range": 0.03,
    "rms_norm_eps": 1e-3,
    "pad_token_id": 0,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.1,
    "tie_word_embeddings": True,
}


def llama(name: str, covers: str, calls: dict | None = None, layout=None, **fields) -> None:
    config = merged(LLAMA, fields)
    if calls is None:
        rng = random_state(name)
        calls = {"plain": Forward(decoder_only(rng, config)), "generate": prompts(config)}
    extra = {} if layout is None else {"layout": layout}
    absent = ("lm_head.weight",) if config["tie_word_embeddings"] else ()
    norm = ("model.norm.weight",)
    architecture = config.pop("architecture", "LlamaForCausalLM")
    case = Case(name, "llama", covers, architecture, config, calls, norm, absent, **extra)
    CASES.append(case)


BIASED = {
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_act": "gelu",
    "pretraining_tp": 2,
    "rope_theta": 777.0,
    "rope_scaling": None,
    "torch_dtype": "float32",
}
LAYER = "model.layers.1."
LLAMA_GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.bias",
    LAYER + "self_attn.o_proj.weight",
    LAYER + "input_layernorm.weight",
    LAYER + "mlp.gate_proj.weight",
    LAYER + "mlp.down_proj.bias",
    "model.norm.weight",
)
biased_calls = decoder_calls("llama_bias", {**LLAMA, **BIASED}, 20)
biased_calls["grad"] = Grad(biased_calls["labels"].inputs, LLAMA_GRADS)
llama(
    "llama_bias",
    "biases everywhere, gelu, tied, GQA, head_dim != hidden/heads, pretraining_tp 2, v4 "
    "rope_theta, rotary inv_freq buffers in the file, gradients",
    biased_calls,
    with_inv_freq,
    **BIASED,
)
UNTIED = {
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
    "dtype": "float32",
}
llama(
    "llama_untied",
    "own head, MQA, silu, v5 rope_parameters",
    decoder_calls("llama_untied", {**LLAMA, **UNTIED}, 20),
    **UNTIED,
)
llama(
    "llama_base_keys",
    "file saved from the base model (no `model.` prefix), tied; relu; head_dim and "
    "num_key_value_heads absent from config.json (hidden_size / heads, and all heads)",
    layout=without_prefix("model."),
    num_attention_heads=2,
    head_dim=ABSENT,
    num_key_value_heads=ABSENT,
    hidden_act="relu",
    rope_theta=100.0,
)

# Rope types: 8 rotary frequencies a head, one spelling of transformers 4 and one of 5 for each.
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def rope_calls(name: str, config: dict, **lengths: tuple[int, ...]) -> dict:
    """Forward and cos/sin at each named set of lengths, and a greedy run across the boundary."""
    rng, calls = random_state(name), {}
    for label, rows in lengths.items():
        calls[label] = Forward(decoder_only(rng, config, rows), hidden=label == "long")
        calls[f"rope_{label}"] = Rope({"position_ids": np.arange(max(rows))[None]})
    return calls | {"generate": prompts(config)}


def rope(name: str, covers: str, short=(4, 7), long=(9, 15, 12), **fields) -> None:
    calls = rope_calls(name, {**LLAMA, **WIDE, **fields}, short=short, long=long)
    llama(name, covers, calls, **WIDE, **fields)


def rope_v4(kind: str, covers: str, spelling: str = "rope_type", **fields) -> None:
    scaling = {spelling: kind, **fields.pop("scaling")}
    covers = f"{kind} in v4 rope_scaling ({spelling}): {covers}"
    rope(f"llama_{kind}_v4", covers, rope_scaling=scaling, **fields)


def rope_v5(kind: str, covers: str, theta: float, suffix: str = "v5", **fields) -> None:
    parameters = {"rope_type": kind, "rope_theta": theta, **fields.pop("scaling")}
    covers = f"{kind} in v5 rope_parameters: {covers}"
    rope(f"llama_{kind}_{suffix}", covers, rope_parameters=parameters, **fields)


LINEAR = {"factor": 2.5}
DYNAMIC = {"factor": 3.0}
YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.6, 1.8, 2.0],
    "long_factor": [1.0, 1.4, 2.0, 2.9, 4.1, 5.9, 8.4, 12.0],
}
OLD = {"rope_theta": 50.0}
rope_v4("linear", "factor 2.5, gelu tanh", "type", scaling=LINEAR, hidden_act="gelu_new", **OLD)
rope_v5("linear", "factor 2.5", 50.0, scaling=LINEAR)
SHORT = {"max_position_embeddings": 10}
rope_v4("dynamic", "within and past max_position_embeddings", scaling=DYNAMIC, **SHORT, **OLD)
rope_v5("dynamic", "within and past max_position_embeddings", 90.0, scaling=DYNAMIC, **SHORT)
MID = {"max_position_embeddings": 256}
rope_v4(
    "yarn",
    "beta_fast 4, beta_slow 1.5, inferred attention factor",
    scaling={**YARN, "beta_fast": 4, "beta_slow": 1.5},
    **MID,
    **OLD,
)
rope_v5(
    "yarn",
    "attention_factor 0.8, truncate false",
    50.0,
    scaling={**YARN, "beta_fast": 5, "attention_factor": 0.8, "truncate": False},
    **MID,
)
rope_v5(
    "yarn",
    "mscale and mscale_all_dim, factor null (max / original)",
    50.0,
    "mscale",
    scaling={**YARN, "factor": None, "mscale": 1.3, "mscale_all_dim": 0.6},
    **MID,
)
LONG = {"max_position_embeddings": 32}
rope_v4(
    "longrope",
    "short and long, factor from max / original at the config's top level (as Phi 3)",
    "type",
    scaling=LONGROPE,
    original_max_position_embeddings=8,
    **LONG,
    **OLD,
)
rope_v5(
    "longrope",
    "short and long, factor 6 and attention_factor 1.2",
    50.0,
    scaling={
        **LONGROPE,
        "original_max_position_embeddings": 8,
        "factor": 6.0,
        "attention_factor": 1.2,
    },
    **LONG,
)
rope_v5(
    "longrope",
    "factor 6, inferred attention factor",
    50.0,
    "factor",
    scaling={**LONGROPE, "original_max_position_embeddings": 8, "factor": 6.0},
    **LONG,
)
rope_v4("llama3", "all three bands", scaling=LLAMA3, **MID, **OLD)
rope_v5("llama3", "all three bands", 30.0, scaling=LLAMA3, **MID)

for task, (what, count, problem, labels) in TASKS.items():
    name = f"llama_cls_{task}"
    fields = {**BIASED, **labels_of(count), "problem_type": problem}
    llama(
        name,
        f"sequence classification: {what}",
        classifier_calls(name, {**LLAMA, **fields}, labels),
        architecture="LlamaForSequenceClassification",
        **fields,
    )
