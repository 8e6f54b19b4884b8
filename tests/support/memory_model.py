"""A Llama of 66 million parameters, large enough for its weights to stand out in a process."""

from __future__ import annotations

MB = 2**20
CONFIG = {
    "model_type": "llama",
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
