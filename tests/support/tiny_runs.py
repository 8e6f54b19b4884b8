"""Recipes of tiny runs for the tests of training: seconds each, every part of a checkpoint in use.

Dropout, an average of the weights, a schedule and uneven rows are all on, so that whatever a
checkpoint leaves out shows in the weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.validation import from_plain
from jaxllm.training.monitor.metrics_log import read_metrics
from jaxllm.training.run.recipe import Recipe
from jaxllm.training.run.run import train

MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 260,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "attention_dropout": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 260,
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 4,
        "n_positions": 32,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "bos_token_id": 256,
        "eos_token_id": 256,
    },
    "t5": {
        "model_type": "t5",
        "vocab_size": 260,
        "d_model": 16,
        "d_kv": 4,
        "d_ff": 24,
        "num_layers": 1,
        "num_decoder_layers": 1,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "dropout_rate": 0.1,
        "pad_token_id": 257,
        "eos_token_id": 256,
        "decoder_start_token_id": 257,
    },
}
ROWS = 23
SPEEDS = ("tokens_per_second", "seconds_per_step", "mfu")


def plain(folder: Path, family: str = "llama", **changes: Any) -> dict[str, Any]:
    """A recipe as a YAML file has it; its data and the run's folder are in `folder`."""
    path = folder / "rows.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    lengths = {"max_length": 32} | ({"max_target_length": 16} if family == "t5" else {})
    return {
        "model": {"config": MODELS[family], "tokenizer": "bytes"},
        "data": {"path": str(path), "format": "seq2seq" if family == "t5" else "text", **lengths},
        "output_dir": str(folder / "run"),
        "max_steps": 12,
        "batch_size": 4,
        "optimizer": {
            "learning_rate": 1e-2,
            "schedule": "cosine",
            "warmup_steps": 3,
            "schedule_steps": 20,
            "weight_decay": 0.1,
        },
        "ema_decay": 0.9,
        "checkpoints": {"every": 100},
        **changes,
    }


def preference_fields(folder: Path, family: str = "llama") -> dict[str, Any]:
    """Fields of a recipe: even numbers are to be answered by yes, odd ones by no."""
    path = folder / "pairs.jsonl"
    answers = ["yes", "no"]
    rows = [
        {"prompt": f"{n} ", "chosen": answers[n % 2], "rejected": answers[1 - n % 2]}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"format": "preference", "path": str(path), "max_length": 16}
    off = {name: 0.0 for name in MODELS[family] if "drop" in name}
    return {
        "model": {"config": MODELS[family] | off, "tokenizer": "bytes"},
        "lora": {"rank": 4, "alpha": 16},
        "dpo": {"beta": 0.5},
        "data": data,
        "eval_data": dict(data),
        "ema_decay": None,
        "max_steps": 6,
    }


def rows() -> list[dict[str, Any]]:
    """One set for every format: uneven texts, pairs and labels."""
    rng = np.random.default_rng(0)
    words = ["".join(map(chr, rng.integers(97, 123, n))) for n in rng.integers(2, 14, ROWS)]
    return [
        {"text": f"{word} {word[::-1]}", "source": word, "target": word[::-1], "label": n % 3}
        for n, word in enumerate(words)
    ]


def recipe(folder: Path, family: str = "llama", **changes: Any) -> Recipe:
    return from_plain(Recipe, plain(folder, family, **changes))


def write_recipe(folder: Path, family: str = "llama", **changes: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain(folder, family, **changes), sort_keys=False))
    return path


def saved(folder: Path, step: int | None = None) -> tuple[dict[str, str], Any]:
    """Digests of every array of a checkpoint, which are equal for equal bits; data's position."""
    with RunCheckpoints(folder / "checkpoints", writable=False) as checkpoints:
        record = checkpoints.read(step)
    return {name: leaf.digest for name, leaf in record.leaves.items()}, record.meta["data"]


def measured(folder: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl without what depends on the clock."""
    lines = read_metrics(folder / "metrics.jsonl")
    return [{name: x for name, x in line.items() if name not in SPEEDS} for line in lines]


def tiny(folder: Path, **changes: Any) -> Recipe:
    """One program for every batch of every run here."""
    data = {"path": str(folder / "rows.jsonl"), "format": "text", "max_length": 32, "bucket": None}
    return recipe(folder, **{"data": data, "max_steps": 4, "checkpoints": {"every": 2}, **changes})


def go_on(made: Recipe, **changes: Any) -> Any:
    return train(replace(made, **changes), resume=True, quiet=True)


def run_of(made: Recipe) -> Path:
    return Path(made.output_dir or "")


def spoil(folder: Path, step: int) -> None:
    """Flips a bit in the largest file of a checkpoint."""
    files = (path for path in (folder / "checkpoints" / str(step)).rglob("*") if path.is_file())
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def stops(after: int, signal: int = 15) -> Any:
    """A `stop` that gives the signal once it was asked so often."""
    asked: Iterator[int] = iter(range(after))
    return lambda: None if next(asked, None) is not None else signal
