"""Reads and writes safetensors: checked headers, memory-mapped tensors, atomic writes."""
