"""Random files and adapters for `save_load.py`, and comparisons of tensors; needs no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

LOGITS_CLOSE = 1e-4
"""Largest difference of two logits of order 1, in float32."""
MERGE_CLOSE = {np.dtype(np.float32): 2e-6, np.dtype(ml_dtypes.bfloat16): 2.0**-7}
"""Largest difference of merged weights, as a share of the tensor's largest: rounding of a sum of a
few products, and of the result."""
DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(bool),
}
VOCAB = 32

_ROTARY = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_labels": 3,
}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_labels": 3,
}
_T5 = {
    "vocab_size": VOCAB,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
_WINDOW = {"sliding_window": 4, "use_sliding_window": False}
ARCHITECTURES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("LlamaForCausalLM", "LlamaConfig", _ROTARY),
    ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    ("T5ForConditionalGeneration", "T5Config", _T5),
    ("LlamaModel", "LlamaConfig", _ROTARY),
    ("MistralForCausalLM", "MistralConfig", {**_ROTARY, "sliding_window": 4}),
    ("GPT2Model", "GPT2Config", _GPT2),
    ("UMT5ForConditionalGeneration", "UMT5Config", _T5),
    ("LlamaForSequenceClassification", "LlamaConfig", _ROTARY),
    ("Qwen2ForCausalLM", "Qwen2Config", {**_ROTARY, **_WINDOW}),
    ("GPT2ForSequenceClassification", "GPT2Config", _GPT2),
    ("MT5ForConditionalGeneration", "MT5Config", _T5),
    ("Qwen3ForCausalLM", "Qwen3Config", {**_ROTARY, **_WINDOW}),
    ("T5EncoderModel", "T5Config", _T5),
)
"""The reference's class, its config's class, and fields of the config."""
BUFFERS = (
    r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
)
"""Tensors of old files that no model reads."""
CHANGES = ("prefix", "buffers", "copies", "mixed")
"""Changes of a tensor file: the base model's prefix dropped or added, buffers of old versions,
copies of the tied embedding, and vectors in float32 beside matrices in half precision."""


def draw_file(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """A random model of the reference, how it is saved, and how its files are changed."""
    name, config_class, fields = ARCHITECTURES[number % len(ARCHITECTURES)]
    return {
        "class": name,
        "config_class": config_class,
        "config": {**fields, **_options(rng, config_class, fields)},
        "dtype": str(rng.choice(["float32", "bfloat16", "float16"])),
        "seed": int(rng.integers(10**6)),
        "shard_bytes": [None, "4KB", "12KB"][int(rng.integers(3))],
        "saved_shard_bytes": [10**9, 5000, 1][int(rng.integers(3))],
        "changes": [change for change in CHANGES if rng.random() < 0.4],
    }


def _options(rng: np.random.Generator, config_class: str, fields: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"tie_word_embeddings": bool(rng.integers(2))}
    if "d_model" in fields:
        kinds = ["relu", "gated-gelu", "gated-silu", "gelu"]
        return {**options, "feed_forward_proj": str(rng.choice(kinds))}
    if config_class in ("LlamaConfig", "Qwen3Config"):
        options["attention_bias"] = bool(rng.integers(2))
    if config_class == "LlamaConfig":
        options["mlp_bias"] = bool(rng.integers(2))
    return options


def change_files(folder: Path, case: dict[str, Any]) -> None:
    """Rewrites the tensor files of a folder as the case says."""
    shards = {path: read_file(path) for path in sorted(folder.glob("*.safetensors"))}
    names = [name for tensors in shards.values() for name in tensors]
    for tensors in shards.values():
        for name in list(tensors):
            x = tensors.pop(name)
            if "mixed" in case["changes"] and x.ndim == 1:
                x = x.astype(np.float32)
            tensors[renamed(name, names, case)] = x
    added = added_tensors({k: x for tensors in shards.values() for k, x in tensors.items()}, case)
    shards[max(shards)].update(added)
    for path, tensors in shards.items():
        write_file(path, tensors)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {
            name: path.name for path, tensors in shards.items() for name in tensors
        }
        index.write_text(json.dumps(content))


def renamed(name: str, names: list[str], case: dict[str, Any]) -> str:
    """The name without the base model's prefix, or with it where the file has none."""
    if "prefix" not in case["changes"] or "d_model" in case["config"]:
        return name
    prefix = "transformer." if "n_embd" in case["config"] else "model."
    if any(other.startswith(prefix) for other in names):
        return name.removeprefix(prefix)
    return prefix + name


def added_tensors(tensors: dict[str, np.ndarray], case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Buffers and copies, in the dtype of the other tensors."""
    config, added = case["config"], {}
    embedding = next(n for n in tensors if re.search(r"(embed_tokens|wte|shared)\.weight", n))
    x = tensors[embedding]
    start = embedding.rpartition("embed_tokens")[0] or embedding.rpartition("wte")[0]
    if "buffers" in case["changes"]:
        for i in range(2):
            if "n_embd" in config:
                mask = np.tril(np.ones((1, 1, 32, 32)))
                added[f"{start}h.{i}.attn.bias"] = mask.astype(x.dtype)
                added[f"{start}h.{i}.attn.masked_bias"] = np.array(-1e4, x.dtype)
            elif "hidden_size" in config:
                name = f"{start}layers.{i}.self_attn.rotary_emb.inv_freq"
                added[name] = np.ones(2, np.float32)
        if "d_model" in config and "Encoder" not in case["class"]:
            name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
            added[name] = np.full((8, 4), 3, x.dtype)
    if "copies" in case["changes"]:
        if "d_model" in config:
            stacks = ["encoder"] if "Encoder" in case["class"] else ["encoder", "decoder"]
            added |= {f"{stack}.embed_tokens.weight": x.copy() for stack in stacks}
        has_head = re.search("CausalLM|LMHead|Conditional", case["class"]) is not None
        if has_head and config["tie_word_embeddings"]:
            added["lm_head.weight"] = x.copy()
    return {name: x for name, x in added.items() if name not in tensors}


def is_buffer(name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in BUFFERS)


def read_file(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a safetensors file, read by the format's own description."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        flat = np.frombuffer(content[begin:end], DTYPES[entry["dtype"]])
        tensors[name] = flat.reshape(entry["shape"])
    return tensors


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """The tensors of all safetensors files of a folder."""
    return {
        name: x
        for path in sorted(folder.glob("*.safetensors"))
        for name, x in read_file(path).items()
    }


def write_file(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Writes a file with the package safetensors."""
    from safetensors.numpy import save_file

    save_file({name: np.array(x, order="C") for name, x in tensors.items()}, path, {"format": "pt"})


def bits(x: Any) -> tuple[str, tuple[int, ...], bytes]:
    """Dtype, shape and bytes of an array or of a random key."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    host = np.asarray(x)
    return str(host.dtype), host.shape, host.tobytes()


def token_inputs(case: dict[str, Any]) -> dict[str, np.ndarray]:
    """Arguments of a call of the model."""
    rng = np.random.default_rng(0)
    given = {"input_ids": rng.integers(3, VOCAB, (2, 9))}
    if "Conditional" in case["class"]:
        given["decoder_input_ids"] = rng.integers(3, VOCAB, (2, 5))
    return given


_LORA_BASES = (0, 1, 2, 7, 8)
"""Numbers in `ARCHITECTURES` of the base models."""
_TARGETS = {
    "hidden_size": (
        ["q_proj", "v_proj"],
        ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        ["gate_proj"],
        r".*\.1\.self_attn\.(q|o)_proj",
        "all-linear",
    ),
    "n_embd": (["c_attn"], ["c_attn", "c_proj", "c_fc"], ["c_fc"], r".*h\.0\.attn\.c_attn"),
    "d_model": (["q", "v"], ["q", "k", "v", "o", "wi_0", "wi_1", "wo"], ["wo"], "all-linear"),
}
_OWN_TARGETS = {
    "hidden_size": ("all-linear", "attn.(q|v)", ("mlp.up", "o_proj"), r"blocks.1.attn.k"),
    "n_embd": ("all-linear", "attn.(q|v)", "c_attn", ("mlp.up", "attn.q")),
    "d_model": ("all-linear", "attn.(q|v)", ("mlp.down", "cross.k"), "wi_0"),
}


def draw_lora(rng: np.random.Generator, number: int) -> dict[str, Any]:
    """A random base model, an adapter of PEFT (`lora`) and one of jaxllm (`own`)."""
    name, config_class, fields = ARCHITECTURES[_LORA_BASES[number % len(_LORA_BASES)]]
    family = next(key for key in _TARGETS if key in fields)
    config = {**fields, "tie_word_embeddings": bool(rng.integers(2))}
    if family == "d_model":
        config["feed_forward_proj"] = "gated-gelu"
    shared = {"rslora": bool(rng.integers(2)), "dora": bool(rng.random() < 0.3)}
    rank, alpha = int(rng.integers(1, 7)), float(rng.choice([1, 3, 8, 16.5]))
    targets = _TARGETS[family]
    lora: dict[str, Any] = {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": shared["rslora"],
        "use_dora": shared["dora"],
        "target_modules": targets[int(rng.integers(len(targets)))],
        "lora_dropout": float(rng.choice([0.0, 0.1])),
        "fan_in_fan_out": family == "n_embd",
    }
    if isinstance(lora["target_modules"], list):
        first = lora["target_modules"][0]
        if rng.random() < 0.3:
            lora |= {"rank_pattern": {first: rank + 2}, "alpha_pattern": {first: 5.0}}
        if rng.random() < 0.3:
            lora["layers_to_transform"] = [1]
        if rng.random() < 0.2 and len(lora["target_modules"]) > 1:
            lora["exclude_modules"] = [lora["target_modules"][1]]
    if family == "hidden_size" and rng.random() < 0.4:
        untied = "Causal" in name and not config["tie_word_embeddings"]
        modules = [["norm"], ["lm_head"], ["norm", "embed_tokens"]]
        lora["modules_to_save"] = modules[int(rng.integers(3)) if untied else 0]
    own_targets = _OWN_TARGETS[family]
    own = {"rank": rank, "alpha": alpha, "targets": own_targets[int(rng.integers(4))], **shared}
    return {
        "class": name,
        "config_class": config_class,
        "config": config,
        "dtype": str(rng.choice(["float32", "float32", "bfloat16"])),
        "seed": int(rng.integers(10**6)),
        "lora": lora,
        "own": own,
    }


def lora_config(case: dict[str, Any]) -> dict[str, Any]:
    """Arguments of PEFT's LoraConfig."""
    tasks = {"Causal": "CAUSAL_LM", "LMHead": "CAUSAL_LM", "Sequence": "SEQ_CLS"}
    task = next((task for part, task in tasks.items() if part in case["class"]), "SEQ_2_SEQ_LM")
    return {**case["lora"], "task_type": task}


def merge_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> str:
    """What differs between two merged models; empty if nothing does."""
    if ours.keys() != theirs.keys():
        return f"tensor names: {sorted(ours.keys() ^ theirs.keys())}"
    worst = []
    for name, expected in theirs.items():
        a, b = (x.astype(np.float64) for x in (ours[name], expected))
        close = MERGE_CLOSE[expected.dtype] * np.abs(b).max()
        if a.shape != b.shape or not (distance := float(np.abs(a - b).max())) <= close:
            worst.append(f"{name} by {distance:.2g} of {np.abs(b).max():.2g}")
    return "; ".join(worst)
