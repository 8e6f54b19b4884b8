"""Makes gguf_cases.json: ids of SmolLM2's own tokenizer for hard texts.

Needs transformers==5.23.0 with gguf; run it in this folder, with the path of the GGUF file. The
tokenizer is the one that transformers reads from that file, with one correction: transformers does
not know the pre-tokenizer "smollm" and takes GPT-2's. SmolLM2's own tokenizer.json, and llama.cpp,
split every digit off first, which matters where digits follow white space. ``uncorrected`` holds
the texts for which this makes a difference, with transformers' ids.
"""

import json
import sys
from pathlib import Path

import transformers
from texts import TEXTS
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

HERE = Path(__file__).parent
DIGITS = [
    *("1", "12", " 1", "  1", "1234567890", "x1y22z333", "3.14159", "a  1  b", "\t1", "\n\n1"),
    *("2024-01-02 03:04:05", " ½ ٣ ²", "\uff11\uff12", "1st 2nd", "$1,234.56"),
]


def main():
    path = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    texts = [*TEXTS, *DIGITS]
    uncorrected = {text: tokenizer.encode(text) for text in texts}
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    ids = {text: tokenizer.encode(text) for text in texts}
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    result = {
        "transformers": transformers.__version__,
        "ids": ids,
        "uncorrected": {t: uncorrected[t] for t in texts if uncorrected[t] != ids[t]},
        "chat": tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False),
    }
    text = json.dumps(result, ensure_ascii=False, separators=(",", ":"))
    (HERE / "gguf_cases.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
