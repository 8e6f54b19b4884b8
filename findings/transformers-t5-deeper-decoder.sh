#!/usr/bin/env bash
# transformers 5.24.0: a T5 with more decoder than encoder layers computes logits, but cannot generate.
#
# T5's config has num_layers for the encoder and num_decoder_layers for the decoder. The cache that
# generate() makes has as many layers as the encoder, so the decoder's next layer is out of its
# range. A decoder with fewer layers generates, and so does the deeper one with use_cache=False.
#
# Seen on 2026-11-28 with transformers 5.24.0 and torch 2.13.0, Python 3.11 (4.57.6 does the same):
#   3 encoder and 2 decoder layers: generates
#   2 encoder and 3 decoder layers: IndexError: list index out of range
#   2 encoder and 3 decoder layers, use_cache=False: generates
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==5.24.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from transformers import T5Config, T5ForConditionalGeneration

ids = torch.arange(6)[None] + 5


def outcome(encoder, decoder, **options):
    config = T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=encoder,
        num_decoder_layers=decoder,
        num_heads=4,
        decoder_start_token_id=0,
        eos_token_id=None,
    )
    model = T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        assert model(input_ids=ids, decoder_input_ids=ids).logits.isfinite().all()
    try:
        model.generate(ids, max_new_tokens=3, **options)
    except IndexError as failure:
        return f"IndexError: {failure}"
    return "generates"


found = [outcome(3, 2), outcome(2, 3), outcome(2, 3, use_cache=False)]
print("3 encoder and 2 decoder layers:", found[0])
print("2 encoder and 3 decoder layers:", found[1])
print("2 encoder and 3 decoder layers, use_cache=False:", found[2])
assert found == ["generates", "IndexError: list index out of range", "generates"], found
PYTHON
