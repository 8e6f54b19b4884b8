"""An invalid config.json, or one that does not fit the weights: errors name the field.

They are raised before any weight is read into memory.
"""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import jax
import pytest
from parity_data import ROOT

import jaxllm
from jaxllm.common.errors import JaxLLMError

YARN = {"rope_type": "yarn", "factor": 2.0}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}
ORIGINAL_0 = {"original_max_position_embeddings": 0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}

LLAMA = [
    ("vocab_size", 0),
    ("vocab_size", -5),
    ("vocab_size", True),
    ("vocab_size", "51"),
    ("vocab_size", 51.5),
    ("vocab_size", 52),
    ("vocab_size", 2**40),
    ("hidden_size", 48),
    ("hidden_size", 2**25),
    ("intermediate_size", 4096),
    ("num_hidden_layers", 0),
    ("num_hidden_layers", 1),
    ("num_hidden_layers", 3),
    ("num_hidden_layers", 4000),
    ("num_hidden_layers", 10**30),
    ("num_attention_heads", 0),
    ("num_attention_heads", 8),
    ("num_attention_heads", 3),
    ("num_key_value_heads", 3),
    ("num_key_value_heads", 1),
    ("num_key_value_heads", -2),
    ("head_dim", 7),
    ("head_dim", 2),
    ("head_dim", 2**20),
    ("hidden_act", "swiglu"),
    ("hidden_act", 3),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", -1e-6),
    ("rms_norm_eps", "1e-6"),
    ("rms_norm_eps", 10**400),
    ("attention_dropout", 1.5),
    ("attention_bias", False),
    ("attention_bias", 1),
    ("mlp_bias", False),
    ("tie_word_embeddings", False),
    ("tie_word_embeddings", "yes"),
    ("max_position_embeddings", 0),
    ("pretraining_tp", 0),
    ("initializer_range", 0),
    ("rope_theta", -1.0),
    ("rope_theta", 10**400),
    ("rope_scaling", "linear"),
    ("rope_scaling", {"type": "su"}),
    ("rope_scaling", {"type": ["linear"]}),
    ("rope_scaling.factor", {"type": "linear"}),
    ("rope_scaling.factor", {"type": "linear", "factor": 0}),
    ("rope_scaling.factor", {"type": "dynamic", "factor": "2"}),
    ("rope_scaling.low_freq_factor", LLAMA3),
    ("rope_scaling.short_factor", LONGROPE),
    ("rope_scaling.beta_fast", YARN | {"beta_fast": -1}),
    ("rope_scaling.truncate", YARN | {"truncate": "no"}),
    ("rope_scaling.original_max_position_embeddings", YARN | ORIGINAL_0),
    ("rope_scaling.beta_fast", {"type": "linear", "factor": 2.0, "beta_fast": 32}),
    ("rope_scaling.type", YARN | {"type": "linear"}),
    ("partial_rotary_factor", 0.5),
    ("pad_token_id", 51),
    ("bos_token_id", -2),
    ("eos_token_id", [2, -3]),
    ("eos_token_id", "</s>"),
    ("num_labels", 0),
    ("id2label", ["yes", "no"]),
    ("problem_type", "ranking"),
    ("quantization_config", {"quant_method": "gptq"}),
    ("quantization", {"group_size": 64, "bits": 4}),
    ("sliding_window", 16),
    ("model_type", "mistral"),
    ("model_type", 3),
    ("architectures", "MistralForCausalLM"),
    ("architectures", [3]),
    ("architectures", ["MistralForCausalLM"]),
]
GPT2 = [
    ("n_embd", 25),
    ("n_embd", 48),
    ("n_head", 0),
    ("n_layer", 3),
    ("n_layer", 2000),
    ("n_inner", 7),
    ("n_positions", 9),
    ("activation_function", "swoosh"),
    ("resid_pdrop", 1.0),
    ("layer_norm_epsilon", 0.0),
    ("add_cross_attention", True),
    ("hidden_size", 3),
    ("scale_attn_weights", "true"),
]
T5 = [
    ("d_model", 8),
    ("d_kv", 3),
    ("d_ff", 1),
    ("num_heads", 9),
    ("num_layers", 1),
    ("num_decoder_layers", 2),
    ("num_decoder_layers", 4000),
    ("feed_forward_proj", "gated-swoosh"),
    ("feed_forward_proj", "gated-"),
    ("feed_forward_proj", "relu"),
    ("dense_act_fn", "swoosh"),
    ("is_gated_act", False),
    ("relative_attention_num_buckets", 3),
    ("relative_attention_num_buckets", 30),
    ("relative_attention_max_distance", 2),
    ("dropout_rate", -0.1),
    ("layer_norm_epsilon", -1.0),
    ("scale_decoder_outputs", "no"),
    ("decoder_start_token_id", 10**6),
    ("bias_per_layer", True),
]
LIES = [
    (case, field, value)
    for case, lies in (("llama_bias", LLAMA), ("gpt2_base", GPT2), ("t5_v11", T5))
    for field, value in lies
]


@pytest.fixture
def no_weights(monkeypatch):
    """No array of the model is made."""

    def fail(*_, **__):
        raise AssertionError("an array was made")

    monkeypatch.setattr(jax.numpy, "array", fail)


def lying_copy(case: str, folder: Path, field: str, value) -> Path:
    shutil.copytree(ROOT / case, folder)
    config = json.loads((folder / "config.json").read_text())
    config[field.split(".")[0]] = value
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.in_ci(
    "gpt2_base-add_cross_attention-True",
    "gpt2_base-n_embd-48",
    "gpt2_base-n_inner-7",
    "gpt2_base-n_layer-3",
    "gpt2_base-n_positions-9",
    "llama_bias-attention_bias-False",
    "llama_bias-head_dim-1048576",
    "llama_bias-head_dim-2",
    "llama_bias-hidden_size-33554432",
    "llama_bias-hidden_size-48",
    "llama_bias-intermediate_size-4096",
    "llama_bias-mlp_bias-False",
    "llama_bias-num_attention_heads-8",
    "llama_bias-num_hidden_layers-1",
    "llama_bias-num_hidden_layers-3",
    "llama_bias-num_key_value_heads-1",
    "llama_bias-tie_word_embeddings-False",
    "llama_bias-vocab_size-52",
    "t5_v11-d_ff-1",
    "t5_v11-d_kv-3",
    "t5_v11-d_model-8",
    "t5_v11-feed_forward_proj-relu",
    "t5_v11-is_gated_act-False",
    "t5_v11-num_decoder_layers-2",
    "t5_v11-num_heads-9",
    "t5_v11-num_layers-1",
    "t5_v11-relative_attention_num_buckets-30",
)
@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("case", "field", "value"), LIES, ids=[f"{c}-{f}-{str(v)[:20]}" for c, f, v in LIES]
)
def test_invalid_config_names_the_field(case, field, value, tmp_path):
    folder = lying_copy(case, tmp_path / "model", field, value)
    load = jaxllm.load  # imported here, where its memory does not count
    tracemalloc.start()
    try:
        with pytest.raises(JaxLLMError) as caught:
            load(folder)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert str(folder) in message
    assert field in message
    assert "\n" not in message
    assert peak < 2**20


def test_number_of_cases():
    assert len(LIES) >= 40
