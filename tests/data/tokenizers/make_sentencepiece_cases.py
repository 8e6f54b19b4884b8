"""Makes llama.model, t5.model and sentencepiece_cases.json, the reference for Llama's and T5's ids.

Needs transformers==4.57.6 and sentencepiece, nothing else; run it in this folder. The ids and texts
are those of the slow LlamaTokenizer and T5Tokenizer, over two small models trained here. With
``legacy`` the slow Llama removes the prefix space of a text twice: sentencepiece's Decode, and with
it this reference, removes it once.
"""

import json
import random
import tempfile
from pathlib import Path

import sentencepiece
import transformers
from texts import CORPUS, TEXTS

HERE = Path(__file__).parent
TOKEN = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
CHATML = {
    "0": {**TOKEN, "content": "<unk>", "special": True},
    "1": {**TOKEN, "content": "<s>", "special": True},
    "2": {**TOKEN, "content": "</s>", "special": True},
    "420": {**TOKEN, "content": "<|im_start|>", "special": True},
    "421": {**TOKEN, "content": "<|im_end|>", "special": True},
    "422": {**TOKEN, "content": "<think>", "special": False},
    "423": {**TOKEN, "content": "<left>", "special": True, "lstrip": True},
    "424": {**TOKEN, "content": "<both>", "special": False, "lstrip": True, "rstrip": True},
    "425": {**TOKEN, "content": "word", "special": False, "single_word": True},
}
EXTRA = ["<|im_start|>", "<|im_end|>", "<left>"]
LLAMA = {
    "legacy": {"tokenizer_config.json": {"legacy": True}},
    "new": {"tokenizer_config.json": {"legacy": False}},
    "default": {"tokenizer_config.json": {}},
    "eos": {
        "tokenizer_config.json": {"legacy": True, "add_bos_token": False, "add_eos_token": True}
    },
    "bos_eos": {"tokenizer_config.json": {"legacy": False, "add_eos_token": True}},
    "no_prefix": {"tokenizer_config.json": {"legacy": False, "add_prefix_space": False}},
    "no_prefix_legacy": {"tokenizer_config.json": {"legacy": True, "add_prefix_space": False}},
    "unk_pad": {"tokenizer_config.json": {"legacy": True, "pad_token": "<unk>"}},
    "new_pad": {"tokenizer_config.json": {"legacy": False, "pad_token": "<pad>"}},
    "clean_up": {"tokenizer_config.json": {"legacy": False, "clean_up_tokenization_spaces": True}},
    "chatml": {
        "tokenizer_config.json": {
            "legacy": False,
            "added_tokens_decoder": CHATML,
            "additional_special_tokens": EXTRA,
        }
    },
    "chatml_legacy": {
        "tokenizer_config.json": {
            "legacy": True,
            "added_tokens_decoder": CHATML,
            "additional_special_tokens": EXTRA,
        }
    },
    "old_files": {
        "tokenizer_config.json": {"legacy": True},
        "special_tokens_map.json": {
            "bos_token": {**TOKEN, "content": "<s>"},
            "pad_token": "<pad>",
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        },
        "added_tokens.json": {"<pad>": 420, "<|im_start|>": 421, "<|im_end|>": 422, "<think>": 423},
    },
}
T5 = {
    "legacy": {"tokenizer_config.json": {"legacy": True}},
    "new": {"tokenizer_config.json": {"legacy": False}},
    "ten": {"tokenizer_config.json": {"legacy": False, "extra_ids": 10}},
    "none": {"tokenizer_config.json": {"legacy": True, "extra_ids": 0}},
    "no_prefix": {"tokenizer_config.json": {"legacy": False, "add_prefix_space": False}},
    "clean_up": {"tokenizer_config.json": {"legacy": True, "clean_up_tokenization_spaces": True}},
    "listed": {
        "tokenizer_config.json": {
            "legacy": True,
            "additional_special_tokens": [f"<extra_id_{i}>" for i in range(100)],
        }
    },
}


class LlamaTokenizer(transformers.LlamaTokenizer):
    def convert_tokens_to_string(self, tokens):
        removes_twice = self.legacy and self.add_prefix_space
        if removes_twice and tokens and tokens[0].startswith("▁"):
            tokens = ["▁" + tokens[0], *tokens[1:]]
        return super().convert_tokens_to_string(tokens)


def train():
    corpus = iter(CORPUS)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=corpus,
        model_prefix=str(HERE / "llama"),
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.99,
        num_threads=1,
    )
    # T5's own normalisation table is large; a few of its rules do for a test.
    rules = HERE / "rules.tsv"
    rules.write_text("A0\t20\n9\t20\nA\t20\nFF21\t41\nFB01\t66 69\n2460\t31\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(HERE / "t5"),
        model_type="unigram",
        vocab_size=220,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        normalization_rule_tsv=str(rules),
        character_coverage=0.99,
        num_threads=1,
    )
    rules.unlink()
    (HERE / "llama.vocab").unlink()
    (HERE / "t5.vocab").unlink()


def cases(tokenizer_class, model, name, files, rng):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / name).write_bytes(model.read_bytes())
        for file, content in files.items():
            (Path(folder) / file).write_text(json.dumps(content))
        tokenizer = tokenizer_class.from_pretrained(folder)
        ids = {text: tokenizer.encode(text) for text in TEXTS}
        pairs = [
            [a, b, tokenizer.encode(a, b)]
            for a, b in zip(TEXTS, reversed(TEXTS), strict=True)
            if rng.random() < 0.2
        ]
        specials = sorted({*tokenizer.all_special_ids, *tokenizer._added_tokens_decoder})
        lists = [tokenizer.encode(text) for text in TEXTS[::3]]
        for _ in range(40):
            pools = [specials, range(3, 259), range(259, tokenizer.vocab_size)]
            if tokenizer_class is transformers.T5Tokenizer:
                pools = [specials, range(tokenizer.vocab_size)]
            lists.append([rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 12))])
        decoded = [
            [row, tokenizer.decode(row), tokenizer.decode(row, skip_special_tokens=True)]
            for row in lists
            if row
        ]
        return {
            "files": files,
            "length": len(tokenizer),
            "vocab_size": tokenizer.vocab_size,
            "special_ids": sorted(tokenizer.all_special_ids),
            "named": {
                n: getattr(tokenizer, n)
                for n in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
            },
            "ids": ids,
            "pairs": pairs,
            "decoded": decoded,
        }


def main():
    train()
    rng = random.Random(0)
    result = {"transformers": transformers.__version__, "llama": {}, "t5": {}}
    for name, files in LLAMA.items():
        result["llama"][name] = cases(
            LlamaTokenizer, HERE / "llama.model", "tokenizer.model", files, rng
        )
    for name, files in T5.items():
        result["t5"][name] = cases(
            transformers.T5Tokenizer, HERE / "t5.model", "spiece.model", files, rng
        )
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "sentencepiece_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
