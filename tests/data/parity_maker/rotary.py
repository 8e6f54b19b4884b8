"""Cases of Llama's relatives: windows shorter than the rows, biases, normed heads, partial RoPE."""

from __future__ import annotations

from parity_maker.inputs import (
    ABSENT,
    TASKS,
    Beams,
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
from parity_maker.layouts import mixtral, one_expert_a_tensor
from parity_maker.llama import LLAMA

CASES: list[Case] = []

NAMES = {"mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma2": "Gemma2"}
NAMES |= {"phi3": "Phi3", "gemma": "Gemma", "gemma3": "Gemma3", "cohere": "Cohere"}
NAMES |= {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
LAYOUTS = {"mixtral": mixtral, "qwen3_moe": one_expert_a_tensor}
COMMON = {k: v for k, v in LLAMA.items() if k not in ("attention_bias", "mlp_bias")}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.k_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.down_proj.weight",
    "model.norm.weight",
)
BIASES = ("model.layers.1.self_attn.q_proj.bias", "model.layers.0.self_attn.v_proj.bias")
NORMS = ("model.layers.1.self_attn.q_norm.weight", "model.layers.0.self_attn.k_norm.weight")


def rotary(
    name: str,
    covers: str,
    grads: tuple[str, ...] = (),
    task: str | None = None,
    short: tuple[int, ...] = (),
    **fields,
) -> None:
    """With `grads` all calls of a decoder-only model; else one forward pass alone, and with `short`
    one of rows of these lengths and greedy tokens after prompts that are longer."""
    family = max((each for each in NAMES if name.startswith(f"{each}_")), key=len)
    config = merged({**COMMON, "model_type": family}, fields)
    if task is not None:
        calls = classifier_calls(name, config, TASKS[task][3])
    elif grads:
        calls = decoder_calls(name, config, 20)
        calls["grad"] = Grad(calls["labels"].inputs, grads)
        if family in LAYOUTS:
            calls["generate_beams"] = Beams(calls["generate"].make)
    else:
        calls = {"plain": Forward(decoder_only(random_state(name), config))}
    if short:
        calls["short"] = Forward(decoder_only(random_state(f"{name}:short"), config, short))
        calls["generate"] = prompts(config, (9, 12, 10))
    architecture = NAMES[family] + ("ForCausalLM" if task is None else "ForSequenceClassification")
    if family == "gemma3":
        architecture = architecture.replace("3ForSequence", "3TextForSequence")
    absent = ("lm_head.weight",) if config["tie_word_embeddings"] and task is None else ()
    layout = {"layout": LAYOUTS[family]} if family in LAYOUTS else {}
    norm = ("model.norm.weight",)
    CASES.append(Case(name, family, covers, architecture, config, calls, norm, absent, **layout))


rotary(
    "mistral_window",
    "window of 5, head_dim != hidden/heads, gelu, own head, v4 rope_theta, gradients",
    GRADS,
    sliding_window=5,
    hidden_act="gelu",
    tie_word_embeddings=False,
    rope_theta=777.0,
)
rotary(
    "mistral_full",
    "sliding_window null, head_dim null, hidden_act silu",
    sliding_window=None,
    head_dim=None,
    num_attention_heads=2,
)
rotary(
    "qwen2_window",
    "window of 4 in layers 1 and 2 (max_window_layers 1), gelu tanh, tied, v5 rope, gradients",
    GRADS + BIASES,
    **WINDOWS,
    num_hidden_layers=3,
    hidden_act="gelu_new",
    rope_parameters={"rope_type": "default", "rope_theta": 50.0},
)
rotary(
    "qwen2_layer_types",
    "window of 3 in layer 0 (layer_types), own head, linear rope",
    use_sliding_window=True,
    sliding_window=3,
    max_window_layers=2,
    layer_types=["sliding_attention", "full_attention"],
    tie_word_embeddings=False,
    rope_scaling={"type": "linear", "factor": 2.5},
)
rotary(
    "qwen2_cls_single",
    f"sequence classification: {TASKS['single'][0]}; use_sliding_window false",
    task="single",
    **{**WINDOWS, "use_sliding_window": False},
    **labels_of(3),
)
rotary(
    "qwen3_window",
    "normed heads, attention_bias, window of 4 in layer 1, own head, relu, gradients",
    GRADS + BIASES + NORMS,
    **WINDOWS,
    attention_bias=True,
    hidden_act="relu",
    tie_word_embeddings=False,
    rope_theta=90.0,
)
rotary(
    "qwen3_yarn",
    "normed heads, no biases, tied, MQA, yarn",
    num_key_value_heads=1,
    attention_bias=False,
    max_position_embeddings=256,
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)
GEMMA_GRADS = GRADS + BIASES + ("model.layers.1.input_layernorm.weight",)
rotary(
    "gemma_full",
    "biases, MQA, silu, own head, v5 rope, gradients",
    GEMMA_GRADS,
    hidden_act="silu",
    hidden_activation="silu",
    attention_bias=True,
    num_key_value_heads=1,
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 70.0},
)
rotary(
    "gemma_published",
    "fields of a published config.json: hidden_act gelu, which is tanh, no biases, tied",
    hidden_act="gelu",
    attention_bias=False,
    rope_theta=90.0,
)
rotary(
    "gemma_cls_single",
    f"sequence classification: {TASKS['single'][0]}; linear rope",
    task="single",
    hidden_act="gelu",
    hidden_activation="gelu_pytorch_tanh",
    attention_bias=False,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
    **labels_of(3),
)
GEMMA = {
    "hidden_act": None,
    "hidden_activation": "gelu",
    "attention_bias": True,
    "query_pre_attn_scalar": 7,
    "sliding_window": 4,
    "attn_logit_softcapping": 3.0,
    "final_logit_softcapping": 9.0,
}
GEMMA_NORMS = (
    "model.layers.0.input_layernorm.weight",
    "model.layers.0.post_attention_layernorm.weight",
    "model.layers.1.pre_feedforward_layernorm.weight",
    "model.layers.1.post_feedforward_layernorm.weight",
)
rotary(
    "gemma2_full",
    "biases, soft caps, scale 1/sqrt(7), windows of 4 in layers 1 and 2, own head, gelu, gradients",
    GRADS + BIASES + GEMMA_NORMS,
    **GEMMA,
    num_hidden_layers=3,
    layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    tie_word_embeddings=False,
    rope_parameters={"rope_type": "default", "rope_theta": 120.0},
)
rotary(
    "gemma2_published",
    "fields of a published config.json: tied, gelu tanh, windows in layers 0 and 2, no biases",
    **GEMMA
    | {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 6,
    },
    num_hidden_layers=3,
    rope_theta=90.0,
)
rotary(
    "gemma2_cls_single",
    f"sequence classification: {TASKS['single'][0]}",
    task="single",
    **GEMMA,
    **labels_of(3),
)
GEMMA3 = GEMMA | {"model_type": "gemma3_text", "attn_logit_softcapping": None}
rotary(
    "gemma3_full",
    "QK norm, biases, soft cap of logits, scale 1/sqrt(7), windows of 4 in layers 0 and 2 with a "
    "RoPE of their own (v5), linear scaling in layer 1, own head, gelu, gradients",
    GRADS + BIASES + NORMS + GEMMA_NORMS,
    **GEMMA3,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    tie_word_embeddings=False,
    rope_parameters={
        "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 120.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
    },
)
rotary(
    "gemma3_published",
    "fields of a published config.json (v4): sliding_window_pattern 2, rope_local_base_freq, tied, "
    "gelu tanh, no biases, no soft cap",
    **GEMMA3
    | {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 6,
        "final_logit_softcapping": None,
    },
    num_hidden_layers=4,
    sliding_window_pattern=2,
    rope_theta=900.0,
    rope_local_base_freq=30.0,
    rope_scaling={"rope_type": "linear", "factor": 2.0},
)
rotary(
    "gemma3_both_sides",
    f"sequence classification: {TASKS['single'][0]}; attention to both sides, windows of 2 on each",
    task="single",
    **GEMMA3,
    num_hidden_layers=3,
    layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    use_bidirectional_attention=True,
    rope_theta=100.0,
    **labels_of(3),
)
PHI3_GRADS = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.1.self_attn.o_proj.weight",
    "model.layers.1.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.norm.weight",
)
LONGROPE = {"short_factor": [1.0, 1.2, 1.5], "long_factor": [1.0, 2.9, 8.4]}
rotary(
    "phi3_window",
    "RoPE on 4 of 6 features (v4), window of 4, gelu, own head, dropout rates, gradients",
    PHI3_GRADS,
    sliding_window=4,
    partial_rotary_factor=0.67,
    resid_pdrop=0.2,
    embd_pdrop=0.3,
    hidden_act="gelu",
    tie_word_embeddings=False,
    rope_theta=70.0,
)
rotary(
    "phi3_longrope",
    "longrope (v4, called yarn) on 6 of 10 features: short and long, factor max / original, tied",
    short=(4, 7),
    sliding_window=None,
    partial_rotary_factor=0.6,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=ABSENT,
    max_position_embeddings=32,
    original_max_position_embeddings=8,
    rope_theta=50.0,
    rope_scaling={"type": "yarn", **LONGROPE},
)
rotary(
    "phi3_cls_single",
    f"sequence classification: {TASKS['single'][0]}; longrope (v5), factor 6, attention factor 1.2",
    task="single",
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=10,
    original_max_position_embeddings=8,
    rope_parameters={
        **LONGROPE,
        "rope_type": "longrope",
        "rope_theta": 50.0,
        "partial_rotary_factor": 0.6,
        "factor": 6.0,
        "attention_factor": 1.2,
        "original_max_position_embeddings": 8,
    },
    **labels_of(3),
)
MIXTRAL = {"intermediate_size": 11, "num_local_experts": 5, "num_experts_per_tok": 3}
EXPERT_GRADS = (
    "model.layers.1.mlp.experts.gate_up_proj",
    "model.layers.1.mlp.experts.down_proj",
    "model.layers.1.mlp.gate.weight",
)
NO_DENSE = tuple(name for name in GRADS if ".mlp." not in name)
rotary(
    "mixtral_window",
    "5 experts, 3 a token, loss of routers, window of 5, gelu, own head, jitter, gradients",
    NO_DENSE + EXPERT_GRADS,
    **MIXTRAL,
    pad_token_id=5,  # transformers fills beams with EOS where the pad token is 0
    output_router_logits=True,
    router_aux_loss_coef=0.3,
    router_jitter_noise=0.1,
    sliding_window=5,
    hidden_act="gelu",
    tie_word_embeddings=False,
    rope_theta=70.0,
)
rotary(
    "mixtral_cls_single",
    f"sequence classification: {TASKS['single'][0]}; sliding_window null, 1 expert a token",
    task="single",
    **{**MIXTRAL, "num_experts_per_tok": 1, "sliding_window": None},
    **labels_of(3),
)
QWEN3_MOE = {"moe_intermediate_size": 9, "num_experts": 6, "num_experts_per_tok": 2}
rotary(
    "qwen3_moe_sparse",
    "experts in layers 0 and 2 (mlp_only_layers), loss of routers, window of 4 in all layers, "
    "biases, own head, gradients",
    GRADS + BIASES + NORMS + tuple(name.replace("s.1.", "s.2.") for name in EXPERT_GRADS),
    **QWEN3_MOE,
    num_hidden_layers=3,
    mlp_only_layers=[1],
    pad_token_id=5,
    output_router_logits=True,
    router_aux_loss_coef=0.2,
    use_sliding_window=True,
    sliding_window=4,
    attention_bias=True,
    hidden_act="gelu_new",
    tie_word_embeddings=False,
    rope_theta=80.0,
)
rotary(
    "qwen3_moe_normed",
    "norm_topk_prob, tied, MQA, v5 rope, num_local_experts",
    **{name: value for name, value in QWEN3_MOE.items() if name != "num_experts"},
    num_local_experts=4,
    norm_topk_prob=True,
    num_key_value_heads=1,
    rope_parameters={"rope_type": "default", "rope_theta": 60.0},
)
rotary(
    "qwen3_moe_cls_single",
    f"sequence classification: {TASKS['single'][0]}; experts in layer 1 (decoder_sparse_step 2)",
    task="single",
    **QWEN3_MOE,
    decoder_sparse_step=2,
    **labels_of(3),
)
COHERE = {"rms_norm_eps": ABSENT, "layer_norm_eps": 2e-3, "logit_scale": 0.7}
rotary(
    "cohere_full",
    "QK norm, biases, head_dim != hidden/heads, logits times 0.7, gelu, tied, v5 rope, gradients",
    GRADS + BIASES + NORMS + ("model.layers.1.input_layernorm.weight",),
    **COHERE,
    pad_token_id=1,  # the reference fills rows of beams with EOS in place of pad token 0
    use_qk_norm=True,
    attention_bias=True,
    hidden_act="gelu",
    rope_parameters={"rope_type": "default", "rope_theta": 60.0},
)
CASES[-1].calls["generate_beams"] = Beams(prompts(CASES[-1].config).make)
rotary(
    "cohere_yarn",
    "no QK norm, no biases, no head_dim, own head, yarn",
    **COHERE | {"head_dim": ABSENT},
    tie_word_embeddings=False,
    num_attention_heads=2,
    num_key_value_heads=1,
    use_qk_norm=False,
    attention_bias=False,
    max_position_embeddings=256,
    rope_theta=90.0,
    rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
)
