"""Makes ggml_vocabularies.json.gz: llama.cpp's own test vocabularies, with their expected ids.

Needs gguf; run it in this folder with the path of llama.cpp's folder `models` (in the source
distribution of llama-cpp-python 0.3.36):

    python make_ggml_vocabularies.py MODELS_FOLDER

Each vocabulary keeps the tokens that can arise in its texts, and gets new ids: tokens are merged
from parts of themselves alone, so that the texts are split as with the whole vocabulary. Those that
jaxllm does not read are left out.
"""

import gzip
import json
import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader

HERE = Path(__file__).parent
NAMES = ("command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm")
NAMES += ("mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder")
CONTROL, USER_DEFINED, BYTE = 3, 4, 6
PREFIX = "tokenizer.ggml."


def fields(file: Path) -> dict:
    result = {}
    for key, field in GGUFReader(file).fields.items():
        if key.startswith("tokenizer.ggml.") or key == "general.name":
            value = field.contents()
            result[key] = value.tolist() if isinstance(value, np.ndarray) else value
    return result


def reduced(file: Path) -> dict:
    metadata = fields(file)
    texts = Path(f"{file}.inp").read_bytes().decode("utf-8").split("\n__ggml_vocab_test__\n")
    lines = Path(f"{file}.out").read_text().split("\n")[: len(texts)]
    rows = [[int(index) for index in line.split()] for line in lines]
    tokens, types = metadata[f"{PREFIX}tokens"], metadata[f"{PREFIX}token_type"]
    named = {
        value
        for key, value in metadata.items()
        if key.endswith("_token_id") and isinstance(value, int)
    }
    used = {index for row in rows for index in row} | {i for i in named if i < len(tokens)}
    parts = {
        tokens[index][start:end]
        for index in used
        for start in range(len(tokens[index]))
        for end in range(start + 1, len(tokens[index]) + 1)
    }
    always = (CONTROL, USER_DEFINED, BYTE)
    kept = [
        i
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if i in used or token in parts or len(token) == 1 or (kind in always and i < 200_000)
    ]
    ids = {old: new for new, old in enumerate(kept)}
    texts_kept = {tokens[i] for i in kept}
    for key in ("tokens", "token_type", "scores"):
        if f"{PREFIX}{key}" in metadata:
            metadata[f"{PREFIX}{key}"] = [metadata[f"{PREFIX}{key}"][i] for i in kept]
    if f"{PREFIX}merges" in metadata:
        metadata[f"{PREFIX}merges"] = [
            merge
            for merge in metadata[f"{PREFIX}merges"]
            if texts_kept.issuperset([*merge.split(" "), merge.replace(" ", "")])
        ]
    for key in [key for key in metadata if key.endswith("_token_id")]:
        if metadata[key] in ids:
            metadata[key] = ids[metadata[key]]
        else:
            del metadata[key]
    return {"metadata": metadata, "texts": texts, "ids": [[ids[i] for i in row] for row in rows]}


def main() -> None:
    folder = Path(sys.argv[1])
    content = {name: reduced(folder / f"ggml-vocab-{name}.gguf") for name in NAMES}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    file = HERE / "ggml_vocabularies.json.gz"
    file.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
