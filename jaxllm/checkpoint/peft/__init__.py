"""LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT adapts GPT-2's q, k and v as one layer, `c_attn`, with one A; here each has its own A. Loading
gives each a copy of A and its rows of B. Saving writes one A if the copies are still equal. If they
differ, the three A are stacked and B is block-diagonal, of rank 3 r, with alpha multiplied to keep
the scale: PEFT computes the same outputs.
"""

from __future__ import annotations

from jaxllm.checkpoint.peft.load import load_adapter
from jaxllm.checkpoint.peft.save import save_adapter

__all__ = ["load_adapter", "save_adapter"]
