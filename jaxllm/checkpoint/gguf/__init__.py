"""Reads checkpoints in the GGUF format."""
