#!/usr/bin/env bash
# transformers 4.57.6: LlamaTokenizerFast(vocab_file=...) leaves out the space before a text, which
# AutoTokenizer adds with the same tokenizer.model. save_pretrained writes that into tokenizer.json.
#
# The constructor passes its default add_prefix_space=None on to the slow class, which converts to a
# tokenizer without prefix, since None counts as false there. AutoTokenizer makes the slow class
# first, whose own default is true.
#
# Seen on 2026-11-28 with transformers 4.57.6 and sentencepiece 0.2.3, Python 3.11:
#   AutoTokenizer: ['▁the', '▁fox']
#   LlamaTokenizerFast: ['t', 'he', '▁fox']
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==4.57.6 sentencepiece==0.2.3 protobuf==7.36.1
cd "$folder"
mkdir model
venv/bin/python - <<'PYTHON'
import json

import sentencepiece
from transformers import AutoTokenizer, LlamaTokenizerFast

sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the quick brown fox", "see the lazy dog"] * 5),
    model_prefix="model/tokenizer",
    model_type="bpe",
    vocab_size=60,
    hard_vocab_limit=False,
    minloglevel=2,
)
with open("model/tokenizer_config.json", "w") as file:
    json.dump({"tokenizer_class": "LlamaTokenizer", "legacy": True}, file)
auto = AutoTokenizer.from_pretrained("model")
own = LlamaTokenizerFast(vocab_file="model/tokenizer.model", legacy=True)
for name, tokenizer in (("AutoTokenizer", auto), ("LlamaTokenizerFast", own)):
    print(f"{name}: {tokenizer.tokenize('the fox')}")
assert type(auto) is type(own)
assert auto.tokenize("the fox")[0].startswith("▁")
assert not own.tokenize("the fox")[0].startswith("▁")
PYTHON
