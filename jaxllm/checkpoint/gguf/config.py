"""Builds a Hugging Face config.json from the metadata of a GGUF file.

The fields are those that llama.cpp's convert_hf_to_gguf.py writes. It omits part of the config:
tying, gating, biases and GPT-2's inner size are inferred from the tensors, the rest has the values
that llama.cpp assumes when it runs the file. An unknown field of the architecture raises, because
it changes what the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxllm.checkpoint.gguf.generation import token_id
from jaxllm.checkpoint.source import TensorInfo
from jaxllm.common.errors import CheckpointError, UnsupportedError, listed, quoted

ARCHITECTURES = (
    *("llama", "qwen2", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "command-r"),
    *("gpt2", "t5", "t5encoder"),
)
"""llama.cpp's architecture names. Its converter writes Mistral as "llama", without the window, and
Mixtral as a "llama" with experts."""

ROPE_FACTORS = "rope_freqs.weight"

_LAYER_NORM = "attention.layer_norm_epsilon"
_RMS_NORM = "attention.layer_norm_rms_epsilon"


def hf_config_from_gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    rope_factors: np.ndarray | None = None,
) -> dict[str, Any]:
    """Builds the Hugging Face config of a GGUF model.

    Args:
        metadata: the file's fields, as :class:`~jaxllm.checkpoint.gguf.reader.GGUFFile` gives them.
        tensors: its tensors, under llama.cpp's names.
        rope_factors: the values of ``rope_freqs.weight`` where the file has this tensor: Llama 3.1
            files hold their frequency scaling in it.

    Returns:
        The content of a config.json, with ``model_type`` and ``architectures``. Where the file says
        how embeddings are pooled, ``pooling_type`` is one of "none", "mean", "cls", "last", "rank".
    """
    source = str(next(iter(tensors.values())).file)
    architecture = str(metadata.get("general.architecture"))
    if architecture not in ARCHITECTURES:
        raise UnsupportedError(
            f"{source}: general.architecture is {quoted(architecture)}; jaxllm reads "
            + ", ".join(ARCHITECTURES)
        )
    fields = Fields(metadata, architecture, source)
    if architecture in _ROTARY:
        config = _class(architecture, tensors) | _rotary(fields, tensors, rope_factors)
        config |= _experts(fields, architecture, tensors, config)
        if architecture.startswith("gemma"):
            del config["hidden_act"]
            config |= _gemma(fields, architecture, config)
        if architecture == "command-r":
            config["layer_norm_eps"] = fields.number(_LAYER_NORM)
            config["logit_scale"] = fields.number("logit_scale")
        else:
            config["rms_norm_eps"] = fields.number(_RMS_NORM)
    elif architecture == "gpt2":
        config = _gpt2(fields, tensors)
    else:
        config = _t5(fields, tensors, encoder_only=architecture == "t5encoder")
    pooling = fields.integer("pooling_type", -1, minimum=-1)
    if pooling >= len(_POOLING):
        raise CheckpointError(
            f"{source}: {architecture}.pooling_type is {pooling}, not a number from 0 to "
            f"{len(_POOLING) - 1}"
        )
    if pooling >= 0:
        config["pooling_type"] = _POOLING[pooling]
    fields.refuse_unused()
    config["vocab_size"] = _rows(tensors, "token_embd.weight", source)
    if fields.integer("vocab_size", config["vocab_size"]) != config["vocab_size"]:
        raise CheckpointError(
            f"{source}: {architecture}.vocab_size is {fields.integer('vocab_size')}, but "
            f"token_embd.weight has {config['vocab_size']} rows"
        )
    config["tie_word_embeddings"] = "output.weight" not in tensors
    return config | _token_ids(metadata, config["vocab_size"], source)


_POOLING = ("none", "mean", "cls", "last", "rank")
"""llama.cpp's kinds of pooling, by their numbers."""


def _rows(tensors: Mapping[str, TensorInfo], name: str, source: str) -> int:
    if name not in tensors:
        raise CheckpointError(f"{source}: the tensor {name} is missing")
    return tensors[name].shape[0]


_ROTARY = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
}
"""Model type and class of the architectures with the fields that `_rotary` reads."""


def _class(architecture: str, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    """The model's class, and the fields whose values follow from which tensors are there."""
    if architecture == "llama" and "blk.0.ffn_gate_inp.weight" in tensors:
        return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    model_type, name = _ROTARY[architecture]
    config: dict[str, Any] = {"model_type": model_type, "architectures": [name]}
    if architecture in ("llama", "qwen3", "qwen3moe", "command-r"):
        separate = ("attn_q", "attn_k", "attn_v")
        is_fused = "blk.0.attn_qkv.weight" in tensors
        attention = (*(("attn_qkv",) if is_fused else separate), "attn_output")
        config["attention_bias"] = _has_biases(tensors, *attention)
    if architecture == "llama":
        config["mlp_bias"] = _has_biases(tensors, "ffn_gate", "ffn_up", "ffn_down")
    if architecture == "command-r":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in tensors
    return config


def _experts(
    fields: Fields, architecture: str, tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of a mixture of experts. llama.cpp has experts in all layers, and divides their
    weights by the sum."""
    if architecture == "qwen3moe":
        return {
            "num_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
            "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
            "norm_topk_prob": True,
        }
    if architecture == "llama" and "blk.0.ffn_gate_inp.weight" in tensors:
        fields.require("expert_feed_forward_length", config["intermediate_size"])
        return {
            "num_local_experts": fields.integer("expert_count"),
            "num_experts_per_tok": fields.integer("expert_used_count"),
        }
    fields.require("expert_count", 0)
    fields.require("expert_used_count", 0)
    return {}


def _gemma(fields: Fields, architecture: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's own fields. The scale of scores and Gemma 3's layers with a window are llama.cpp's,
    as a file has none."""
    if architecture == "gemma":
        return {"hidden_act": "gelu_pytorch_tanh"}
    is_27b = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[architecture]
    width = config["hidden_size"] // config["num_attention_heads"]
    own = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width if is_27b else config["head_dim"],
        "sliding_window": fields.integer("attention.sliding_window"),
    }
    if architecture == "gemma2":
        own["attn_logit_softcapping"] = fields.number("attn_logit_softcapping", 50.0)
        own["final_logit_softcapping"] = fields.number("final_logit_softcapping", 30.0)
        return own
    own["sliding_window_pattern"] = fields.integer("attention.sliding_window_pattern", 6)
    own["rope_local_base_freq"] = fields.number("rope.freq_base_swa", 10000.0)
    if fields.get("final_logit_softcapping") is not None:
        own["final_logit_softcapping"] = fields.number("final_logit_softcapping")
    return own


def _rotary(
    fields: Fields, tensors: Mapping[str, TensorInfo], rope_factors: np.ndarray | None
) -> dict[str, Any]:
    heads = fields.integer("attention.head_count")
    hidden = fields.integer("embedding_length")
    default = hidden // heads or 1
    head_dim = fields.integer(
        "attention.key_length", fields.integer("rope.dimension_count", default)
    )
    rotated = fields.integer("rope.dimension_count", head_dim)
    fields.require("attention.value_length", head_dim)
    if rotated != head_dim:
        raise UnsupportedError(
            f"{fields.source}: RoPE turns {rotated} of {head_dim} dimensions; jaxllm turns all"
        )
    fields.require("attention.causal", True)
    theta = fields.number("rope.freq_base", 10000.0)
    config = {
        "hidden_size": hidden,
        "intermediate_size": fields.integer("feed_forward_length"),
        "num_hidden_layers": fields.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("context_length"),
        "hidden_act": "silu",
        "rope_theta": theta,
    }
    scaling = _rope_scaling(fields)
    if ROPE_FACTORS in tensors:
        if scaling is not None or rope_factors is None:
            raise UnsupportedError(f"{fields.source}: {ROPE_FACTORS} beside another RoPE scaling")
        scaling = _llama3_scaling(rope_factors, theta, head_dim, fields.source)
    if scaling is not None:
        config["rope_scaling"] = scaling
    return config


def _has_biases(tensors: Mapping[str, TensorInfo], *layers: str) -> bool:
    """True if these layers of block 0 have biases: all or none, as in Hugging Face's models."""
    have = [layer for layer in layers if f"blk.0.{layer}.bias" in tensors]
    if have and len(have) < len(layers):
        source = tensors[f"blk.0.{have[0]}.bias"].file
        raise UnsupportedError(
            f"{source}: of {', '.join(layers)} only {', '.join(have)} have a bias; "
            "Hugging Face's models have all or none"
        )
    return bool(have)


def _rope_scaling(fields: Fields) -> dict[str, Any] | None:
    old_factor = fields.get("rope.scale_linear")  # before rope.scaling.* (llama.cpp, 2023)
    rope_type = fields.get("rope.scaling.type", "none" if old_factor is None else "linear")
    factor = fields.number("rope.scaling.factor", 1.0 if old_factor is None else old_factor)
    original = fields.integer(
        "rope.scaling.original_context_length", fields.integer("context_length")
    )
    fields.require("rope.scaling.attn_factor", 1.0)
    fields.require("rope.scaling.yarn_attn_factor", 1.0)
    fields.require("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    fields.require("rope.scaling.yarn_log_multiplier", 0.0)
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    if rope_type == "none" or (rope_type == "linear" and factor == 1.0):
        return None
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    if rope_type == "yarn":
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": fast,
            "beta_slow": slow,
        }
    raise UnsupportedError(
        f"{fields.source}: {fields.prefix}rope.scaling.type is {quoted(rope_type)}; jaxllm reads "
        "none, linear and yarn"
    )


def _llama3_scaling(
    factors: np.ndarray, theta: float, head_dim: int, source: str
) -> dict[str, Any] | None:
    """Recovers the ``rope_scaling`` of Llama 3.1 and later from its frequency divisors.

    A GGUF file holds the divisors instead of the four parameters they are computed from. All
    published Llama 3.x have 1, 4 and 8192 for three of them and differ in ``factor``, the largest
    divisor; llama.cpp's converter assumes 8192 too. Other divisors raise UnsupportedError.
    """
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(f"{source}: {ROPE_FACTORS} has not {head_dim // 2} values")
    if np.all(factors == 1):
        return None
    factor, low, high, context = float(factors.max()), 1.0, 4.0, 8192
    with np.errstate(all="ignore"):
        frequencies = theta ** -(np.arange(0, 2 * len(factors), 2) / head_dim)
        smooth = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0, 1)
        expected = 1 / ((1 - smooth) / factor + smooth)
        equal = np.allclose(factors, expected, rtol=1e-5, atol=0)
    if not equal:
        raise UnsupportedError(
            f"{source}: {ROPE_FACTORS} is not the RoPE scaling of a Llama 3 (factor {factor:g}, "
            f"{low:g}, {high:g}, {context}); load the model from its safetensors"
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": context,
    }


def _gpt2(fields: Fields, tensors: Mapping[str, TensorInfo]) -> dict[str, Any]:
    heads = fields.integer("attention.head_count")
    fields.require("attention.head_count_kv", heads)
    fields.get("feed_forward_length")  # always written as 4 * n_embd; the tensor has the true size
    positions = fields.integer("context_length")
    rows = _rows(tensors, "position_embd.weight", fields.source)
    if rows != positions:
        raise CheckpointError(
            f"{fields.source}: gpt2.context_length is {positions}, but position_embd.weight has "
            f"{rows} rows"
        )
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_positions": positions,
        "n_embd": fields.integer("embedding_length"),
        "n_layer": fields.integer("block_count"),
        "n_head": heads,
        "n_inner": _rows(tensors, "blk.0.ffn_up.weight", fields.source),
        "layer_norm_epsilon": fields.number(_LAYER_NORM),
        "activation_function": "gelu_new",
    }


def _t5(fields: Fields, tensors: Mapping[str, TensorInfo], *, encoder_only: bool) -> dict[str, Any]:
    heads = fields.integer("attention.head_count")
    key_length = fields.integer("attention.key_length")
    layers = fields.integer("block_count")
    fields.require("attention.head_count_kv", heads)
    fields.require("attention.value_length", key_length)
    fields.get(_RMS_NORM)  # same value as layer_norm_epsilon
    family = "umt5" if "enc.blk.1.attn_rel_b.weight" in tensors else "t5"  # a table in each layer
    part = "EncoderModel" if encoder_only else "ForConditionalGeneration"
    gated = "enc.blk.0.ffn_gate.weight" in tensors
    config = {
        "model_type": family,
        "architectures": [("UMT5" if family == "umt5" else "T5") + part],
        "is_encoder_decoder": not encoder_only,
        "d_model": fields.integer("embedding_length"),
        "d_kv": key_length,
        "d_ff": fields.integer("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "n_positions": fields.integer("context_length"),
        "relative_attention_num_buckets": fields.integer("attention.relative_buckets_count"),
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": fields.number(_LAYER_NORM),
        "feed_forward_proj": "gated-gelu" if gated else "relu",
    }
    if not encoder_only:
        config["num_decoder_layers"] = fields.integer("decoder_block_count", layers)
        config["decoder_start_token_id"] = fields.integer("decoder_start_token_id", 0, minimum=0)
    return config


def _token_ids(metadata: Mapping[str, Any], vocab_size: int, source: str) -> dict[str, int]:
    """BOS, EOS and pad ids; other end tokens are generation settings."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {ours: token_id(metadata, theirs, vocab_size, source) for ours, theirs in names.items()}
    return {f"{name}_token_id": value for name, value in ids.items() if value is not None}


class Fields:
    """Metadata fields of one architecture; tracks reads, so that unknown fields can be rejected."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, source: str) -> None:
        self.source = source
        self.prefix = f"{architecture}."
        self._values = {
            key.removeprefix(self.prefix): value
            for key, value in metadata.items()
            if key.startswith(self.prefix)
        }
        # The first two describe the file; the vocabulary's size is checked against the tensors.
        self._used = {"tensor_data_layout", "rope.scaling.finetuned", "vocab_size"}

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Reads an integer, required unless there is a default."""
        value = self._required(key, default)
        if type(value) is not int or not minimum <= value < 2**31:
            raise CheckpointError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}, not an integer of at least "
                f"{minimum}"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Reads a positive finite number, required unless there is a default."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise CheckpointError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}, not a positive number"
            )
        return float(value)

    def get(self, key: str, default: Any = None) -> Any:
        """Reads a field of any scalar type, or returns the default."""
        self._used.add(key)
        value = self._values.get(key, default)
        if isinstance(value, list | np.ndarray):
            raise UnsupportedError(
                f"{self.source}: {self.prefix}{key} has a value for each layer; jaxllm's models "
                "have the same in all"
            )
        return value

    def require(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedError unless the field is absent or has one of the `allowed` values."""
        value = self.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedError(
                f"{self.source}: {self.prefix}{key} is {quoted(value)}; jaxllm implements "
                f"{' or '.join(map(str, allowed))} only"
            )

    def refuse_unused(self) -> None:
        """Raises UnsupportedError naming the fields that were not read, if any."""
        unused = sorted(self._values.keys() - self._used)
        if unused:
            raise UnsupportedError(
                f"{self.source}: jaxllm does not implement "
                + listed([quoted(self.prefix + key) for key in unused])
            )

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise CheckpointError(f"{self.source}: the metadata lacks {self.prefix}{key}")
        return value
