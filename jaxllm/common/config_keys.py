"""The policy for unknown keys of config.json, generation_config.json and adapter_config.json.

A key that changes what the reference implementation computes acts here too, or is an error. The
keys that are accepted without effect are listed here by name. Each file's own keys are listed where
the file is read. null stands for a key that is absent. Any other key is an error.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from jaxllm.common.errors import shortened

# fmt: off
INERT_KEYS = frozenset({
    # What a call returns.
    "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_return_dict",
    # Provenance.
    "_commit_hash", "_from_model_config", "_model_name_or_path", "_name_or_path", "_num_labels",
    "_original_object_hash", "author", "auto_class", "base_model", "custom_pipelines", "datasets",
    "description", "finetuning_task", "is_llama_config", "language", "library_name", "license",
    "model_name", "name_or_path", "pipeline_tag", "tags", "transformers.js_config",
    "transformers_version", "unsloth_fixed", "unsloth_optimized", "unsloth_version", "version",
    # Execution in other programs: dtypes, kernels, caches, memory.
    "_attn_implementation_autoset", "_attn_implementation_internal",
    "_experts_implementation_internal", "_flash_attn_2_enabled",
    "attention_implementation", "attn_implementation", "chunk_size_feed_forward", "device_map",
    "dtype", "flash_attention", "flash_attn_2_enabled", "low_cpu_mem_usage", "model_parallel",
    "move_model_to_device", "selective_checkpoint_enabled", "sequence_parallel_enabled",
    "torch_dtype", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attention_2",
    "use_flash_attn", "use_flashattn", "use_sdpa",
    # Tokenizers.
    "add_bos_token", "add_eos_token", "additional_special_tokens", "bos_token", "cls_token",
    "cls_token_id", "eos_token", "mask_token", "mask_token_id", "max_seq_length",
    "max_sequence_length", "model_max_length", "pad_token", "padding_side", "sep_token",
    "sep_token_id", "tokenizer_class", "tokenizer_file", "tokenizer_name", "tokenizer_path",
    "tokenizer_type", "unk_token", "unk_token_id", "vocab_file",
    # Training runs, and dropout of other families.
    "attention_probs_dropout_prob", "attn_pdrop", "bf16", "deepspeed", "embd_pdrop", "fp16",
    "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "ignore_index",
    "label_smoothing", "learning_rate", "line_by_line", "neftune_noise_alpha", "num_train_epochs",
    "pretraining_tp", "resid_pdrop", "seed", "tf_legacy_loss", "train_batch_size",
    "use_gradient_checkpointing", "warmup_steps", "weight_decay",
})
"""Keys that change no result, whatever their value."""

OFF_KEYS = frozenset({
    "add_cross_attention", "alibi", "attention_bias", "bias", "do_normalize",
    "fuse_attention_ffn", "fuse_attention_qkv", "fuse_sequence_parallel_allreduce", "mlp_bias",
    "n_special", "output_router_logits", "pruned_heads", "qk_layernorm", "qkv_bias",
    "rope_interleaved", "sequence_parallel", "tie_encoder_decoder", "use_fused_rms_norm",
    "use_fused_rope", "use_mrope", "use_qk_norm", "use_recompute", "xla_device",
})
"""Keys that change no result while their value is false, 0 or empty."""
# fmt: on


def unknown_keys(
    raw: Mapping[str, Any], known: Container[str], off: Container[str] = OFF_KEYS
) -> dict[str, Any]:
    """The keys that nobody reads and that are on no list, with their values.

    Args:
        known: keys that the caller reads, or that are without effect in its file.
        off: keys that are without effect while they are false, 0 or empty.

    >>> raw = {"d_model": 9, "_name_or_path": "x", "alibi": False, "logit_scale": 2.0, "_scale": 1}
    >>> unknown_keys(raw, {"d_model"})
    {'logit_scale': 2.0, '_scale': 1}
    """
    return {
        key: value
        for key, value in raw.items()
        if value is not None
        and key not in known
        and key not in INERT_KEYS
        and not (key in off and _is_off(value))
    }


def _is_off(value: object) -> bool:
    """True for false, 0 and empty values; arrays, which no file holds, have no truth."""
    return not hasattr(value, "__array__") and not value


def with_all_end_tokens(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object with its `eos_token_ids`, which some tools write, added to `eos_token_id`.

    >>> with_all_end_tokens({"eos_token_id": 2, "eos_token_ids": [2, 7]})
    {'eos_token_id': [2, 7]}
    """
    if raw.get("eos_token_ids") is None:
        return raw
    tokens: list[Any] = []
    for value in (raw.get("eos_token_id"), raw["eos_token_ids"]):
        listed = value if isinstance(value, list | tuple) else [] if value is None else [value]
        tokens += [token for token in listed if token not in tokens]
    rest = {key: value for key, value in raw.items() if key != "eos_token_ids"}
    return {**rest, "eos_token_id": tokens[0] if len(tokens) == 1 else tokens}


def describe_keys(keys: Mapping[Any, Any]) -> str:
    """Names with their values, shortened; names only if they are many.

    >>> describe_keys({"alibi": True, "scale": 2})
    'alibi (True), scale (2)'
    """
    values = {shortened(str(key)): shortened(str(value), 40) for key, value in keys.items()}
    described = ", ".join(f"{name} ({value})" for name, value in values.items())
    return described if len(described) <= 250 else shortened(", ".join(values), 250)
