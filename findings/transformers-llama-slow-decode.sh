#!/usr/bin/env bash
# transformers 4.57.6: the slow LlamaTokenizer with legacy=True loses a space at the start of a text.
#
# Encoding "  the" and decoding the ids gives " the". The class removes the prefix space of the first
# piece, and then sentencepiece's Decode removes one more. With legacy=False, and in the fast class,
# the text comes back.
#
# Seen on 2026-11-28 with transformers 4.57.6 and sentencepiece 0.2.3, Python 3.11:
#   sentencepiece '  the fox', slow legacy ' the fox', slow '  the fox'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==4.57.6 sentencepiece==0.2.3 protobuf==7.36.1
cd "$folder"
venv/bin/python - <<'PYTHON'
import sentencepiece
from transformers import LlamaTokenizer

sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the quick brown fox", "see the lazy dog"] * 5),
    model_prefix="tokenizer",
    model_type="bpe",
    vocab_size=60,
    hard_vocab_limit=False,
    remove_extra_whitespaces=False,
    normalization_rule_name="identity",
    minloglevel=2,
)
text = "  the fox"
processor = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
seen = {"sentencepiece": processor.decode(processor.encode(text))}
for name, legacy in (("slow legacy", True), ("slow", False)):
    tokenizer = LlamaTokenizer("tokenizer.model", legacy=legacy)
    ids = tokenizer.encode(text, add_special_tokens=False)
    seen[name] = tokenizer.decode(ids)
print(", ".join(f"{name} {found!r}" for name, found in seen.items()))
assert seen == {"sentencepiece": text, "slow legacy": " the fox", "slow": text}, seen
PYTHON
