"""The config of a GGUF model: what it is read as, and what is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from weight_files import gguf_bytes, gguf_field, gguf_tensor, written

from jaxllm.checkpoint.gguf.config import hf_config_from_gguf
from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.common.errors import CheckpointError, UnsupportedError

FIELDS = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 500000.0,
}
TENSORS = {"token_embd.weight": (10, 32), "blk.0.attn_q.weight": (32, 32)}


def tiny(
    tmp_path, fields: dict | None = None, tensors: dict | None = None, drop: str = ""
) -> GGUFFile:
    """A Llama of one block, with some fields and tensors of float32 zeros added or changed."""
    merged = FIELDS | (fields or {})
    merged.pop(drop, None)
    described, offset = [], 0
    for name, shape in (TENSORS | (tensors or {})).items():
        described.append(gguf_tensor(name, list(shape[::-1]), 0, offset))
        offset += -(-math.prod(shape) * 4 // 32) * 32
    data = gguf_bytes([gguf_field(k, v) for k, v in merged.items()], described, b"\0" * offset)
    return GGUFFile(written(tmp_path / "a.gguf", data))


def config_of(file: GGUFFile, rope_factors: np.ndarray | None = None) -> dict:
    infos = {name: file.info(name) for name in file.names()}
    return hf_config_from_gguf(file.metadata, infos, rope_factors)


class TestConfig:
    def test_defaults(self, tmp_path):
        config = config_of(tiny(tmp_path, drop="llama.rope.freq_base"))
        assert config["rope_theta"] == 10000.0
        assert config["head_dim"] == 16
        assert "rope_scaling" not in config
        assert "eos_token_id" not in config
        config = config_of(tiny(tmp_path, drop="llama.attention.head_count_kv"))
        assert config["num_key_value_heads"] == 2

    def test_an_output_tensor_means_untied(self, tmp_path):
        assert config_of(tiny(tmp_path))["tie_word_embeddings"] is True
        file = tiny(tmp_path, tensors={"output.weight": (10, 32)})
        assert config_of(file)["tie_word_embeddings"] is False
        assert "lm_head.weight" in HFView(file).names()

    @pytest.mark.parametrize(
        ("fields", "expected"),
        [
            ({"rope.scaling.type": "none"}, None),
            ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, None),
            (
                {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
                {"rope_type": "linear", "factor": 4.0},
            ),
            ({"rope.scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
            (
                {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 8.0,
                    "rope.scaling.original_context_length": 16,
                    "rope.scaling.finetuned": True,
                },
                {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                },
            ),
            (
                {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 8.0,
                    "rope.scaling.yarn_beta_fast": 24.0,
                    "rope.scaling.yarn_beta_slow": 2.0,
                },
                {
                    "rope_type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "beta_fast": 24.0,
                    "beta_slow": 2.0,
                },
            ),
        ],
    )
    def test_rope_scaling(self, fields, expected, tmp_path):
        file = tiny(tmp_path, {f"llama.{key}": value for key, value in fields.items()})
        assert config_of(file).get("rope_scaling") == expected

    @pytest.mark.parametrize(
        ("ids", "expected"),
        [
            ({"eos": 2}, 2),
            ({"eos": 2, "eot": 2}, 2),
            ({"eos": 1, "eot": 9, "eom": 8}, [1, 9, 8]),
            ({"eos": 2**32 - 1, "eot": 3}, 3),
            ({}, None),
        ],
    )
    def test_end_tokens(self, ids, expected, tmp_path):
        fields = {f"tokenizer.ggml.{name}_token_id": i for name, i in ids.items()}
        view = HFView(tiny(tmp_path, fields))
        assert view.generation.get("eos_token_id") == expected
        own = ids.get("eos", 2**32 - 1)
        assert view.config.get("eos_token_id") == (own if own < 10 else None)

    def test_umt5_has_a_table_in_each_layer(self, tmp_path):
        fields = {
            "general.architecture": "t5",
            "t5.context_length": 512,
            "t5.embedding_length": 32,
            "t5.block_count": 2,
            "t5.feed_forward_length": 48,
            "t5.attention.head_count": 2,
            "t5.attention.key_length": 16,
            "t5.attention.layer_norm_epsilon": 1e-6,
            "t5.attention.relative_buckets_count": 32,
        }
        config = config_of(tiny(tmp_path, fields))
        assert config["model_type"] == "t5"
        assert config["feed_forward_proj"] == "relu"
        assert config["num_decoder_layers"] == 2
        assert config["decoder_start_token_id"] == 0
        config = config_of(tiny(tmp_path, fields, {"enc.blk.1.attn_rel_b.weight": (32, 2)}))
        assert config["model_type"] == "umt5"
        assert config["architectures"] == ["UMT5ForConditionalGeneration"]


def llama_cpp_rope_factors(base, dim, factor, low, high, context) -> np.ndarray:
    """The loop of llama.cpp's LlamaModel.generate_extra_tensors."""
    factors = []
    for freq in 1.0 / base ** (np.arange(0, dim, 2, dtype=np.float32) / dim):
        wavelength = 2 * math.pi / freq
        if wavelength < context / high:
            factors.append(1)
        elif wavelength > context / low:
            factors.append(factor)
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


class TestLlama3Rope:
    FACTORS = {"rope_freqs.weight": (8,)}  # noqa: RUF012

    @pytest.mark.parametrize("factor", [8.0, 32.0])
    @pytest.mark.parametrize("head_dim", [64, 128])
    def test_published_models(self, factor, head_dim, tmp_path):
        factors = llama_cpp_rope_factors(500000.0, head_dim, factor, 1.0, 4.0, 8192)
        assert len(set(factors)) > 4
        fields = {"llama.attention.key_length": head_dim, "llama.rope.dimension_count": head_dim}
        file = tiny(
            tmp_path,
            fields | {"llama.attention.value_length": head_dim},
            {"rope_freqs.weight": (head_dim // 2,)},
        )
        assert config_of(file, factors)["rope_scaling"] == {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }

    def test_the_view_hides_the_tensor(self, tmp_path):
        path = tiny(tmp_path, tensors=self.FACTORS).path
        data = bytearray(path.read_bytes())
        factors = llama_cpp_rope_factors(500000.0, 16, 8.0, 1.0, 4.0, 8192)
        data[-32:] = factors.tobytes()
        view = HFView(GGUFFile(written(path, bytes(data))))
        assert view.config["rope_scaling"]["factor"] == 8.0
        assert "model.layers.0.self_attn.q_proj.weight" in view.names()
        assert len(view.names()) == len(TENSORS)

    def test_ones_scale_nothing(self, tmp_path):
        file = tiny(tmp_path, tensors=self.FACTORS)
        assert "rope_scaling" not in config_of(file, np.ones(8, np.float32))

    @pytest.mark.parametrize(
        "factors",
        [
            llama_cpp_rope_factors(500000.0, 16, 8.0, 1.0, 4.0, 4096),
            llama_cpp_rope_factors(500000.0, 16, 8.0, 1.0, 3.0, 8192),
            llama_cpp_rope_factors(10000.0, 16, 8.0, 1.0, 4.0, 8192),
            np.full(8, np.nan),
            np.zeros(8),
            np.full(8, 2.0),
        ],
    )
    def test_other_numbers_are_refused(self, factors, tmp_path):
        file = tiny(tmp_path, tensors=self.FACTORS)
        with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight is not"):
            config_of(file, factors)

    def test_another_number_of_values(self, tmp_path):
        file = tiny(tmp_path, tensors={"rope_freqs.weight": (7,)})
        with pytest.raises(CheckpointError, match="has not 8 values"):
            HFView(file)


QWEN2 = {
    key.replace("llama.", "qwen2."): value if key != "general.architecture" else "qwen2"
    for key, value in FIELDS.items()
}


def per_layer(*values: int) -> bytes:
    return struct.pack(f"<IIQ{len(values)}I", 9, 4, len(values), *values)


# name: (changed fields, more tensors, class of the error, what the message says)
REFUSED = {
    "another architecture": (
        {"general.architecture": "phi3"},
        {},
        UnsupportedError,
        "general.architecture is 'phi3'",
    ),
    "experts": ({"llama.expert_count": 8}, {}, UnsupportedError, "llama.expert_count is 8"),
    "an unknown field": (
        {"llama.attention.sliding_window": 32},
        {},
        UnsupportedError,
        "not implement 'llama.attention.sliding_window'",
    ),
    "a window of Qwen2": (
        {**QWEN2, "qwen2.attention.sliding_window": 32},
        {},
        UnsupportedError,
        "not implement 'qwen2.attention.sliding_window'",
    ),
    "Llama's fields for Qwen3": (
        {"general.architecture": "qwen3"},
        {},
        CheckpointError,
        "lacks qwen3.attention.head_count",
    ),
    "heads per layer": (
        {"llama.attention.head_count": per_layer(2, 4)},
        {},
        UnsupportedError,
        "head_count has a value for each layer",
    ),
    "partial RoPE": (
        {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16},
        {},
        UnsupportedError,
        "turns 8 of 16",
    ),
    "values of another size": (
        {"llama.attention.value_length": 8},
        {},
        UnsupportedError,
        "value_length is 8",
    ),
    "longrope": (
        {"llama.rope.scaling.type": "longrope"},
        {},
        UnsupportedError,
        "scaling.type is 'longrope'",
    ),
    "YaRN with a factor of its own": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.attn_factor": 0.5},
        {},
        UnsupportedError,
        "attn_factor is 0.5",
    ),
    "two RoPE scalings": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
        {"rope_freqs.weight": (8,)},
        UnsupportedError,
        "beside another RoPE scaling",
    ),
    "some biases": ({}, {"blk.0.attn_q.bias": (32,)}, UnsupportedError, "only attn_q have a bias"),
    "an unknown tensor": (
        {},
        {"blk.0.attn_sinks.weight": (2,)},
        UnsupportedError,
        "'blk.0.attn_sinks.weight' is no part",
    ),
    "no heads": ({"llama.attention.head_count": 0}, {}, CheckpointError, "head_count is 0, not an"),
    "text for a number": (
        {"llama.block_count": "1"},
        {},
        CheckpointError,
        "block_count is '1', not an integer",
    ),
    "a fraction of a layer": (
        {"llama.block_count": 1.0},
        {},
        CheckpointError,
        "is 1.0, not an",
    ),
    "NaN": ({"llama.rope.freq_base": math.nan}, {}, CheckpointError, "freq_base is nan"),
    "infinity": ({"llama.rope.freq_base": math.inf}, {}, CheckpointError, "freq_base is inf"),
    "another vocabulary": ({"llama.vocab_size": 11}, {}, CheckpointError, "is 11, but .* 10 rows"),
    "a token outside": (
        {"tokenizer.ggml.eos_token_id": 10},
        {},
        CheckpointError,
        "eos_token_id is 10, not an id below 10",
    ),
    "a token that is a list": (
        {"tokenizer.ggml.eos_token_id": per_layer(1, 2)},
        {},
        CheckpointError,
        "eos_token_id is .1 2.",
    ),
    "odd heads": ({"llama.attention.head_count": 3}, {}, CheckpointError, "are no 3 heads"),
}


class TestRefused:
    @pytest.mark.parametrize("case", REFUSED)
    def test_field_or_tensor(self, case, tmp_path):
        fields, tensors, error, message = REFUSED[case]
        file = tiny(tmp_path, fields, tensors)
        with pytest.raises(error, match=message) as raised:
            HFView(file)
        assert str(file.path) in str(raised.value)

    @pytest.mark.parametrize(
        "key", [key for key in FIELDS if not key.endswith(("freq_base", "kv", "architecture"))]
    )
    def test_a_missing_field(self, key, tmp_path):
        with pytest.raises(CheckpointError, match=f"lacks {key}"):
            HFView(tiny(tmp_path, drop=key))

    def test_no_embedding(self, tmp_path):
        data = gguf_bytes([gguf_field(k, v) for k, v in FIELDS.items()], [])
        with pytest.raises(CheckpointError, match="no tensors"):
            HFView(GGUFFile(written(tmp_path / "a.gguf", data)))
        data = gguf_bytes(
            [gguf_field(k, v) for k, v in FIELDS.items()], [gguf_tensor("v", [1], 0, 0)], b"\0" * 4
        )
        with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
            HFView(GGUFFile(written(tmp_path / "a.gguf", data)))

    def test_gpt2_with_other_positions(self, tmp_path):
        fields = {
            "general.architecture": "gpt2",
            "gpt2.context_length": 64,
            "gpt2.embedding_length": 32,
            "gpt2.block_count": 1,
            "gpt2.attention.head_count": 2,
            "gpt2.attention.layer_norm_epsilon": 1e-5,
        }
        tensors = {"position_embd.weight": (63, 32), "blk.0.ffn_up.weight": (48, 32)}
        with pytest.raises(CheckpointError, match=r"is 64, but .* 63 rows"):
            HFView(tiny(tmp_path, fields, tensors))

    def test_an_unknown_name_is_named(self, tmp_path):
        view = HFView(tiny(tmp_path))
        for call in (view.read, view.info):
            with pytest.raises(CheckpointError, match=r"no tensor is named 'token_embd\.weight'"):
                call("token_embd.weight")
