"""The config.json files of well-known models are understood."""

from __future__ import annotations

import jax
import pytest
from hub_configs import CONFIGS, MIXTRAL_8X7B

from jaxllm.models.build_options import Options
from jaxllm.models.model import model_shapes
from jaxllm.models.registry import FAMILIES, model_spec


@pytest.mark.parametrize("name", CONFIGS)
def test_is_understood_and_written_back(name):
    raw = CONFIGS[name]
    spec = model_spec(raw)
    listed = raw["architectures"][0]
    assert spec.architecture == spec.family.aliases.get(listed, listed)
    written = spec.config.to_json(raw["model_type"], spec.architecture)
    assert FAMILIES[raw["model_type"]].config.from_dict(written) == spec.config


def config(name):
    return model_spec(CONFIGS[name]).config


def test_t5_scales_and_gates_as_its_version_did():
    small, flan = config("t5-small"), config("flan-t5-base")
    assert (small.scaled, small.gated, small.act) == (True, False, "relu")
    assert (flan.scaled, flan.gated, flan.act) == (False, True, "gelu_new")
    assert small.relative_attention_max_distance == 128  # absent in the file
    assert not config("mt5-small").scaled
    assert not config("umt5-small").scaled
    assert config("umt5-small").bias_per_layer


def test_llama_rope_and_heads():
    v4, v5 = config("Llama-3.2-1B"), config("Llama-3.2-1B, saved by transformers 5")
    assert v4 == v5
    assert (v4.rotary.rope_type, v4.rotary.theta, v4.rotary.factor) == ("llama3", 5e5, 32.0)
    assert v4.eos_token_ids == (128001, 128008, 128009)
    assert (v4.size_per_head, config("SmolLM2-135M").size_per_head) == (64, 64)
    assert config("llama-7b").kv_heads == 32
    assert config("llama-7b").pad_token_id is None  # -1 in the file


def test_windows_of_mistral_and_qwen():
    assert config("Mistral-7B-v0.1").sliding_window == 4096
    assert config("Mistral-7B-Instruct-v0.2").sliding_window is None
    assert config("Qwen2.5-7B-Instruct").window(27) is None
    v4, v5 = config("Qwen3-0.6B"), config("Qwen3-0.6B, saved by transformers 5")
    assert (v4.size_per_head, v4.rotary, v4.window(0)) == (128, v5.rotary, v5.window(0))


def test_experts():
    v4, v5 = config("Qwen3-30B-A3B"), config("Qwen3-30B-A3B, saved by transformers 5")
    assert v4 == v5
    assert (v4.num_experts, v4.num_experts_per_tok, v4.norm_topk_prob) == (128, 8, True)
    assert all(map(v4.has_experts, range(48)))
    assert config("Mixtral-8x7B-Instruct-v0.1").expert_count == 8
    sizes = {name: parameters_of(CONFIGS[name]) for name in ("Qwen3-30B-A3B", "Qwen3-235B-A22B")}
    assert {name: round(size / 1e9, 1) for name, size in sizes.items()} == {
        "Qwen3-30B-A3B": 30.5,
        "Qwen3-235B-A22B": 235.1,
    }
    assert round(parameters_of(MIXTRAL_8X7B) / 1e9, 1) == 46.7


def parameters_of(raw):
    spec = model_spec(raw)
    shapes = model_shapes(spec.make, spec.config, Options())
    return sum(x.size for x in jax.tree.leaves(shapes))


def test_windows_and_rope_of_phi():
    four, long = config("Phi-3-mini-4k-instruct"), config("Phi-3-mini-128k-instruct")
    assert (four.sliding_window, four.rotary.rope_type) == (2047, "default")
    assert (long.rotary.rope_type, long.rotary.factor, long.rotary.original_positions) == (
        "longrope",
        32.0,
        4096,
    )
    assert config("Phi-3-mini-128k-instruct, first file") == long
    v4, v5 = config("Phi-4-mini-instruct"), config("Phi-4-mini-instruct, saved by transformers 5")
    assert v4 == v5
    assert (v4.size_per_head, v4.rotary.rotated) == (128, 96)


def test_versions_of_gemma():
    assert config("gemma-2b") == config("gemma-2b, saved by transformers 5")
    assert (config("gemma-2b").kv_heads, config("codegemma-7b-it").kv_heads) == (1, 16)
    gemma3, v5 = config("gemma-3-270m"), config("gemma-3-270m, saved by transformers 5")
    assert gemma3 == v5
    assert [gemma3.window(layer) for layer in range(4, 7)] == [512, None, 512]
    assert [gemma3.rope_of(layer) is None for layer in range(4, 7)] == [False, True, False]
    assert (gemma3.rotary.theta, gemma3.rope_of(0).theta) == (1e6, 1e4)
    assert [config("gemma-3-1b-it").slides(layer) for layer in (4, 5)] == [True, False]
    assert config("embeddinggemma-300m").window(0) == 256


def test_sizes_of_cohere():
    plus, v5 = config("c4ai-command-r-plus"), config("c4ai-command-r-plus, saved by transformers 5")
    assert plus == v5
    assert (plus.use_qk_norm, plus.logit_scale, plus.rotary.theta) == (True, 5 / 6, 7.5e7)
    aya = config("aya-23-8B")
    assert (aya.kv_heads, aya.size_per_head, aya.tie_word_embeddings) == (8, 128, True)
    assert config("c4ai-command-r-v01").kv_heads == 64


def test_both_sides_of_t5gemma():
    t5gemma = config("t5gemma-9b-2b-prefixlm-it")
    assert (t5gemma.encoder_width, t5gemma.width, t5gemma.decoder_start_token_id) == (3584, 2304, 2)
    assert [t5gemma.encoder.window(layer) for layer in (40, 41)] == [4096, None]


def test_sizes_of_opt():
    assert (config("opt-350m").width, config("opt-350m").hidden) == (512, 1024)
    assert (config("opt-1.3b").width, config("opt-1.3b").inner) == (2048, 8192)
    assert not config("galactica-30b").layer_norm_elementwise_affine


def test_layers_of_gpt_neo_and_heads_of_bloom():
    small = config("gpt-neo-125m")
    assert [small.window(layer) for layer in (0, 1, 11)] == [None, 256, 256]
    bloom, large = config("bloom-560m"), config("bloomz")
    assert (bloom.width, bloom.heads, bloom.context_length) == (1024, 16, 2048)
    assert (large.heads, large.size_per_head, large.pretraining_tp) == (112, 128, 4)


def test_labels():
    assert (config("distilgpt2").num_labels, config("gpt2").num_labels) == (1, 2)
