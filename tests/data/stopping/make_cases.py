"""Makes stop_strings.json and healing.json: what StopStringCriteria and heal_tokens do.

Needs transformers==5.23.0 and torch; run it in this folder. The tokenizers are those of
../tokenizers, the model and its tokenizer those of ../conformance/models/s_llama_tok.
"""

import json
import random
import tempfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, StopStringCriteria

HERE = Path(__file__).parent
TOKENIZERS = HERE.parent / "tokenizers"
MODEL = HERE.parent / "conformance" / "models" / "s_llama_tok"
FAST = json.loads((TOKENIZERS / "fast_cases.json").read_text(encoding="utf-8"))["tokenizers"]
TEXTS = [
    *("Hello, world! The quick brown fox stops.", "stopper and stopping at the top", "aaabaab"),
    *("naïve café, 见到你很高兴 😀!", "a\n\nUser: no\n", "The weather is  nice today."),
]
STRINGS = [
    *(
        "stop",
        "top",
        "a",
        "aab",
        "ab",
        " the",
        "the ",
        "\n\n",
        "\nUser:",
        "é",
        "高",
        "😀",
        "o",
        " ",
    ),
    *("</s>", "<|im_end|>", "<|endoftext|>", "nice today.", "ing at", "▁", "The", "!", "rown f"),
    *("<extra_id_1>", "to you", "llo, w", "?!", "\xa0"),
]
PROMPTS = [
    *(["into the wat"], ["  into the wat "], ["into the"], ["at"], ["the <s>"], ["<s> wat"]),
    *(["<s>at"], ["into the wat", "the list"], ["</s>", "into the wat"], ["e"], ["the e"]),
    *(["into the li"], ["into the s."], ["never en", "at", "the light st"], ["ht", "the water in"]),
    *(["i", "into the wat", "e"], ["the number t"], ["wind"], ["a garde"], ["pap", "the tex"]),
]
BEGINS_WITH_BOS = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [
        {"SpecialToken": {"id": "<s>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 0}},
    ],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
}
WITHOUT_PREFIX = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": True}
# Tokenizers as changes to its tokenizer.json and tokenizer_config.json.
VARIANTS = [
    {"spec": {}, "config": {}},
    {"spec": {"post_processor": BEGINS_WITH_BOS}, "config": {}},
    {"spec": {}, "config": {"padding_side": "right"}},
    {
        "spec": {"post_processor": BEGINS_WITH_BOS, "pre_tokenizer": WITHOUT_PREFIX},
        "config": {},
    },
]


def stop_string_cases(name, rng):
    with tempfile.TemporaryDirectory() as folder:
        spec = (TOKENIZERS / "fast" / f"{name}.json").read_bytes()
        (Path(folder) / "tokenizer.json").write_bytes(spec)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(FAST[name]["config"]))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for _ in range(30):
        strings = rng.sample(STRINGS, rng.randint(1, 4))
        try:
            criterion = StopStringCriteria(tokenizer, strings)
        except ValueError:
            cases.append({"stop_strings": strings, "impossible": True})
            continue
        rows = []
        for _ in range(12):
            pieces = [rng.choice(TEXTS), *strings, rng.choice(strings)]
            text = "".join(p[rng.randint(0, len(p) // 2) :] for p in rng.sample(pieces, 2))
            row = tokenizer.encode(text, add_special_tokens=False)
            for _ in range(rng.randint(0, 2)):
                token = rng.randrange(len(tokenizer) + 2)
                row.insert(rng.randint(0, len(row)), token)
            # The result for every beginning of the row that ends in one of its last tokens.
            first = max(1, len(row) - 12)
            done = [
                bool(criterion(torch.tensor([row[:end]]), None)[0])
                for end in range(first, len(row) + 1)
            ]
            if row:
                rows.append([row, "".join(map(str, map(int, done)))])
        cases.append({"stop_strings": strings, "rows": rows})
    return cases


def healing_cases(model, spec, config):
    with tempfile.TemporaryDirectory() as folder:
        for file, changes in (("tokenizer.json", spec), ("tokenizer_config.json", config)):
            content = json.loads((MODEL / file).read_text(encoding="utf-8")) | changes
            (Path(folder) / file).write_text(json.dumps(content), encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    cases = []
    for prompts in PROMPTS:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        case = {name: inputs[name].tolist() for name in ("input_ids", "attention_mask")}
        try:
            healed = model.heal_tokens(inputs.input_ids, tokenizer)
        except KeyError:  # the last token is not among its own extensions
            cases.append({**case, "key_error": True})
            continue
        # generate() keeps the mask that it was given. Where that fits the healed prompts, and they
        # do not end in padding, what follows them is a reference, too.
        texts = [p.strip() for p in tokenizer.decode(inputs.input_ids, skip_special_tokens=True)]
        again = tokenizer(texts, return_tensors="pt", padding=True)["attention_mask"]
        out = None
        if torch.equal(again, inputs["attention_mask"]) and again[:, -1].all():
            out = model.generate(
                **inputs, do_sample=False, max_new_tokens=4, token_healing=True, tokenizer=tokenizer
            ).tolist()
        cases.append({**case, "healed": healed.tolist(), "generated": out})
    return {"spec": spec, "config": config, "cases": cases}


def write(name, content):
    content = {"transformers": transformers.__version__, **content}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def main():
    rng = random.Random(0)
    write("stop_strings.json", {"cases": {name: stop_string_cases(name, rng) for name in FAST}})
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    write("healing.json", {"variants": [healing_cases(model, **v) for v in VARIANTS]})


if __name__ == "__main__":
    main()
