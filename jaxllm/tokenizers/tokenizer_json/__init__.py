"""Tokenizers from tokenizer.json files.

Internal: `jaxllm.tokenizers.load_tokenizer` makes them.
"""
