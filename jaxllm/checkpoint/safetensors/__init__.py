"""Reads and writes safetensors: checked headers, memory-mapped tensors, atomic writes.

Internal: `jaxllm.load` and `jaxllm.save_hf` use it.
"""
