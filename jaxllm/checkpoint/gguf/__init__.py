"""Reads checkpoints in the GGUF format.

Internal: `jaxllm.load` reads such a file.
"""
