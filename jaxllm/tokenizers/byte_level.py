"""Byte tokenizer, which needs no files: token ids are bytes."""

from __future__ import annotations

from jaxllm.tokenizers.settings import AddedToken, TokenizerSettings
from jaxllm.tokenizers.tokenizer import Tokenizer
from jaxllm.tokenizers.tokenizer_json.decoder import byte_to_unicode
from jaxllm.tokenizers.tokenizer_json.tokenizer import BYTE_LEVEL, FastTokenizer

END, PAD = "<|endoftext|>", "<|pad|>"


def byte_tokenizer() -> FastTokenizer:
    """Makes a byte tokenizer, with ids 0 to 255 for bytes.

    Id 256 is ``<|endoftext|>`` (BOS and EOS), 257 is ``<|pad|>``. It is GPT-2's byte-level BPE
    without merges; its saved tokenizer.json loads in jaxllm and transformers.

    >>> tokenizer = byte_tokenizer()
    >>> tokenizer.encode("né"), tokenizer.decode([110, 195, 169]), len(tokenizer)
    ([110, 195, 169], 'né', 258)
    """
    spec = {
        "added_tokens": [],
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": False},
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": {
            "type": "BPE",
            "vocab": {character: byte for byte, character in byte_to_unicode().items()},
            "merges": [],
        },
    }
    end = AddedToken(END)
    named = {"bos_token": end, "eos_token": end, "pad_token": AddedToken(PAD)}
    return FastTokenizer(spec, TokenizerSettings(named=named))


def ids_are_bytes(tokenizer: Tokenizer) -> bool:
    """True if a tokenizer's ids 0 to 255 are the bytes 0 to 255."""
    return tokenizer.token_bytes()[:256] == tuple(bytes([byte]) for byte in range(256))
