"""Tokenizers from sentencepiece models.

Internal: `jaxllm.tokenizers.load_tokenizer` makes them.
"""
