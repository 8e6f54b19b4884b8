"""GGUF models as Hugging Face checkpoints: names, layout and config, each way round."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import gguf
import numpy as np
import pytest
from paths import DATA

from jaxllm.checkpoint.gguf.names import _NAMES, HFView, _hf_names, hf_name, unpermute
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.weight_files import open_weights


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's LlamaModel.permute: half-split rows of each head to interleaved ones."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def convert_llama(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_sizes(writer, config)
    writer.add_rope_dimension_count(config["head_dim"])


def convert_sizes(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config.get("rope_parameters", config)["rope_theta"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_vocab_size(config["vocab_size"])


def convert_mixtral(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_llama(writer, config)
    writer.add_expert_count(config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])


def convert_qwen3_moe(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_mixtral(writer, config)
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def convert_gemma(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_sizes(writer, config)  # without the number of dimensions of RoPE


def convert_gemma2(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_gemma(writer, config)
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def convert_gemma3(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_gemma(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    if config["final_logit_softcapping"] is not None:
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if config["rope_scaling"] is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType(config["rope_scaling"]["rope_type"]))
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
    # Fields that converters write for other families with such windows.
    writer.add_sliding_window_pattern(config["sliding_window_pattern"])
    writer.add_rope_freq_base_swa(config["rope_local_base_freq"])


def convert_cohere(writer: gguf.GGUFWriter, config: dict) -> None:
    convert_sizes(writer, config)
    writer.add_layer_norm_eps(config["layer_norm_eps"])
    writer.add_logit_scale(config["logit_scale"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


def convert_gpt2(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_block_count(config["n_layer"])
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(4 * config["n_embd"])  # whatever n_inner is
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])


def convert_t5(writer: gguf.GGUFWriter, config: dict) -> None:
    writer.add_context_length(512)
    writer.add_embedding_length(config["d_model"])
    writer.add_feed_forward_length(config["d_ff"])
    writer.add_block_count(config["num_layers"])
    if writer.arch == "t5":
        writer.add_decoder_block_count(config["num_decoder_layers"])
        writer.add_decoder_start_token_id(config["decoder_start_token_id"])
    writer.add_head_count(config["num_heads"])
    writer.add_key_length(config["d_kv"])
    writer.add_value_length(config["d_kv"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_relative_attn_buckets_count(config["relative_attention_num_buckets"])
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])


ARCHITECTURES = {
    "LlamaForCausalLM": (gguf.MODEL_ARCH.LLAMA, convert_llama),
    "MistralForCausalLM": (gguf.MODEL_ARCH.LLAMA, convert_llama),
    "Qwen2ForCausalLM": (gguf.MODEL_ARCH.QWEN2, convert_llama),
    "Qwen3ForCausalLM": (gguf.MODEL_ARCH.QWEN3, convert_llama),
    "GemmaForCausalLM": (gguf.MODEL_ARCH.GEMMA, convert_gemma),
    "MixtralForCausalLM": (gguf.MODEL_ARCH.LLAMA, convert_mixtral),
    "Qwen3MoeForCausalLM": (gguf.MODEL_ARCH.QWEN3MOE, convert_qwen3_moe),
    "Gemma2ForCausalLM": (gguf.MODEL_ARCH.GEMMA2, convert_gemma2),
    "Gemma3ForCausalLM": (gguf.MODEL_ARCH.GEMMA3, convert_gemma3),
    "CohereForCausalLM": (gguf.MODEL_ARCH.COMMAND_R, convert_cohere),
    "GPT2LMHeadModel": (gguf.MODEL_ARCH.GPT2, convert_gpt2),
    "T5ForConditionalGeneration": (gguf.MODEL_ARCH.T5, convert_t5),
    "UMT5ForConditionalGeneration": (gguf.MODEL_ARCH.T5, convert_t5),
    "T5EncoderModel": (gguf.MODEL_ARCH.T5ENCODER, convert_t5),
}
# Masks, frequencies and copies of T5's shared embedding, which some checkpoints hold.
DROPPED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq", "coder.embed_tokens.weight")
TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "pad": "pad_token_id"}


def stacked(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of experts as one, with ``{e}`` for an expert's number in its name."""
    stacks: dict[str, list[np.ndarray]] = {}
    for name, array in tensors.items():
        stacks.setdefault(re.sub(r"experts\.\d+\.", "experts.{e}.", name), []).append(array)
    return {name: np.stack(x) if "{e}" in name else x[0] for name, x in stacks.items()}


def convert(
    folder: Path, path: Path, kind: gguf.GGMLQuantizationType | None = None
) -> tuple[dict, dict[str, np.ndarray]]:
    """Converts like llama.cpp's convert_hf_to_gguf.py, with the ``gguf`` package's own name table.

    Args:
        kind: type that matrices are quantized to, by the package.

    Returns:
        The folder's config and those of its tensors that are converted.
    """
    config = json.loads((folder / "config.json").read_text())
    architecture, set_parameters = ARCHITECTURES[config["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    set_parameters(writer, config)
    for name, key in TOKENS.items():
        if config.get(key) is not None:
            getattr(writer, f"add_{name}_token_id")(config[key])
    name_map = gguf.get_tensor_name_map(architecture, 8)
    tensors = {}
    with open_weights(folder) as source:
        for name, array in stacked({name: source.read(name) for name in source.names()}).items():
            if name.endswith(DROPPED):
                continue
            tensors[name] = array
            merged = name.replace("block_sparse_moe.experts.{e}", "feed_forward.experts")
            if merged != name:  # Mixtral's
                merged = merged.removeprefix("model.")
            merged = merged.replace("experts.{e}", "experts")
            target = name_map.get_name(merged, try_suffixes=(".weight", ".bias"))
            assert target is not None, name
            if ".q_proj." in name and architecture == gguf.MODEL_ARCH.LLAMA:
                array = permute(array, config["num_attention_heads"])
            if ".k_proj." in name and architecture == gguf.MODEL_ARCH.LLAMA:
                array = permute(array, config["num_key_value_heads"])
            if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
                array = np.ascontiguousarray(array.T)
            if "gemma" in config["model_type"] and name.endswith("norm.weight"):
                array = array + 1
                tensors[name] = array - 1  # to the last bit
            if kind is not None and array.ndim >= 2:
                array = gguf.quants.quantize(array, kind)
                writer.add_tensor(target, array, raw_dtype=kind)
            else:
                writer.add_tensor(target, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config, tensors


# In config.json but not in a GGUF file: training only, or what the formats say differently.
NOT_IN_GGUF = {
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate"),
    *("initializer_range", "initializer_factor", "pretraining_tp", "torch_dtype", "dtype"),
    *("is_gated_act", "dense_act_fn", "scale_decoder_outputs", "tie_word_embeddings"),
    *("sliding_window", "use_sliding_window", "max_window_layers"),  # llama.cpp has no windows
    *("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
}
AS_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
AS_LLAMA |= {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"}
# (checkpoint, what the formats cannot say and llama.cpp assumes)
CHECKPOINTS = {
    "llama_bias": {"hidden_act": "silu"},
    "llama_untied": {},
    "mistral_window": AS_LLAMA,
    "qwen2_window": {"hidden_act": "silu"},
    "qwen3_window": {"hidden_act": "silu"},
    "gemma_published": {"hidden_act": "gelu_pytorch_tanh"},
    "mixtral_window": {"hidden_act": "silu"},
    "qwen3_moe_normed": {"attention_bias": False},
    "gemma2_published": {"sliding_window": 4},
    "gemma3_published": {"sliding_window": 4},
    "cohere_full": {"hidden_act": "silu"},
    "gpt2_base": {"activation_function": "gelu_new"},
    "gpt2_hub_layout": {"n_inner": 72},
    "gpt2_untied": {"activation_function": "gelu_new"},
    "t5_relu": {"relative_attention_max_distance": 128},
    "umt5": {"relative_attention_max_distance": 128},
    "t5_flan_resaved": {"relative_attention_max_distance": 128},
    "t5_encoder": {"relative_attention_max_distance": 128, "is_encoder_decoder": False},
}


class TestRoundTrip:
    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_tensors_come_back_bit_for_bit(self, name, tmp_path):
        _, tensors = convert(DATA / "parity" / name, tmp_path / "a.gguf")
        if name == "gpt2_hub_layout":  # GPT2Model's names; a model with a head has the prefix
            tensors = {f"transformer.{key}": array for key, array in tensors.items()}
        with HFView(GGUFFile(tmp_path / "a.gguf")) as view:
            assert set(view.names()) == set(tensors)
            for key, expected in tensors.items():
                actual = view.read(key)
                assert actual.shape == expected.shape == view.info(key).shape, key
                assert actual.dtype == expected.dtype == view.info(key).dtype, key
                np.testing.assert_array_equal(actual, expected, err_msg=key)

    @pytest.mark.parametrize("name", CHECKPOINTS)
    def test_the_config_comes_back(self, name, tmp_path):
        config, tensors = convert(DATA / "parity" / name, tmp_path / "a.gguf")
        actual = HFView(GGUFFile(tmp_path / "a.gguf")).config
        expected = {k: v for k, v in config.items() if k not in NOT_IN_GGUF and v is not None}
        if name == "t5_encoder":
            del expected["num_decoder_layers"], expected["decoder_start_token_id"]
        if "rope_parameters" in expected:  # of transformers 5; ours is the form that both read
            expected["rope_theta"] = expected.pop("rope_parameters")["rope_theta"]
        if "num_local_experts" in expected and config["model_type"] == "qwen3_moe":
            expected["num_experts"] = expected.pop("num_local_experts")
        if "gemma" in config["model_type"]:
            del expected["attention_bias"]
        expected |= CHECKPOINTS[name]
        assert actual.pop("tie_word_embeddings") is ("lm_head.weight" not in tensors)
        if config["model_type"].endswith("t5"):
            assert actual.pop("n_positions") == 512
        for key in ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "logit_scale"):
            if key in expected:
                assert actual.pop(key) == np.float32(expected.pop(key))
        assert actual == expected

    def test_the_gguf_package_has_all_names(self):
        """The same numbers with all releases from 0.17 on."""
        assert {architecture: len(_hf_names(architecture)) for architecture in _NAMES} == {
            **{"llama": 16, "qwen2": 12, "qwen3": 14, "qwen3moe": 15, "command-r": 13},
            **{"gemma": 12, "gemma2": 14, "gemma3": 16, "gpt2": 10, "t5": 30, "t5encoder": 13},
        }

    def test_t5_with_a_plain_feed_forward(self):
        assert hf_name("t5", "enc.blk.1.ffn_up.weight", gated=False) == (
            "encoder.block.1.layer.1.DenseReluDense.wi.weight"
        )
        assert hf_name("t5", "dec.blk.1.ffn_up.weight", gated=False) == (
            "decoder.block.1.layer.2.DenseReluDense.wi.weight"
        )

    def test_unpermute_is_the_inverse_of_llama_cpps(self):
        weight = np.arange(3 * 8 * 2).reshape(24, 2)
        np.testing.assert_array_equal(unpermute(permute(weight, 3), 3), weight)
        assert (permute(weight, 3) != weight).any()

    @pytest.mark.parametrize(
        "name",
        [
            "blk.0.attn_q",
            "blk..attn_q.weight",
            "blk.{}.attn_q.weight",
            "blk.0.attn_q.scale",
            "enc.blk.0.attn_q.weight",
            "blk.0.ffn_gate_shexp.weight",
            "",
            "weight",
        ],
    )
    def test_other_names_have_no_counterpart(self, name):
        assert hf_name("llama", name) is None


class TestSmolLM2:
    def test_equals_transformers_bit_for_bit(self, smollm2_gguf):
        checksums = json.loads((DATA / "smollm2" / "tensors.json").read_text())
        with HFView(GGUFFile(smollm2_gguf)) as view:
            names = "\n".join(sorted([*view.names(), "lm_head.weight"]))  # which is tied
            assert hashlib.sha256(names.encode()).hexdigest() == checksums.pop("every name")
            for name, expected in checksums.items():
                array = np.ascontiguousarray(view.read(name))
                assert array.dtype == np.float32
                assert hashlib.sha256(array.tobytes()).hexdigest() == expected, name

    def test_config(self, smollm2_gguf):
        """Fields are what transformers 5.23 reads from the same file, ends are llama.cpp's."""
        view = HFView(GGUFFile(smollm2_gguf))
        assert view.generation == {"eos_token_id": [2, 0, 4]}
        assert view.config == {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 9.999999747378752e-06,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
        }
