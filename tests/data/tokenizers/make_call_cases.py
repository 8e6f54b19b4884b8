"""Makes call_cases.json: what transformers' tokenizers return for calls with many options.

Needs transformers==5.23.0; run it in this folder, after make_fast_cases.py. The tokenizers are
those of fast/*.json; where one has no pad token, its EOS becomes one.
"""

import json
import shutil
import tempfile
import zlib
from pathlib import Path

import transformers
from texts import TEXTS, random_texts
from transformers import AutoTokenizer

HERE = Path(__file__).parent
BATCH = ["Hello world", "", "Nice to meet you. How are you?", " two  spaces é 見</s>."]
SECOND = ["Hello, hello!", "a", "The garden", "Where is the station? I don't know."]
CALLS = [
    {},
    {"padding": True},
    {"padding": "longest", "padding_side": "left"},
    {"padding": True, "padding_side": "right", "pad_to_multiple_of": 8},
    {"padding": True, "pad_to_multiple_of": 7, "add_special_tokens": False},
    {"padding": "max_length", "max_length": 9, "truncation": True},
    {"padding": "max_length", "max_length": 90},
    {"padding": "max_length", "max_length": 90, "pad_to_multiple_of": 16},
    {"truncation": True, "max_length": 5},
    {"truncation": "only_first", "max_length": 4},
    {"truncation": True, "max_length": 4, "add_special_tokens": False},
    {"padding": "do_not_pad", "truncation": "do_not_truncate"},
]
PAIR_CALLS = [
    {},
    {"padding": True, "padding_side": "left"},
    {"add_special_tokens": False},
    *({"truncation": True, "max_length": length} for length in range(4, 40, 3)),
    {"truncation": "longest_first", "max_length": 10, "padding": "max_length"},
]


OFFSET_CALLS = [
    {},
    {"padding": True, "padding_side": "left"},
    {"truncation": True, "max_length": 5, "padding": "max_length"},
    {"add_special_tokens": False},
]
DETAILS = ("offset_mapping", "special_tokens_mask", "length")
RETURN_DETAILS = dict.fromkeys(
    ("return_offsets_mapping", "return_special_tokens_mask", "return_length"), True
)
NEW_TOKENS = ["<new>", "Hello", "é!"]
NEW_SPECIAL = {"sep_token": "<SEP>", "additional_special_tokens": ["<u>"]}
NEW_TEXTS = ["a<new> Hello b<new>c", " Hello<SEP> é! <u>.<u> x", "Hello world<SEP>"]


def lists(encoding):
    return {name: encoding[name] for name in ("input_ids", "attention_mask")}


def with_offsets(encoding):
    return {**lists(encoding), **{name: encoding[name] for name in DETAILS}}


def extended(tokenizer):
    """The tokenizer after tokens were added to it."""
    tokenizer.add_tokens(NEW_TOKENS)
    tokenizer.add_special_tokens(NEW_SPECIAL)
    ids = [tokenizer.encode(text) for text in NEW_TEXTS]
    return {
        "size": len(tokenizer),
        "ids": ids,
        "decoded": [tokenizer.decode(row) for row in ids],
        "skipped": [tokenizer.decode(row, skip_special_tokens=True) for row in ids],
        "new_ids": tokenizer.convert_tokens_to_ids([*NEW_TOKENS, "<SEP>", "<u>"]),
        "sep_token_id": tokenizer.sep_token_id,
    }


def describe(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    left = AutoTokenizer.from_pretrained(folder, truncation_side="left")
    ids = [tokenizer.encode(text) for text in TEXTS]
    random = random_texts(1000, seed=0)
    return {
        "pad_token_id": tokenizer.pad_token_id,
        "special_tokens_map": tokenizer.special_tokens_map,
        "all_special_tokens": tokenizer.all_special_tokens,
        "all_special_ids": tokenizer.all_special_ids,
        "model_max_length": int(tokenizer.model_max_length),
        "added": [tokenizer.num_special_tokens_to_add(pair) for pair in (False, True)],
        "single": lists(tokenizer("Nice to meet you.")),
        "calls": [[options, lists(tokenizer(BATCH, **options))] for options in CALLS],
        "pairs": [[options, lists(tokenizer(BATCH, SECOND, **options))] for options in PAIR_CALLS],
        "offsets": [
            [options, with_offsets(tokenizer(BATCH, **RETURN_DETAILS, **options))]
            for options in OFFSET_CALLS
        ],
        "pair_offsets": with_offsets(
            tokenizer(BATCH, SECOND, **RETURN_DETAILS, truncation=True, max_length=9)
        ),
        "extended": extended(AutoTokenizer.from_pretrained(folder)),
        "left": lists(left(BATCH, SECOND, truncation=True, max_length=9)),
        "tokens": [[text, tokenizer.tokenize(text)] for text in TEXTS[::3]],
        "unknown": tokenizer.convert_tokens_to_ids(["nowhere to be found", tokenizer.eos_token]),
        "batch_decoded": tokenizer.batch_decode(ids[::3], skip_special_tokens=True),
        "vocabulary": zlib.crc32(json.dumps(sorted(tokenizer.get_vocab().items())).encode()),
        # Checksums of 20 texts each: ids, and what they are decoded to.
        "random": [
            [
                zlib.crc32(json.dumps([tokenizer.encode(text) for text in block]).encode()),
                zlib.crc32(
                    json.dumps([tokenizer.decode(tokenizer.encode(t)) for t in block]).encode()
                ),
            ]
            for block in (random[start : start + 20] for start in range(0, 1000, 20))
        ],
    }


def byt5():
    """A folder with settings alone, and what transformers writes of it."""
    result = []
    with tempfile.TemporaryDirectory() as folder:
        config = {"tokenizer_class": "ByT5Tokenizer", "eos_token": "</s>", "pad_token": "<pad>"}
        for path in (Path(folder) / "first", Path(folder) / "second"):
            path.mkdir(exist_ok=True)
            if not result:
                (path / "tokenizer_config.json").write_text(json.dumps(config))
            tokenizer = transformers.ByT5Tokenizer.from_pretrained(path)
            ids = [tokenizer.encode(text) for text in random_texts(200, seed=1)]
            rows = [
                [(7 * n * n + 13 * row) % len(tokenizer) for n in range(9)] for row in range(60)
            ]
            result.append(
                {
                    "files": {p.name: json.loads(p.read_text()) for p in path.iterdir()},
                    "sizes": [len(tokenizer), tokenizer.vocab_size],
                    "special_ids": sorted(tokenizer.all_special_ids),
                    "ids": zlib.crc32(json.dumps(ids).encode()),
                    "texts": [tokenizer.decode(row) for row in rows],
                    "skipped": [tokenizer.decode(row, skip_special_tokens=True) for row in rows],
                    "pair": tokenizer.encode("é <extra_id_0> x", "b</s>"),
                    "tokens": tokenizer.tokenize("é <extra_id_0> x"),
                    "padded": lists(tokenizer(["a", "bcd"], padding=True)),
                }
            )
            tokenizer.save_pretrained(Path(folder) / "second")
    return result


def main():
    configs = json.loads((HERE / "fast_cases.json").read_text(encoding="utf-8"))["tokenizers"]
    result = {
        "transformers": transformers.__version__,
        "batch": BATCH,
        "second": SECOND,
        "new": [NEW_TOKENS, NEW_SPECIAL, NEW_TEXTS],
        "byt5": byt5(),
        "tokenizers": {},
    }
    for name, cases in configs.items():
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(HERE / "fast" / f"{name}.json", Path(folder) / "tokenizer.json")
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(cases["config"]))
            result["tokenizers"][name] = describe(folder)
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "call_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
