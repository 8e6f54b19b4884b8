"""Makes rank_cases.json: small files of ranks with the ids that their own programs give.

Needs transformers==5.24.0, tiktoken and mistral-common==1.13.1; run it in this folder. tiktoken
encodes with the ranks of Llama 3's format and Llama 3's regular expression, Tekkenizer of
mistral-common reads each tekken.json.
"""

import base64
import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import tiktoken
from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy
from mistral_common.tokens.tokenizers.tekken import Tekkenizer
from texts import CORPUS, TEXTS, random_texts

HERE = Path(__file__).parent
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>"]
VERSIONS = {"v3": False, "v7": True, "v11": True, "v13": True}


def ranks(order: Iterable[int]) -> list[bytes]:
    """Bytes in an order, and the merges of the corpus that occur most often."""
    tokens = [bytes([byte]) for byte in order]
    words = [[bytes([b]) for b in (" " + w).encode()] for text in CORPUS for w in text.split()]
    while len(tokens) < 500:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        (left, right), _ = max(pairs.items(), key=lambda item: (item[1], item[0]))
        tokens.append(left + right)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == (left, right):
                    word[i : i + 2] = [left + right]
                i += 1
    return list(dict.fromkeys(tokens))


def tekken(tokens: list[bytes], version: str) -> dict:
    count = 30
    entries = [
        {"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None}
        for i, t in enumerate(tokens)
    ]
    special = [
        {"rank": i, "token_str": t, "is_control": True}
        for i, t in enumerate([*CONTROL, *(f"<SPECIAL_{n}>" for n in range(len(CONTROL), count))])
    ]
    spec = {
        "config": {
            "pattern": TEKKEN,
            "num_vocab_tokens": len(tokens),
            "default_vocab_size": len(tokens) - 20 + count,
            "default_num_special_tokens": count,
            "version": version,
        },
        "vocab": entries,
    }
    return {**spec, "special_tokens": special} if VERSIONS[version] else spec


def main() -> None:
    tokens = ranks([*range(32, 127), *range(32), *range(127, 256)])
    texts = [*TEXTS, *random_texts(60, seed=5), "ÉCOLE aÉb iPhone HTMLParser 1234567"]
    lines = "".join(f"{base64.b64encode(t).decode()} {i}\n" for i, t in enumerate(tokens))
    special = {"<|begin_of_text|>": len(tokens), "<|end_of_text|>": len(tokens) + 1}
    own = tiktoken.Encoding(
        "small",
        pat_str=LLAMA3,
        mergeable_ranks={t: i for i, t in enumerate(tokens)},
        special_tokens=special,
    )
    result = {"texts": texts, "tiktoken": lines, "ids": [own.encode_ordinary(t) for t in texts]}
    result["tekken"] = {}
    for version in VERSIONS:
        spec = tekken(ranks(range(256)), version)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "tekken.json"
            file.write_text(json.dumps(spec))
            tokenizer = Tekkenizer.from_file(file)
        ids = [tokenizer.encode(text, bos=True, eos=False) for text in texts]
        shown = [tokenizer.decode(row, SpecialTokenPolicy.KEEP) for row in ids]
        named = [tokenizer.id_to_piece(index) for index in range(6)]
        spec["vocab"] = spec["vocab"] if version == "v3" else []
        case = {"spec": spec, "ids": ids, "shown": shown, "named": named}
        result["tekken"][version] = case
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "rank_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
