#!/usr/bin/env bash
# gguf 0.19.0 types the user-defined symbols of a sentencepiece model as ordinary tokens.
#
# SentencePieceVocab, which converters use, tells unknown, control, unused and byte pieces apart, but
# no user-defined ones, although GGUF has the type USER_DEFINED (4) and sentencepiece knows them. The
# symbols then are merged by their scores, where sentencepiece always takes them whole.
#
# Seen on 2026-11-28 with gguf 0.19.0 and sentencepiece 0.2.3, Python 3.11:
#   <table>: sentencepiece says user-defined, gguf's type is NORMAL
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install gguf==0.19.0 sentencepiece==0.2.3 protobuf==7.36.1
cd "$folder"
mkdir model
venv/bin/python - <<'PYTHON'
from pathlib import Path

import sentencepiece
from gguf.vocab import SentencePieceVocab
from sentencepiece import sentencepiece_model_pb2

sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter(["the quick brown fox", "a lazy dog"] * 5),
    model_prefix="model/tokenizer",
    model_type="bpe",
    vocab_size=40,
    hard_vocab_limit=False,
    user_defined_symbols=["<table>"],
    minloglevel=2,
)
model = sentencepiece_model_pb2.ModelProto.FromString(Path("model/tokenizer.model").read_bytes())
types = {piece.piece: piece.type for piece in model.pieces}
written = {text.decode(): kind for text, _, kind in SentencePieceVocab(Path("model")).all_tokens()}
user_defined = sentencepiece_model_pb2.ModelProto.SentencePiece.USER_DEFINED
assert types["<table>"] == user_defined
print(f"<table>: sentencepiece says user-defined, gguf's type is {written['<table>'].name}")
assert written["<table>"].name == "NORMAL", written["<table>"]
PYTHON
