"""Makes fast/*.json and fast_cases.json: reference ids for tokenizers read from tokenizer.json.

Needs transformers==5.23.0 and tokenizers; run it in this folder. The vocabularies are trained here
and put together as the tokenizers of known models are; the ids, texts and chats are those of
transformers' TokenizersBackend over the same files.
"""

import json
import random
import shutil
import tempfile
from pathlib import Path

import transformers
from texts import CORPUS, TEXTS
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer

HERE = Path(__file__).parent
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<s>", "</s>", "<|system|>", "<|user|>"),
    "<|assistant|>",
]
TEMPLATES = json.loads((HERE / "chat_templates.json").read_text(encoding="utf-8"))
CHATS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "  Hello \n"}, {"role": "assistant", "content": "Hi there."}],
    [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "What is 1 < 2 | 3 > 4?"},
        {"role": "assistant", "content": "True, <b>bold</b> & 'quoted' \"text\"."},
        {"role": "user", "content": "见到你很高兴 😀 {{ 7 * 7 }} {% raw %}"},
    ],
]


def byte_level(vocab_size, specials):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=specials,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return tokenizer


def gpt2():
    return byte_level(400, ["<|endoftext|>"]), {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>"),
    }


def llama3():
    tokenizer = byte_level(400, [])
    spec = json.loads(tokenizer.to_str())
    spec["model"]["ignore_merges"] = True
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in CHAT_TOKENS])
    bos = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{bos} $A",
                pair=f"{bos} $A {bos} $B",
                special_tokens=[(bos, tokenizer.token_to_id(bos))],
            ),
        ]
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
    }


def smollm():
    tokenizer = byte_level(420, CHAT_TOKENS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|im_end|>",
        "add_bos_token": False,
    }


def t5():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=200,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",
            show_progress=False,
        ),
    )
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(10))]
    tokenizer.add_special_tokens([AddedToken(t, lstrip=True, rstrip=True) for t in sentinels])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": sentinels[::-1],
        "clean_up_tokenization_spaces": True,
    }


def llama2():
    """Llama's legacy conversion: a prefix from the normaliser, and bytes for rare characters."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, show_progress=False)
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }


def metaspace():
    """Metaspace that writes its prefix at the first word only; tokens that the config adds."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> <s>:1 $B:1 </s>:1",
        special_tokens=[("<s>", 1), ("</s>", 2)],
    )
    return tokenizer, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "</s>",
        "bos_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "add_bos_token": False,
    }


def gemma():
    """Bytes for rare characters, no prefix, runs of line breaks as tokens; named by its class."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<start_of_turn>", "<end_of_turn>"]
    tokens = [*specials, "\n\n", "\n\n\n", *(f"<0x{i:02X}>" for i in range(256))]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, show_progress=False)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    spec = json.loads(tokenizer.to_str())
    spec["added_tokens"] = spec["added_tokens"][:9]
    for token in spec["added_tokens"][7:]:
        token["special"] = False
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[("<bos>", 2)]
    )
    return tokenizer, {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
    }


def cohere():
    """Composed characters, digits one by one, and a left side of padding; named by its class."""
    specials = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>"]
    turns = ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|USER_TOKEN|>"]
    tokenizer = byte_level(400, [*specials, *turns])
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<BOS_TOKEN> $A",
        pair="<BOS_TOKEN> $A <BOS_TOKEN>:1 $B:1",
        special_tokens=[("<BOS_TOKEN>", 5)],
    )
    return tokenizer, {
        "tokenizer_class": "CohereTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
    }


def describe(folder, rng):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lists = [tokenizer.encode(text) for text in TEXTS[::3]]
    pools = [range(len(tokenizer)), sorted(tokenizer.all_special_ids)]
    for _ in range(60):
        lists.append([rng.choice(rng.choice(pools)) for _ in range(rng.randint(1, 12))])
    return {
        "length": len(tokenizer),
        "vocab_size": tokenizer.vocab_size,
        "special_ids": sorted(tokenizer.all_special_ids),
        "named": {
            n: getattr(tokenizer, n)
            for n in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id")
        },
        "ids": {text: tokenizer.encode(text) for text in TEXTS},
        "pairs": [
            [a, b, tokenizer.encode(a, b)] for a, b in zip(TEXTS[5::7], TEXTS[6::7], strict=False)
        ],
        "decoded": [
            [row, tokenizer.decode(row), tokenizer.decode(row, skip_special_tokens=True)]
            for row in lists
            if row
        ],
    }


def chats(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    result = {}
    for name, template in TEMPLATES.items():
        special = {"bos_token": template["bos_token"], "eos_token": template["eos_token"]}
        result[name] = []
        for chat in CHATS:
            for prompt in (True, False):
                options = {"chat_template": template["template"], "add_generation_prompt": prompt}
                text = tokenizer.apply_chat_template(chat, tokenize=False, **options, **special)
                ids = tokenizer.encode(text, add_special_tokens=False)
                result[name].append([chat, prompt, text, ids])
    return result


def main():
    (HERE / "fast").mkdir(exist_ok=True)
    result = {"transformers": transformers.__version__, "tokenizers": {}}
    rng = random.Random(0)
    for maker in (gpt2, llama3, smollm, t5, llama2, metaspace, gemma, cohere):
        name = maker.__name__
        tokenizer, config = maker()
        spec = json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False)
        (HERE / "fast" / f"{name}.json").write_text(spec + "\n", encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(HERE / "fast" / f"{name}.json", Path(folder) / "tokenizer.json")
            (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
            expected = {"config": config, **describe(folder, rng)}
            if name == "smollm":
                expected["chats"] = chats(folder)
        result["tokenizers"][name] = expected
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "fast_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
