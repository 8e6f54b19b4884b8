"""Tokenizers from tokenizer.json files."""
