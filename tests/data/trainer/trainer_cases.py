"""Recipes of transformers' Trainer, PEFT and TRL, and the batches of ten steps that they share.

`make.py` runs the real libraries; tests/training/run/test_trainer_losses.py runs jaxllm.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

STEPS, ROWS, IGNORED = 10, 4, -100
LORA = {"rank": 4, "alpha": 8}
CASES: dict[str, dict[str, Any]] = {
    "adamw": {"model": "s_gpt2", "args": {"weight_decay": 0.3, "lr_scheduler_type": "constant"}},
    "linear": {"model": "s_llama", "args": {"warmup_steps": 3, "max_grad_norm": 0.2}},
    "cosine": {"model": "s_llama", "args": {"lr_scheduler_type": "cosine", "warmup_steps": 2}},
    "inverse_sqrt": {
        "model": "s_llama",
        "args": {"lr_scheduler_type": "inverse_sqrt", "warmup_steps": 2},
    },
    "accumulation": {"model": "s_llama", "args": {"gradient_accumulation_steps": 2}},
    "label_smoothing": {
        "model": "s_t5_gated",
        "args": {"label_smoothing_factor": 0.2, "optim": "sgd", "learning_rate": 5e-2},
    },
    "adafactor": {"model": "wide_t5", "args": {"optim": "adafactor", "learning_rate": 1e-3}},
    "adafactor_scaled": {"model": "wide_t5", "args": {"learning_rate": 1e-2}},
    "nesterov": {"model": "s_gpt2", "args": {"learning_rate": 5e-2}},
    "lora_gpt2": {"model": "s_gpt2", "lora": {**LORA, "targets": "c_attn"}},
    "rslora_bloom": {
        "model": "bloom_full",
        "lora": {**LORA, "targets": "query_key_value", "rslora": True},
    },
    "dora_gpt2": {"model": "s_gpt2", "lora": {**LORA, "targets": "c_attn", "dora": True}},
    "lora_phi3": {
        "model": "phi3_window",
        "lora": {**LORA, "targets": ("qkv_proj", "gate_up_proj")},
    },
    "dpo": {"model": "s_gpt2", "dpo": {"beta": 0.2, "loss_type": "sigmoid"}},
    "ipo": {"model": "s_gpt2", "dpo": {"beta": 0.2, "loss_type": "ipo"}},
    "packing": {"model": "s_llama"},
    "completions": {"model": "s_llama"},
}
"""Model, and what differs from the Trainer's defaults and a learning rate of `RATE`."""
RATE = 5e-3
PREFERENCES = 1e-3
"""Learning rate of DPO and IPO."""
NO_DROPOUT = {
    "bloom_full": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "phi3_window": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
}
VOCABULARY = 50
WIDE_T5 = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "vocab_size": 128,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 192,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
"""The model "wide_t5", whose matrices have sides from 128 on, so that both sides factor their
second moments. `weight` draws its weights."""
T5 = ("s_t5_gated", "wide_t5")


def rows(case: str) -> list[dict[str, list[int]]]:
    """Rows of all steps: `input_ids` and `labels`; of preferences, prompt, chosen and rejected."""
    rng = np.random.default_rng([7, zlib.crc32(case.encode())])

    def ids(count: int) -> list[int]:
        return rng.integers(5, VOCABULARY, count).tolist()

    made = []
    for _ in range(STEPS * ROWS):
        if "dpo" in CASES[case]:
            first, second = rng.integers(2, 6, 2).tolist()
            row = {"prompt_ids": ids(4), "chosen_ids": ids(first), "rejected_ids": ids(second)}
        elif case == "packing":
            row = {"input_ids": ids(int(rng.integers(3, 11)))}
        elif case == "completions":
            learned = int(rng.integers(1, 6))
            row = {"input_ids": ids(10), "completion_mask": [0] * (10 - learned) + [1] * learned}
        elif CASES[case]["model"] in T5:
            count = int(rng.integers(3, 8))
            row = {"input_ids": ids(9), "labels": ids(count) + [IGNORED] * (7 - count)}
        else:
            row = {"input_ids": ids(12)}
            counted = rng.random(12) < rng.uniform(0.3, 0.9)
            counted[0] = False  # nothing predicts it, but Trainer counts it for GPT-2
            counted[-1] = True
            row["labels"] = np.where(counted, row["input_ids"], IGNORED).tolist()
        made.append(row)
    return made


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A tensor of "wide_t5", by its Hugging Face name."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    scale = 1.0 if name == "shared.weight" else 0.05
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def first_a(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """LoRA's A at the start, by the name of its layer."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return rng.uniform(-0.2, 0.2, shape).astype(np.float32)
