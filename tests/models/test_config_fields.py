"""Every field of a config acts, is shown to be without effect, or raises."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx

from jaxllm.common import config_keys
from jaxllm.common.errors import ConfigError, InputError, UnsupportedError
from jaxllm.generation import GenerationConfig
from jaxllm.models import Gemma3TextConfig, GemmaConfig, LlamaConfig
from jaxllm.models.config import GENERATION_KEYS, INERT_MODEL_KEYS
from jaxllm.models.registry import FAMILIES, model_spec

TOKEN_IDS = {"pad_token_id": 7, "bos_token_id": 8, "eos_token_id": [2, 9]}

ROTARY = {
    "vocab_size": 60,
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": True,
}
WINDOWS = {
    "use_sliding_window": False,
    "sliding_window": 6,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}
BART = {
    "vocab_size": 60,
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 48,
    "activation_function": "relu",
    "scale_embedding": True,
}
# A change of each field that changes the logits.
ACTS = {
    "llama": {**ROTARY, "attention_bias": True, "mlp_bias": True},
    "mistral": {**ROTARY, "sliding_window": 6},
    "qwen2": {**ROTARY, **WINDOWS},
    "qwen3": {**ROTARY, **WINDOWS, "attention_bias": True},
    "mixtral": {
        **ROTARY,
        "sliding_window": 6,
        "num_local_experts": 3,
        "num_experts_per_tok": 3,
    },
    "qwen3_moe": {
        **ROTARY,
        "attention_bias": True,
        "use_sliding_window": False,
        "sliding_window": 6,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [1],
        "moe_intermediate_size": 20,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
    "gemma": {
        **ROTARY,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gemma2": {
        **{name: value for name, value in ROTARY.items() if name != "hidden_act"},
        "hidden_activation": "silu",  # the name in files of the field hidden_act
        "tie_word_embeddings": False,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "attention_bias": True,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        **{name: value for name, value in ROTARY.items() if name != "hidden_act"},
        "hidden_activation": "silu",
        "tie_word_embeddings": False,
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_local_base_freq": 10.0,
        "attention_bias": True,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": True,
    },
    "phi3": {**ROTARY, "sliding_window": 6},
    "cohere": {
        **{name: value for name, value in ROTARY.items() if name != "rms_norm_eps"},
        "layer_norm_eps": 1e-2,
        "logit_scale": 0.3,
        "attention_bias": True,
        "use_qk_norm": False,
        "tie_word_embeddings": False,
    },
    **dict.fromkeys(("bart", *tiny.BART), BART),
    "marian": {**BART, "share_encoder_decoder_embeddings": False},
    "m2m_100": {**BART, "scale_embedding": False, "activation_function": "gelu", "pad_token_id": 7},
    "xglm": {
        "vocab_size": 60,
        "d_model": 64,
        "num_layers": 1,
        "attention_heads": 2,
        "ffn_dim": 40,
        "activation_function": "relu",
        "scale_embedding": False,
        "tie_word_embeddings": False,
        "pad_token_id": 7,  # the position without a vector
    },
    "opt": {
        "vocab_size": 60,
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "ffn_dim": 40,
        "activation_function": "gelu",
        "do_layer_norm_before": False,
        "_remove_final_layer_norm": True,
        "word_embed_proj_dim": 32,
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "tie_word_embeddings": False,
    },
    "gpt_neo": {
        "vocab_size": 60,
        "hidden_size": 64,
        "attention_layers": ["local", "local"],
        "num_heads": 2,
        "intermediate_size": 40,
        "window_size": 6,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-2,
        "tie_word_embeddings": False,
    },
    "gptj": {
        "vocab_size": 60,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
        "rotary_dim": 4,
        "n_inner": 64,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-2,
    },
    "bloom": {
        "vocab_size": 60,
        "hidden_size": 96,
        "n_layer": 1,
        "n_head": 4,
        "layer_norm_epsilon": 1e-2,
        "apply_residual_connection_post_layernorm": True,
        "tie_word_embeddings": False,
    },
    "t5gemma": {
        "encoder": {**tiny.CONFIGS["t5gemma"]["encoder"], "query_pre_attn_scalar": 20},
        "decoder": {**tiny.CONFIGS["t5gemma"]["decoder"], "query_pre_attn_scalar": 20},
        "tie_word_embeddings": False,
    },
    "gpt2": {
        "vocab_size": 60,
        "n_embd": 64,
        "n_layer": 1,
        "n_head": 2,
        "n_inner": 64,
        "activation_function": "relu",
        "layer_norm_epsilon": 1e-2,
        "scale_attn_weights": False,
        "scale_attn_by_inverse_layer_idx": True,
        "tie_word_embeddings": False,
    },
    "t5": {
        "vocab_size": 60,
        "d_model": 64,
        "d_kv": 4,
        "d_ff": 40,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 2,
        "relative_attention_num_buckets": 12,
        "relative_attention_max_distance": 6,
        "layer_norm_epsilon": 1e-2,
        "feed_forward_proj": "gated-silu",
        "is_gated_act": False,
        "dense_act_fn": "silu",
        "tie_word_embeddings": True,
        "scale_decoder_outputs": True,
    },
}
BART_DROPOUT = {"dropout": 0.5, "attention_dropout": 0.5, "activation_dropout": 0.5}
# Dropout: no effect without a key (inference), an effect with one.
DROPOUT = {
    **{family: {"attention_dropout": 0.5} for family in ("llama", *tiny.ROTARY)},
    "phi3": {"attention_dropout": 0.5, "resid_pdrop": 0.5},
    "mixtral": {"attention_dropout": 0.5, "router_jitter_noise": 0.5},
    "opt": {"dropout": 0.5, "attention_dropout": 0.5},
    "gpt_neo": {"resid_dropout": 0.5, "embed_dropout": 0.5, "attention_dropout": 0.5},
    "gptj": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "bloom": {"hidden_dropout": 0.5, "attention_dropout": 0.5},
    **dict.fromkeys(("bart", *tiny.BART, "xglm"), BART_DROPOUT),
    "t5gemma": {"dropout_rate": 0.5, "attention_dropout": 0.5},
    "gpt2": {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5},
    "t5": {"dropout_rate": 0.5},
}
# No effect on the logits; each has a test of its own below, or is explained.
ROTARY_OTHERS = {
    **TOKEN_IDS,  # of generation, tokenizers, and pooling (pad)
    "decoder_start_token_id": 5,  # decoder-only models have no decoder start
    "max_position_embeddings": 128,  # acts through dynamic RoPE, and as a default length
    "initializer_range": 0.5,
    "num_labels": 3,
    "problem_type": "regression",
}
BART_OTHERS = {
    **TOKEN_IDS,
    "decoder_start_token_id": 5,
    "max_position_embeddings": 32,
    "init_std": 0.5,
    "num_labels": 4,
    "problem_type": "regression",
    "encoder_layerdrop": 0.1,  # skips layers in training, which raises
    "decoder_layerdrop": 0.1,
    "tie_word_embeddings": True,  # false raises, or needs sides that share no embedding (Marian)
}
OTHERS = {
    "llama": {**ROTARY_OTHERS, "pretraining_tp": 2},  # splits a product, with the same result
    **dict.fromkeys(tiny.ROTARY, ROTARY_OTHERS),
    # The loss of routers; see test_the_loss_of_routers_is_added in test_mixture_of_experts.py.
    "mixtral": {**ROTARY_OTHERS, "output_router_logits": False, "router_aux_loss_coef": 0.1},
    "qwen3_moe": {**ROTARY_OTHERS, "output_router_logits": True, "router_aux_loss_coef": 0.1},
    # Only causal attention is implemented; true raises.
    "gemma": {**ROTARY_OTHERS, "use_bidirectional_attention": False},
    "gemma2": {**ROTARY_OTHERS, "use_bidirectional_attention": False},
    # transformers ignores a soft cap of scores, so that any number raises.
    "gemma3_text": {**ROTARY_OTHERS, "attn_logit_softcapping": None},
    # The dropout is of a class that is not here.
    "bart": {**BART_OTHERS, "classifier_dropout": 0.3},
    "mbart": {**BART_OTHERS, "classifier_dropout": 0.3},
    **dict.fromkeys(("marian", "pegasus"), BART_OTHERS),
    "m2m_100": {name: x for name, x in BART_OTHERS.items() if name != "pad_token_id"},
    "xglm": {
        "bos_token_id": 8,
        "eos_token_id": [2, 9],
        "decoder_start_token_id": 5,
        "max_position_embeddings": 32,
        "initializer_range": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
        "layerdrop": 0.1,
        "add_cross_attention": True,
    },
    "opt": {
        **TOKEN_IDS,
        "decoder_start_token_id": 5,
        "max_position_embeddings": 32,
        "init_std": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
        "layerdrop": 0.0,  # another value raises
    },
    "gpt_neo": {
        **TOKEN_IDS,
        "num_layers": 2,  # the length of attention_layers; another number raises
        "decoder_start_token_id": 5,
        "max_position_embeddings": 32,
        "initializer_range": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
    },
    "gptj": {
        **TOKEN_IDS,
        "decoder_start_token_id": 5,
        "n_positions": 32,  # a default length: RoPE has no table
        "initializer_range": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
        "tie_word_embeddings": False,  # true raises
    },
    "bloom": {
        **TOKEN_IDS,
        "decoder_start_token_id": 5,
        "initializer_range": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
        "pretraining_tp": 4,  # acts with slow_but_exact, where it raises
        "slow_but_exact": True,
        "seq_length": 32,  # a default length
    },
    "t5gemma": {
        **TOKEN_IDS,
        "vocab_size": 50,  # another one than both sides have raises
        "decoder_start_token_id": 2,  # as does one that is not the decoder's BOS
        "num_labels": 3,  # jaxllm has no T5Gemma classifier
        "problem_type": "regression",
    },
    "gpt2": {
        **TOKEN_IDS,
        "decoder_start_token_id": 5,
        "n_positions": 32,
        "reorder_and_upcast_attn": True,  # float32 scores: what is always done
        "add_cross_attention": True,
        "initializer_range": 0.5,
        "num_labels": 3,
        "problem_type": "regression",
    },
    "t5": {
        **TOKEN_IDS,
        "decoder_start_token_id": 5,
        "initializer_factor": 0.5,
        "num_labels": 3,  # jaxllm has no T5 classifier
        "problem_type": "regression",
    },
}
DERIVED = {"gpt2": set(), "t5gemma": set(), "t5": {"bias_per_layer"}}
DERIVED |= {family: set() for family in ("bart", *tiny.BART, "xglm", *tiny.GPT_RELATIVES)}
DERIVED |= {family: {"rope"} for family in ("llama", *tiny.ROTARY)}


@pytest.fixture
def op_by_op() -> Iterator[None]:
    """Without jit: operations compile once by shape, not once a config."""
    with jax.disable_jit():
        yield


def pairs(table):
    """Each family's fields; what Llama's relatives share with it runs in test-all."""
    return [
        pytest.param(
            family, field, marks=[pytest.mark.slow] if shared(table, family, field) else []
        )
        for family, fields in table.items()
        for field in fields
    ]


def shared(table, family, field):
    return family in tiny.ROTARY and field in table["llama"] and field != "attention_bias"


@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_the_lists_cover_every_field(family):
    tables = (ACTS[family], DROPOUT[family], OTHERS[family], DERIVED[family])
    listed = [field for table in tables for field in table]
    config = FAMILIES[family].config
    fields = {f.name for f in dataclasses.fields(config)}
    assert sorted(config.attribute_map.get(name, name) for name in listed) == sorted(fields)


@pytest.mark.by_default("llama-num_hidden_layers")
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("family", "field"), pairs(ACTS))
def test_changes_the_logits(family, field):
    before = tiny.logits(tiny.cached(family))
    after = tiny.logits(tiny.make(family, **{field: ACTS[family][field]}))
    if field == "vocab_size":
        assert after.shape[-1] == ACTS[family][field]
    else:
        assert np.abs(after - before).max() > 1e-3 * before.std()


@pytest.mark.by_default("llama-eos_token_id")
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("family", "field"), pairs(OTHERS))
def test_keeps_the_logits(family, field):
    before = tiny.logits(tiny.cached(family))
    after = tiny.logits(tiny.make(family, **{field: OTHERS[family][field]}))
    np.testing.assert_array_equal(before, after)


@pytest.mark.ci
@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize(("family", "field"), pairs(DROPOUT))
def test_dropout(family, field):
    off = dict.fromkeys(DROPOUT[family], 0.0)
    still = tiny.make(family, **off)
    model = tiny.make(family, **{**off, field: DROPOUT[family][field]})
    key = jax.random.key(0)
    np.testing.assert_array_equal(tiny.logits(model), tiny.logits(still))
    np.testing.assert_array_equal(tiny.logits(still, dropout_key=key), tiny.logits(still))
    assert np.abs(tiny.logits(model, dropout_key=key) - tiny.logits(model)).max() > 1e-2


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
LONG = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 16}
LONG |= {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [1.0, 2.0, 3.0, 4.0]}
# Settings before and after a change of one parameter.
ROPE = {
    "theta": ({"rope_theta": 1e4}, {"rope_theta": 1e3}),
    "linear": ({"rope_theta": 1e4}, {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "dynamic": ({"rope_theta": 1e4}, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "dynamic factor": (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_scaling": {"type": "dynamic", "factor": 3.0}},
    ),
    "original, top level": (
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
            "original_max_position_embeddings": 1000,
        },
    ),
    **{
        f"{base['rope_type']} {key}": ({"rope_scaling": base}, {"rope_scaling": base | {key: new}})
        for base, changes in (
            (LLAMA3, {"factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0}),
            (LLAMA3, {"original_max_position_embeddings": 128}),
            (YARN, {"factor": 8.0, "attention_factor": 1.5, "beta_fast": 4.0, "beta_slow": 0.1}),
            (YARN, {"original_max_position_embeddings": 4000, "truncate": False}),
            (YARN | {"mscale_all_dim": 1.0}, {"mscale": 0.7}),
            (YARN | {"mscale": 0.7}, {"mscale_all_dim": 1.0}),
            (LONG, {"factor": 8.0, "attention_factor": 1.5}),
            (LONG, {"original_max_position_embeddings": 32}),
            (LONG, {"short_factor": [1.0, 1.0, 1.0, 1.0]}),
        )
        for key, new in changes.items()
    },
}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("mistral", {"sliding_window": 0}, "sliding_window: expected 1 to"),
        ("mistral", {"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ("qwen2", {"sliding_window": -1}, "sliding_window: expected 1 to"),
        ("cohere", {"layer_norm_eps": 0.0}, "layer_norm_eps: expected"),
        ("cohere", {"logit_scale": -1.0}, "logit_scale: expected"),
        ("cohere", {"rms_norm_eps": 1e-5}, "rms_norm_eps .* unknown in a 'cohere' config"),
        ("qwen2", {"max_window_layers": -1}, "max_window_layers: expected 0 or more, found -1"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: 1 layers, but num_hidden"),
        ("qwen3", {"layer_types": ["chunked", "full_attention"]}, "layer_types: .*'chunked'"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": False},
            "layer_types: sliding_attention needs use_sliding_window",
        ),
        ("qwen3", {"head_dim": 7}, "head_dim: rotary embeddings need an even number"),
        ("mistral", {"attention_bias": True}, r"attention_bias \(True\): unknown"),
        ("qwen2", {"attention_bias": True}, r"attention_bias \(True\): unknown"),
        ("qwen3", {"mlp_bias": True}, r"mlp_bias \(True\): unknown"),
        ("phi3", {"partial_rotary_factor": 1.5}, "partial_rotary_factor: expected an even part"),
        (
            "phi3",
            {"partial_rotary_factor": 0.4},
            "partial_rotary_factor: expected an even part of a head, 8, found 0.4",
        ),
        (
            "phi3",
            {"partial_rotary_factor": "1"},
            "rope_scaling.partial_rotary_factor: expected a number",
        ),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor: 0.75 contradicts another",
        ),
        ("phi3", {"rope_scaling": LONG}, "original_max_position_embeddings: 4096 contradicts"),
        (
            "phi3",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_type: expected default or",
        ),
        ("opt", {"layerdrop": 0.1}, "layerdrop: LayerDrop is not implemented, found 0.1"),
        ("opt", {"word_embed_proj_dim": 0}, "word_embed_proj_dim: expected 1 to"),
        ("opt", {"hidden_size": 30}, "hidden_size: 30 is not a multiple of num_attention_heads, 4"),
        ("opt", {"ffn_dim": 0}, "ffn_dim: expected 1 to"),
        ("opt", {"dropout": 1.0}, "dropout: expected 0 <= rate < 1"),
        ("opt", {"activation_function": "cube"}, "activation_function: unknown activation 'cube'"),
        ("opt", {"activation_dropout": 0.1}, r"activation_dropout \(0.1\): unknown"),
        (
            "gpt_neo",
            {"attention_layers": ["global", "far"]},
            "attention_layers: expected global or",
        ),
        ("gpt_neo", {"attention_types": ["local"]}, "attention_types: expected .*, found"),
        (
            "gpt_neo",
            {"attention_types": [[["local"], 2]]},
            "attention_layers: .* contradicts attention_types",
        ),
        ("gpt_neo", {"num_layers": 3}, "attention_layers: expected .* 3 layers"),
        ("gpt_neo", {"window_size": 0}, "window_size: expected 1 to"),
        ("gptj", {"rotary_dim": 5}, "rotary_dim: expected an even part of a head, 8, found 5"),
        ("gptj", {"rotary_dim": 10}, "rotary_dim: expected an even part of a head, 8, found 10"),
        ("gptj", {"tie_word_embeddings": True}, "tie_word_embeddings: the head has a bias"),
        ("gptj", {"scale_attn_weights": False}, r"scale_attn_weights \(False\): unknown"),
        ("bloom", {"slow_but_exact": True, "pretraining_tp": 2}, "slow_but_exact: with pretrain"),
        ("bloom", {"n_head": 7}, "hidden_size: 48 is not a multiple of n_head, 7"),
        ("bloom", {"n_embed": 96}, "n_embed: 96 contradicts hidden_size, 48"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts: expected 1 to"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok: found 5, but a layer has"),
        ("mixtral", {"num_experts_per_tok": 0}, "num_experts_per_tok: expected 1 to"),
        ("mixtral", {"router_aux_loss_coef": -1.0}, "router_aux_loss_coef: expected 0 or more"),
        ("mixtral", {"router_jitter_noise": 1.0}, "router_jitter_noise: expected 0 <= rate < 1"),
        ("mixtral", {"num_experts": 3}, "num_experts: 3 contradicts num_local_experts, 4"),
        ("qwen3_moe", {"num_experts": -1}, "num_experts: expected 0 or more, found -1"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step: expected 1 to"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size: expected 1 to"),
        ("qwen3_moe", {"mlp_only_layers": [2]}, "mlp_only_layers: there is no layer 2; num_hid"),
        ("qwen3_moe", {"max_window_layers": 1}, r"max_window_layers \(1\): unknown"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size"),
        ("phi3", {"full_attn_mod": 2}, r"full_attn_mod \(2\): unknown"),
        (
            "gemma",
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: only causal",
        ),
        (
            "gemma",
            {"hidden_activation": "relu"},
            "hidden_activation: 'relu' contradicts hidden_act",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: Gemma 3 has no"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern: expected 1 to"),
        ("gemma3_text", {"rope_local_base_freq": 0.0}, "rope_local_base_freq: expected a number"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
            "rope_parameters: expected full_attention and sliding_attention",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "rope_parameters.sliding_attention: layers with a window have RoPE without scaling",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": 7.0}}},
            "rope_local_base_freq: 100.0 contradicts rope_parameters.sliding_attention",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"full_attention": [["a", 1]]}},
            r"rope_parameters.full_attention: expected an object, found \[\['a', 1\]\]",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": 0}},
            "rope_parameters.sliding_attention: expected an object, found 0",
        ),
        (
            "gemma3_text",
            {"rope_parameters": {"sliding_attention": {"rope_theta": "x"}}},
            "rope_parameters.sliding_attention.rope_theta: expected a number > 0, found 'x'",
        ),
        ("gemma2", {"hidden_activation": "nope"}, "hidden_activation: unknown activation 'nope'"),
        ("gemma2", {"hidden_activation": 3}, "hidden_activation: expected str, found 3"),
        ("llama", {"rope_parameters": []}, r"rope_parameters: expected an object, found \[\]"),
        ("llama", {"rope_scaling": 0}, "rope_scaling: expected an object, found 0"),
        ("phi3", {"resid_pdrop": 1.0}, "resid_pdrop: expected 0 <= rate < 1"),
    ],
)
def test_impossible_values_of_windows_and_heads(family, change, message):
    with pytest.raises((ConfigError, UnsupportedError), match=rf"^{message}"):
        model_spec({**tiny.CONFIGS[family], **change})


@pytest.mark.in_ci("dynamic", "theta")
@pytest.mark.parametrize("name", ROPE)
def test_rope_parameters_act(name):
    """In both spellings alike. There are more positions than `max_position_embeddings`, 8."""
    angles = []
    for change in ROPE[name]:
        config = {**tiny.CONFIGS["llama"], "max_position_embeddings": 8, **change}
        spelt_v4 = model_spec(config).config
        parameters = dict(config.pop("rope_scaling", {}))
        parameters["rope_theta"] = config.pop("rope_theta", 10000.0)
        assert model_spec({**config, "rope_parameters": parameters}).config == spelt_v4
        angles.append(np.asarray(spelt_v4.rotary.angles(jnp.arange(9)[None], jnp.array([[9]]))))
    assert np.abs(angles[0] - angles[1]).max() > 1e-3


def test_a_gemma_3_with_images_says_what_to_use():
    with pytest.raises(UnsupportedError, match=r"^model_type: 'gemma3'.*vision tower; use"):
        model_spec({"model_type": "gemma3", "text_config": {}})


def test_gelu_of_gemma_is_the_tanh_approximation():
    """In files as in code, and what is written says so in both of its names."""
    spec = model_spec({**tiny.CONFIGS["gemma"], "hidden_act": "gelu"})
    written = spec.config.to_json("gemma", spec.architecture)
    assert written["hidden_act"] == written["hidden_activation"] == "gelu_pytorch_tanh"
    assert GemmaConfig(hidden_act="gelu") == GemmaConfig()


def test_gemma_3_with_attention_to_both_sides_does_not_generate():
    model = tiny.make("gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention: a model whose tokens"):
        model.generate(tiny.ids())


@pytest.mark.usefixtures("op_by_op")
def test_both_ropes_of_gemma_3_act():
    """In layers with and without a window alike; the defaults of their bases differ."""
    raw = tiny.CONFIGS["gemma3_text"]
    before = tiny.logits(tiny.cached("gemma3_text"))
    scaling = {"rope_type": "linear", "factor": 4.0}
    for change in ({"rope_theta": 50.0}, {"rope_scaling": scaling}, {"rope_local_base_freq": 5.0}):
        assert np.abs(tiny.logits(tiny.make(raw, **change)) - before).max() > 1e-3
    flat = model_spec({**raw, "rope_theta": 50.0, "rope_scaling": scaling}).config
    nested = {"full_attention": {**scaling, "rope_theta": 50.0}}
    nested["sliding_attention"] = {"rope_type": "default", "rope_theta": 100.0}
    assert model_spec({**raw, "rope_parameters": nested}).config == flat
    assert model_spec(raw).config.rotary.theta == Gemma3TextConfig().rotary.theta == 1e6


def test_the_part_of_a_head_that_is_rotated_acts():
    a, b = (tiny.logits(tiny.make("phi3", partial_rotary_factor=part)) for part in (0.5, 0.75))
    assert np.abs(a - b).max() > 1e-3


@pytest.mark.ci
def test_long_factor_acts_past_the_original_length():
    tokens = tiny.ids(1, 20)
    changed = LONG | {"long_factor": [1.0, 1.0, 1.0, 1.0]}
    a, b = (tiny.logits(tiny.make("llama", rope_scaling=r), tokens) for r in (LONG, changed))
    assert np.abs(a - b).max() > 1e-3
    a, b = (
        tiny.logits(tiny.make("llama", rope_scaling=r), tokens[:, :16]) for r in (LONG, changed)
    )
    np.testing.assert_array_equal(a, b)


@pytest.mark.ci
def test_max_position_embeddings_acts_through_dynamic_rope():
    rope = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    short, long = (
        tiny.logits(tiny.make("llama", max_position_embeddings=n, **rope)) for n in (4, 64)
    )
    assert np.abs(short - long).max() > 1e-3


@pytest.mark.ci
def test_n_positions_is_a_hard_limit():
    model = tiny.make("gpt2", n_positions=8)
    with pytest.raises(InputError, match="9 tokens, but this model has 8 positions"):
        tiny.logits(model, tiny.ids(1, 9))
    left_padded = np.arange(9)[None] > 0
    assert tiny.logits(model, tiny.ids(1, 9), attention_mask=left_padded).shape == (1, 9, 50)


@pytest.mark.ci
def test_add_cross_attention_acts_with_encoder_states():
    states = np.random.default_rng(0).standard_normal((2, 5, 32)).astype(np.float32)
    with pytest.raises(InputError, match="add_cross_attention"):
        tiny.logits(tiny.cached("gpt2"), encoder_hidden_states=states)
    model = tiny.make("gpt2", add_cross_attention=True)
    assert np.abs(tiny.logits(model, encoder_hidden_states=states) - tiny.logits(model)).max() > 0.1


@pytest.mark.ci
def test_umt5_has_a_bias_in_every_layer():
    a, b = (tiny.make(tiny.CONFIGS["t5"] | {"model_type": m}) for m in ("t5", "umt5"))
    assert (len(a.encoder.position_bias), len(b.encoder.position_bias)) == (1, 2)
    assert np.abs(tiny.logits(a) - tiny.logits(b)).max() > 1e-3


@pytest.mark.ci
def test_start_and_pad_act_in_the_shift_of_labels():
    labels = tiny.ids(2, 6)
    labels[0, 3] = -100
    losses = {
        str(change): float(tiny.make("t5", **change)(tiny.ids(), labels=labels).loss)
        for change in (
            {},
            {"decoder_start_token_id": 5},
            {"pad_token_id": 5, "decoder_start_token_id": 0},
        )
    }
    assert len(set(losses.values())) == 3


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_label_fields_act_in_classification(family):
    name = f"{ {'llama': 'Llama', 'gpt2': 'GPT2'}[family] }ForSequenceClassification"
    tokens = tiny.ids()
    tokens[:, -1] = 7

    def run(**changes):
        return tiny.make(family, architecture=name, **changes)

    three = run(num_labels=3, pad_token_id=0)
    assert three(tokens).logits.shape == (2, 3)
    named = run(id2label={"0": "a", "1": "b", "2": "c"}, pad_token_id=0)
    np.testing.assert_array_equal(three(tokens).logits, named(tokens).logits)
    pooled_before_pad = run(num_labels=3, pad_token_id=7)(tokens).logits
    assert np.abs(three(tokens).logits - pooled_before_pad).max() > 1e-3
    labels = np.eye(3, dtype=np.int32)[:2]
    losses = {
        float(run(num_labels=3, pad_token_id=0, problem_type=p)(tokens, labels=y).loss)
        for p, y in (
            ("regression", labels),
            ("multi_label_classification", labels),
            ("single_label_classification", np.array([0, 1])),
        )
    }
    assert len(losses) == 3


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "field"),
    [("llama", "initializer_range"), ("gpt2", "initializer_range"), ("t5", "initializer_factor")],
)
def test_initial_weights_follow_the_config(family, field):
    depth = {"llama": "num_hidden_layers", "gpt2": "n_layer", "t5": "num_layers"}[family]

    def weights(value):
        spec = model_spec(
            {**tiny.CONFIGS[family], field: value, depth: 1, "num_decoder_layers": None}
        )
        leaves = jax.tree.leaves(spec.make(spec.config, rngs=nnx.Rngs(0)))
        return [np.asarray(x) for x in leaves if np.std(x) > 0]

    for a, b in zip(weights(0.5), weights(2.0), strict=True):
        np.testing.assert_allclose(b, 4 * a, rtol=1e-5)


@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sliding_window", 128),
        ("pruned_heads", {"0": [1]}),
        ("rope", {"theta": 1.0}),
        ("bias_per_layer", True),
        ("tie_encoder_decoder", True),
        ("logit_scale", 0.5),
    ],
)
def test_an_unknown_key_that_is_on_raises(family, key, value):
    with pytest.raises(UnsupportedError, match=rf"^{key} \(.*\): unknown"):
        model_spec({**tiny.CONFIGS[family], key: value})
    plain = model_spec(tiny.CONFIGS[family]).config
    assert model_spec({**tiny.CONFIGS[family], key: None}).config == plain
    for off in (False, [], {}, 0, ""):
        raw = {**tiny.CONFIGS[family], key: off}
        if key in config_keys.OFF_KEYS:
            assert model_spec(raw).config == plain
        else:
            with pytest.raises((ConfigError, UnsupportedError), match=rf"^{key}"):
                model_spec(raw)


def test_keys_of_one_family_that_are_without_effect_with_some_values_only():
    gemma, bart = tiny.CONFIGS["gemma2"], tiny.CONFIGS["bart"]
    assert (
        model_spec({**gemma, "cache_implementation": "hybrid"}).config == model_spec(gemma).config
    )
    with pytest.raises(UnsupportedError, match=r"^cache_implementation"):
        model_spec({**gemma, "cache_implementation": "sink"})
    forced = {"force_bos_token_to_be_generated": True}
    assert model_spec({**bart, **forced}).config == model_spec(bart).config


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_bookkeeping_has_no_effect(family):
    raw = tiny.CONFIGS[family]
    plain = model_spec(raw).config
    read_elsewhere = {"model_type", "architectures", "id2label"}
    own = {field.name for field in dataclasses.fields(plain)}  # dropout of GPT-2, for example
    inert = INERT_MODEL_KEYS | config_keys.INERT_KEYS | GENERATION_KEYS
    for key in inert - read_elsewhere - own:
        assert model_spec({**raw, key: "anything"}).config == plain, key


@pytest.mark.parametrize("key", ["_attn_scale", "_note", "foo", "is_causal", "max_window_size"])
def test_only_listed_names_are_without_effect(key):
    """`is_causal: false` acts in transformers: the mask is bidirectional then."""
    for value in (0.5, False, ""):
        with pytest.raises(UnsupportedError, match=rf"^{key} \(.*\): unknown"):
            LlamaConfig(**{key: value})


def test_eos_token_ids_act():
    assert LlamaConfig(eos_token_ids=[7, 8]).eos_token_ids == (7, 8)
    raw = {**tiny.CONFIGS["llama"], "eos_token_id": 2, "eos_token_ids": [2, 7]}
    assert model_spec(raw).config.eos_token_ids == (2, 7)
    settings = GenerationConfig.from_dict({"eos_token_ids": 9})
    assert settings.eos_token_id == 9
    with pytest.raises(ConfigError, match="eos_token_id"):
        LlamaConfig(eos_token_ids=["</s>"])


def test_two_spellings_of_a_field():
    raw = tiny.CONFIGS["gpt2"]
    assert (
        model_spec({**raw, "hidden_size": 32, "num_hidden_layers": 2}).config
        == model_spec(raw).config
    )
    with pytest.raises(ConfigError, match="hidden_size: 64 contradicts n_embd, 32"):
        model_spec({**raw, "hidden_size": 64})
    raw = {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    assert model_spec({**tiny.CONFIGS["llama"], **raw}).config.rotary.theta == 1e4
    raw = {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear"}}
    with pytest.raises(ConfigError, match=r"rope_scaling\.type: 'linear' contradicts"):
        model_spec({**tiny.CONFIGS["llama"], **raw})
    raw = {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e4}}
    with pytest.raises(ConfigError, match=r"rope_theta: 500000\.0 contradicts"):
        model_spec({**tiny.CONFIGS["llama"], **raw})


@pytest.mark.by_default("mt5")
@pytest.mark.parametrize("model_type", ["mt5", "umt5"])
def test_scaling_of_models_that_version_5_calls_tied(model_type):
    """`tie_word_embeddings` is true beside an own, unscaled head: the tensors decide."""
    raw = {**tiny.CONFIGS["t5"], "model_type": model_type, "tie_word_embeddings": True}
    config = model_spec(raw).config
    assert config.scaled
    assert not dataclasses.replace(config, tie_word_embeddings=False).scaled
    assert not model_spec({**raw, "tie_word_embeddings": False}).config.scaled
    assert model_spec({**raw, "scale_decoder_outputs": True}).config.scaled
