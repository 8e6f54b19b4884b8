"""Text generation: configuration, logits processors, token choice, and the decoding loops."""
