"""LoRA adapters as PEFT's files: adapter_config.json and adapter_model.safetensors.

PEFT knows GPT-2's q, k and v as one layer, `c_attn`, with one A; here each has its own. Reading
gives each a copy of A and its rows of B. Writing gives that back while the copies are equal. Where
they were trained apart, A is the three below each other and B is block-diagonal, of rank 3 r, with
alpha multiplied so that the scale stays: the same numbers, in a layer that PEFT loads.
"""

from __future__ import annotations

from jaxllm.checkpoint.peft.load import load_adapter
from jaxllm.checkpoint.peft.save import save_adapter

__all__ = ["load_adapter", "save_adapter"]
