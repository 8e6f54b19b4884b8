"""Tokenizers from sentencepiece models."""
