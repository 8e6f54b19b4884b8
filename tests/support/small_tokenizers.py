"""The tokenizers of tests/data/tokenizers, by name, without further settings."""

from __future__ import annotations

import functools
import json

import paths

from jaxllm.tokenizers import FastTokenizer, LlamaTokenizer, T5Tokenizer, Tokenizer
from jaxllm.tokenizers.settings import TokenizerSettings

DATA = paths.DATA / "tokenizers"


@functools.cache
def small_tokenizer(name: str) -> Tokenizer:
    if name == "llama.model":
        return LlamaTokenizer((DATA / name).read_bytes(), TokenizerSettings(), {})
    if name == "t5.model":
        return T5Tokenizer((DATA / name).read_bytes(), TokenizerSettings(), {})
    spec = json.loads((DATA / "fast" / f"{name}.json").read_text(encoding="utf-8"))
    return FastTokenizer(spec, TokenizerSettings())
