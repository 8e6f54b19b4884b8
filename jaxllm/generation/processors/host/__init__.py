"""Logits processors that call Python functions on the host."""
