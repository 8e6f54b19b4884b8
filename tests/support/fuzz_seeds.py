"""Small valid files of each kind, and those of the faults found, from which the fuzz tests start.

Files of faults stand in tests/data/fuzz/TARGET.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tiny
from flax_bytes import in_chunks, packed
from hub_configs import CONFIGS
from paths import DATA
from small_gguf import gguf_file
from torch_bytes import example

from jaxllm.checkpoint.safetensors import write_safetensors

TOKENIZERS = DATA / "tokenizers"
FAULTS = DATA / "fuzz"
GENERATION = {
    **{"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 40, "eos_token_id": [2, 3]},
    **{"max_length": 64, "bad_words_ids": [[5], [6, 7]], "sequence_bias": [[[5], -1.0]]},
    **{"exponential_decay_length_penalty": [5, 1.1], "stop_strings": ["x"], "num_beams": 3},
    **{"transformers_version": "4.57.6", "use_cache": False, "constraints": None},
}
ADAPTER = {
    **{"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 16, "bias": "none"},
    **{"target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.1, "modules_to_save": None},
    **{"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"^v_proj$": 8}, "use_rslora": False},
    **{"base_model_name_or_path": "x", "inference_mode": True, "layers_to_transform": [0, 1]},
}
ROWS = [
    {"id": "a", "input_ids": [5, 6, 7], "max_new_tokens": 4, "temperature": 0.5, "do_sample": True},
    {"input_ids": [5, 6, 7], "seed": 3, "num_beams": 2, "eos_token_id": [3], "length_penalty": 2.0},
    {"messages": [{"role": "user", "content": "Hello"}], "stop_strings": ["x"]},  # no tokenizer
]
RECIPE = {
    "model": {"config": tiny.CONFIGS["llama"], "tokenizer": "bytes"},
    "data": {"path": "rows.jsonl", "format": "text", "max_length": 32},
    **{"output_dir": "run", "max_steps": 8, "batch_size": 4, "lora": {"rank": 2}},
    "optimizer": {"learning_rate": 1e-3},
}
"""JSON is YAML, too."""
TOKENIZER_CONFIG = {
    "legacy": False,
    "bos_token": "<s>",
    "added_tokens_decoder": {"420": {"content": "<|im_end|>", "special": True}},
    "additional_special_tokens": ["<|im_end|>"],
    "clean_up_tokenization_spaces": True,
    "chat_template": [{"name": "default", "template": "{{ messages }}"}],
}


def encoded(*values: Any) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


def chat_templates() -> list[bytes]:
    templates = json.loads((TOKENIZERS / "chat_templates.json").read_text(encoding="utf-8"))
    return [template["template"].encode() for template in templates.values()]


def safetensors(**tensors: np.ndarray) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.safetensors"
        write_safetensors(path, tensors)
        return path.read_bytes()


def adapter() -> bytes:
    layer = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    shapes = {"A": (2, 32), "B": (32, 2)}
    return safetensors(
        **{layer.format(i, x): np.ones(shapes[x], np.float32) for i in range(2) for x in shapes}
    )


def flax_msgpack() -> bytes:
    """A file of every kind of value that Flax writes in a checkpoint."""
    kinds = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    layer = {name: np.ones((3, 4), kind) for name, kind in kinds.items()}
    return packed(
        {
            "h": {"0": {"attn": {"kernel": np.ones((3, 5), np.float32), **layer}}},
            "wte": {"embedding": in_chunks(np.ones((5, 7), np.float32), 12)},
            "lm_head": {"kernel": in_chunks(np.ones((4, 6), np.float16), 7), "bias": np.ones(6)},
            "empty": {},
        }
    )


def with_shards(folder: Path) -> bytes:
    """The index of three shards, which it writes to the folder."""
    weight_map = {}
    for i in range(3):
        name = f"model-0000{i}-of-00003.safetensors"
        write_safetensors(folder / name, {f"w.{i}": np.ones(3), f"b.{i}": np.ones(2)})
        weight_map |= {f"w.{i}": name, f"b.{i}": name}
    index = {"metadata": {"total_size": 120}, "weight_map": weight_map}
    return json.dumps(index, indent=2).encode()


def seeds(target: str, folder: Path) -> list[bytes]:
    """Valid files of a target's kind; what else they need is written to the folder."""
    fast = [path.read_bytes() for path in sorted((TOKENIZERS / "fast").iterdir())]
    match target:
        case "safetensors":
            return [safetensors(a=np.ones((2, 3), np.float32), b=np.arange(4), c=np.ones(3, bool))]
        case "safetensors_index":
            return [with_shards(folder)]
        case "flax_msgpack":
            return [flax_msgpack()]
        case "torch_zip" | "torch_legacy":
            kinds = {"torch_zip": "llama_in_training", "torch_legacy": "xglm_legacy"}
            actual = DATA / "torch_files" / kinds[target] / "pytorch_model.bin"
            return [example(is_legacy=target == "torch_legacy"), actual.read_bytes()]
        case "gguf":
            return [gguf_file()]
        case "adapter":
            return [adapter()]
        case "config":
            return encoded(*CONFIGS.values(), *tiny.CONFIGS.values())
        case "generation_config":
            return encoded(GENERATION)
        case "adapter_config":
            return encoded(ADAPTER)
        case "recipe":
            return encoded(RECIPE)
        case "rows":
            return encoded(*ROWS)
        case "tokenizer_json":
            return fast
        case "tokenizer_and_prompt":
            return [data.rstrip()[:-1] + b', "prompt": "Hello <s> x1"}' for data in fast]
        case "tokenizer_config":
            return encoded(TOKENIZER_CONFIG)
        case "llama_model" | "t5_model":
            name = {"llama_model": "llama.model", "t5_model": "t5.model"}[target]
            return [(TOKENIZERS / name).read_bytes()]
        case "chat_template":
            return chat_templates()
    raise ValueError(target)


def fault_files() -> list[tuple[str, Path]]:
    """(target, file) of every fault that was found."""
    return [(path.parent.name, path) for path in sorted(FAULTS.glob("*/*"))]
