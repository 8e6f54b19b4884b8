#!/usr/bin/env bash
# transformers 4.57.6 computes GPT-2 with scale_attn_weights=False as if it were True, by default.
#
# The field of the config leaves out the division of the attention scores by the square root of the
# head size. Only attn_implementation="eager" reads it. The default implementation, "sdpa", always
# divides, without a warning, so the same folder gives two kinds of logits. transformers 5.24.0
# reads the field in both.
#
# Seen on 2026-11-28 with transformers 4.57.6 and torch 2.13.0, Python 3.11:
#   eager: the field changes logits of std 2.7 by up to 2.2
#   sdpa: the field changes them by up to 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==4.57.6 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
from transformers import GPT2Config, GPT2LMHeadModel

ids = torch.arange(10)[None] + 5


def logits(implementation, scaled):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=32,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=0,
        scale_attn_weights=scaled,
        attn_implementation=implementation,
    )
    with torch.no_grad():
        return GPT2LMHeadModel(config).eval()(ids).logits


changes = {}
for implementation in ("eager", "sdpa"):
    scaled, plain = logits(implementation, True), logits(implementation, False)
    changes[implementation] = (scaled - plain).abs().max().item()
print(f"eager: the field changes logits of std {scaled.std():.1f} by up to {changes['eager']:.1f}")
print(f"sdpa: the field changes them by up to {changes['sdpa']:.1f}")
assert changes["eager"] > 1, changes
assert changes["sdpa"] == 0, changes
PYTHON
