#!/usr/bin/env bash
# transformers 5.24.0 reads scale_decoder_outputs for T5 and umT5, but not for mT5.
#
# With a head that is tied to the embedding, T5 divides the decoder's output by the square root of
# d_model. Version 5 has a field for this in all three configs. MT5Config accepts it, and
# MT5ForConditionalGeneration computes the same with True and with False: it never divides. So a
# tied mT5 that transformers 4.57 trained, which did divide, gives other logits, and no field of
# config.json brings them back.
#
# Seen on 2026-11-28 with transformers 5.24.0 and torch 2.13.0, Python 3.11:
#   T5ForConditionalGeneration: the field changes the logits
#   UMT5ForConditionalGeneration: the field changes the logits
#   MT5ForConditionalGeneration: the field changes nothing
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==5.24.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import torch
import transformers

ids = torch.arange(10)[None] + 5


def logits(name, scaled):
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        initializer_factor=3.0,
        tie_word_embeddings=True,
        decoder_start_token_id=0,
        scale_decoder_outputs=scaled,
    )
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        return model(input_ids=ids, decoder_input_ids=ids).logits


changes = {}
for name in ("T5", "UMT5", "MT5"):
    changes[name] = (logits(name, True) - logits(name, False)).abs().max().item()
    words = "nothing" if changes[name] == 0 else "the logits"
    print(f"{name}ForConditionalGeneration: the field changes {words}")
assert changes["T5"] > 1 and changes["UMT5"] > 1, changes
assert changes["MT5"] == 0, changes
PYTHON
