"""The policy for unknown keys of config.json, generation_config.json and adapter_config.json.

A key that is ignored may change what a model computes, so an unknown key is an error. It is no
obstacle if its value is off, if its name is private (transformers' own notes begin with `_`), or
if it only chooses what is returned or how a tokenizer or a training run worked.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from jaxllm.common.messages import shortened

# fmt: off
INERT_KEYS = frozenset({
    # What a call returns.
    "keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "output_past",
    "output_scores", "return_dict", "return_dict_in_generate", "torchscript", "use_return_dict",
    # Provenance.
    "author", "auto_class", "base_model", "custom_pipelines", "datasets", "description",
    "finetuning_task", "is_llama_config", "language", "library_name", "license", "model_name",
    "name_or_path", "pipeline_tag", "tags", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_optimized", "unsloth_version", "version",
    # Execution in other programs: dtypes, kernels, caches, memory.
    "attention_implementation", "attn_implementation", "chunk_size_feed_forward", "device_map",
    "dtype", "flash_attention", "flash_attn_2_enabled", "low_cpu_mem_usage", "model_parallel",
    "move_model_to_device", "selective_checkpoint_enabled", "sequence_parallel_enabled",
    "torch_dtype", "use_bfloat16", "use_cache", "use_flash_attention", "use_flash_attention_2",
    "use_flash_attn", "use_flashattn", "use_sdpa",
    # Tokenizers, and the chats of custom code.
    "additional_special_tokens", "assistant_token_id", "bos_token", "bot_token_id", "chat_format",
    "cls_token", "cls_token_id", "eos_token", "eos_token_ids", "mask_token", "mask_token_id",
    "max_seq_length", "max_sequence_length", "max_window_size", "model_max_length", "pad_token",
    "padding_side", "prefix", "sep_token", "sep_token_id", "tokenizer_class", "tokenizer_file",
    "tokenizer_name", "tokenizer_path", "tokenizer_type", "unk_token", "unk_token_id",
    "user_token_id", "vocab_file",
    # Training runs, and dropout of other families.
    "attention_probs_dropout_prob", "attn_pdrop", "bf16", "deepspeed", "embd_pdrop", "fp16",
    "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob", "ignore_index",
    "label_smoothing", "learning_rate", "neftune_noise_alpha", "num_train_epochs",
    "pretraining_tp", "resid_pdrop", "seed",
    "task_specific_params", "tf_legacy_loss", "train_batch_size", "use_gradient_checkpointing",
    "warmup_steps", "weight_decay",
})
# fmt: on


def unknown_keys(raw: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """The keys that may change results and that nobody reads, with their values.

    >>> unknown_keys({"d_model": 9, "_note": 1, "alibi": False, "logit_scale": 2.0}, {"d_model"})
    {'logit_scale': 2.0}
    """
    return {
        key: value
        for key, value in raw.items()
        if key not in known
        and key not in INERT_KEYS
        and not key.startswith("_")
        and (hasattr(value, "__array__") or value)  # arrays, which no file holds, have no truth
    }


def describe_keys(keys: Mapping[str, Any]) -> str:
    """Names with their values, shortened; names only if they are many.

    >>> describe_keys({"alibi": True, "scale": 2})
    'alibi (True), scale (2)'
    """
    values = {shortened(key): shortened(str(value), 40) for key, value in keys.items()}
    described = ", ".join(f"{name} ({value})" for name, value in values.items())
    return described if len(described) <= 250 else shortened(", ".join(values), 250)
