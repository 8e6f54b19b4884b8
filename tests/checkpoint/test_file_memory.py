"""Memory of reading the largest files that are read: at most twice the file and 512 MiB."""

from __future__ import annotations

import itertools
import json
import string
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paths
import pytest
from fuzzing import run_batch
from weight_files import gguf_bytes, gguf_field, gguf_string, gguf_tensor, safetensors_bytes

from jaxllm.checkpoint.gguf.reader import MAX_HEADER_BYTES as MAX_GGUF_HEADER
from jaxllm.checkpoint.load import MAX_JSON_BYTES
from jaxllm.checkpoint.peft import MAX_CONFIG_BYTES
from jaxllm.checkpoint.safetensors import MAX_HEADER_BYTES
from jaxllm.common.files import MAX_VALUES
from jaxllm.tokenizers.added_tokens import MAX_ADDED_TOKENS
from jaxllm.tokenizers.sentencepiece_model import MAX_PIECES, write_model
from jaxllm.tokenizers.settings import MAX_FILE_BYTES
from jaxllm.tokenizers.tokenizer_json_check import (
    MAX_BPE_ENTRIES,
    MAX_PREFIXES,
    MAX_VOCABULARY,
)
from jaxllm.training.run.recipe import MAX_FILE_BYTES as MAX_RECIPE_BYTES

Files = Iterator[tuple[str, bytes]]

VALUES = {
    "lists": b"[],",
    "objects": b'{"":[]},',
    "fractions": b'{"":1.5},',
    "numbers": b"1e9,",
    "strings": b'"ab\xc3\xa9",',
}
"""JSON values that take much memory for their length."""


def hostile_json(size: int) -> Files:
    """JSON of this many bytes in the values that take most memory, and in two large strings."""
    for name, value in VALUES.items():
        yield name, b'{"w":[' + value * ((size - 9) // len(value)) + b"0]}"
    keys = b",".join(b'"%x":1' % i for i in range(size // 12))[: size - 2]
    yield "keys", b"{" + keys.rpartition(b",")[0] + b"}"
    yield "wide", b'{"w":"' + b"a" * (size - 12) + "😀".encode() + b'"}'
    most = min(MAX_VALUES // 5 - 8, size // 10)  # values that are read
    yield "read objects", b'{"w":[' + VALUES["objects"] * most + b"0]}"


def words(count: int, length: int = 5) -> list[str]:
    letters = itertools.product(string.ascii_lowercase, repeat=length)
    return ["".join(word) for word in itertools.islice(letters, count)]


def tokenizer_json(**model: Any) -> bytes:
    added = [{"id": 0, "content": "<s>", "special": True}]
    return json.dumps({"added_tokens": added, "model": model}, ensure_ascii=False).encode()


def tokenizers() -> Files:
    yield from hostile_json(MAX_FILE_BYTES)
    letters = [chr(0x4E00 + i) for i in range(600)]
    pairs = list(itertools.product(letters, letters))[: (MAX_BPE_ENTRIES - 601) // 2]
    tokens = ["<s>", *letters, *("".join(pair) for pair in pairs)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [list(pair) for pair in pairs]
    yield "BPE", tokenizer_json(type="BPE", vocab=vocabulary, merges=merges)
    pieces = [["<s>", 0], *([word, -1.5] for word in words(MAX_VOCABULARY - 1))]
    yield "Unigram", tokenizer_json(type="Unigram", unk_id=0, vocab=pieces)
    count = MAX_PREFIXES // 128
    pieces = [["<s>", 0], *([word + "a" * 123, -1.5] for word in words(count))]
    yield "long pieces", tokenizer_json(type="Unigram", unk_id=0, vocab=pieces)


def configs() -> Files:
    yield from hostile_json(MAX_FILE_BYTES)
    entries = {str(i): {"content": f"a{i}"} for i in range(MAX_ADDED_TOKENS)}
    yield "tokens", json.dumps({"added_tokens_decoder": entries}, separators=(",", ":")).encode()


def sentencepiece_models() -> Files:
    model = (paths.DATA / "tokenizers" / "llama.model").read_bytes()
    yield "empty pieces", model + b"\n\0" * ((MAX_FILE_BYTES - len(model)) // 2)
    pieces = [("<unk>", 0.0, 2), *((w, -1.0, 1) for w in words(MAX_PIECES - 1))]
    for model_type in (1, 2):
        yield (
            f"type {model_type}",
            write_model(
                pieces,
                model_type=model_type,
                unk_id=0,
                add_dummy_prefix=True,
                remove_extra_whitespaces=True,
                byte_fallback=False,
            ),
        )


def safetensors() -> Files:
    for name, header in hostile_json(MAX_HEADER_BYTES - 8):
        yield name, safetensors_bytes(header)
    entry = b'"%x":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
    tensors = b",".join(entry % i for i in range(MAX_HEADER_BYTES // 64))
    yield "tensors", safetensors_bytes(b"{" + tensors + b"}")
    values = b",".join(b'"%x":""' % i for i in range(MAX_HEADER_BYTES // 12))
    yield "metadata", safetensors_bytes(b'{"__metadata__":{' + values + b"}}")


def indexes() -> Files:
    yield from hostile_json(MAX_HEADER_BYTES - 8)
    shards = b",".join(b'"%x":"%x.safetensors"' % (i, i) for i in range(MAX_HEADER_BYTES // 40))
    yield "shards", b'{"weight_map":{' + shards + b"}}"


def ggufs() -> Files:
    size = MAX_GGUF_HEADER - 100
    empty = struct.pack("<IIQ", 9, 8, size // 8) + bytes(size // 8 * 8)
    yield "empty strings", gguf_bytes([gguf_field("k", empty)], [])
    wide = struct.pack("<IIQ", 9, 8, size // 11) + gguf_string("見") * (size // 11)
    yield "wide strings", gguf_bytes([gguf_field("k", wide)], [])
    yield "fields", gguf_bytes([gguf_field(str(i), i) for i in range(2**20)], [])
    many = [gguf_tensor(str(i), [1], 0, 32 * i) for i in range(2**20)]
    yield "tensors", gguf_bytes([], many)


def recipes() -> Files:
    half = MAX_RECIPE_BYTES // 2
    yield "lists", b"w:\n" + b"- []\n" * (half // 5)
    yield "keys", b"".join(b"a%x: 1\n" % i for i in range(half // 10))


def rows() -> Files:
    yield "lines", b"x\n" * 2**23
    yield "ids", b'{"input_ids":[' + b"5," * (2**22 - 9) + b"5]}\n"


CASES: dict[str, Callable[[], Files]] = {
    "load_tokenizer_json": tokenizers,
    "tokenizer_config": configs,
    "load_sentencepiece": sentencepiece_models,
    "safetensors": safetensors,
    "safetensors_index": indexes,
    "gguf": ggufs,
    "config": lambda: hostile_json(MAX_JSON_BYTES),
    "adapter_config": lambda: hostile_json(MAX_CONFIG_BYTES),
    "recipe": recipes,
    "rows": rows,
}


@pytest.mark.ci
def test_a_gap_in_the_ids_is_found_in_linear_time(tmp_path: Path) -> None:
    vocabulary = {word: index for index, word in enumerate(["<s>", *words(50_000)])}
    (tmp_path / "gap").write_bytes(
        tokenizer_json(type="BPE", vocab=vocabulary | {"gap": 60_000}, merges=[])
    )
    (outcome,) = run_batch("fuzz_targets:load_tokenizer_json", [tmp_path / "gap"])
    assert outcome.status == "refused"
    assert "no token has the id 50001" in outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("target", CASES)
def test_largest_files(target: str, tmp_path: Path) -> None:
    files = []
    for name, data in CASES[target]():
        files.append(tmp_path / name)
        files[-1].write_bytes(data)
    greedy = []
    for outcome in run_batch(f"fuzz_targets:{target}", files, seconds=120, gib=8):
        size = outcome.path.stat().st_size / 2**20
        line = f"{target} {outcome.path.name}: {size:.1f} MiB, {outcome.grown_mib} MiB of memory, "
        print(line + f"{outcome.seconds} s, {outcome.status} {outcome.detail[-100:]}")
        if not outcome.harmless or outcome.grown_mib > 2 * size + 512:
            greedy.append(outcome)
    assert not greedy, "\n".join(map(str, greedy))
