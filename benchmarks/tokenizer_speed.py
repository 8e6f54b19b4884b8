"""Encodes and decodes a megabyte with jaxllm's tokenizers and with the libraries under them.

python benchmarks/tokenizer_speed.py FILE.txt TOKENIZER...

A tokenizer is a tokenizer.json, or a sentencepiece model whose name has "llama" or "t5" in it.
Prints seconds (the best of five calls) and their ratio to those of the library alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers

from jaxllm.tokenizers.sentencepiece_tokenizers import LlamaTokenizer, T5Tokenizer
from jaxllm.tokenizers.settings import TokenizerSettings
from jaxllm.tokenizers.tokenizer_json import FastTokenizer

SIZE = 1_000_000
Encode = Callable[[str], list[int]]
Decode = Callable[[list[int]], str]


def seconds(call: Callable[[], Any]) -> float:
    """The best of five calls."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return best


def pair(path: Path) -> tuple[Any, Encode, Decode]:
    """jaxllm's tokenizer of a file, and the library's functions to encode and to decode."""
    if path.suffix == ".json":
        library = tokenizers.Tokenizer.from_file(str(path))
        spec = json.loads(path.read_text(encoding="utf-8"))
        return (
            FastTokenizer(spec, TokenizerSettings()),
            lambda text: library.encode(text).ids,
            lambda ids: library.decode(ids, skip_special_tokens=False),
        )
    model = path.read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    size = processor.get_piece_size()
    make = T5Tokenizer if "t5" in path.name else LlamaTokenizer
    return (
        make(model, TokenizerSettings(), {}),
        processor.encode,
        lambda ids: processor.decode([i for i in ids if i < size]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("tokenizers", nargs="+", type=Path)
    arguments = parser.parse_args()
    text = arguments.text.read_text(encoding="utf-8")
    text = (text * (SIZE // max(len(text), 1) + 1))[:SIZE]
    print("| tokenizer | encode | of the library | decode | of the library |")
    print("|---|---|---|---|---|")
    for path in arguments.tokenizers:
        tokenizer, encode, decode = pair(path)
        ids = tokenizer.encode(text, max_bytes=4 * SIZE)
        own = seconds(lambda t=tokenizer: t.encode(text, max_bytes=4 * SIZE))
        own_decode = seconds(lambda t=tokenizer, i=ids: t.decode(i))
        library = seconds(lambda e=encode: e(text))
        library_decode = seconds(lambda d=decode, i=ids: d(i))
        print(
            f"| {path.name} | {own:.3f} s | {own / library:.2f} | {own_decode:.3f} s | "
            f"{own_decode / library_decode:.2f} |"
        )


if __name__ == "__main__":
    main()
