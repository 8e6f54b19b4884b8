"""The tokenizers of tests/data/tokenizers, by name, and a check of streams and decoded texts."""

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


def check_streams(tokenizer: Tokenizer, ids: list[int]) -> None:
    """A stream gives the decoded text, and skipped special tokens leave no trace in it."""
    for skip in (False, True):
        stream = tokenizer.stream_decoder(skip_special_tokens=skip)
        text = "".join(map(stream.put, ids)) + stream.end()
        assert text == tokenizer.decode(ids, skip_special_tokens=skip), ids
    kept = [index for index in ids if index not in tokenizer.special_ids]
    assert tokenizer.decode(ids, skip_special_tokens=True) == tokenizer.decode(kept), ids
