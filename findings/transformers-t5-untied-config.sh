#!/usr/bin/env bash
# transformers 5.24.0 makes a T5 with a tied head from T5Config(tie_word_embeddings=False).
#
# T5 1.1, Flan-T5 and mT5 have a head of their own, and their config.json says so with
# tie_word_embeddings: false. T5Config of version 5 takes that value as a request to leave out the
# scaling of the decoder's output, and sets tie_word_embeddings to True again. A published
# checkpoint keeps its own head, because the loader finds two different matrices in the file. A new
# model, made from the same config, has one matrix for the embedding and the head: it has fewer
# parameters, and trains them together. In version 4 the same config gave two matrices.
#
# Seen on 2026-11-28 with transformers 5.24.0 and torch 2.13.0, Python 3.11:
#   config: tie_word_embeddings True, scale_decoder_outputs False
#   new model: head and embedding are one matrix
#   loaded from a file with two matrices: they stay two
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install transformers==5.24.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PYTHON'
import json
import pathlib

import torch
import transformers

transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = transformers.T5Config(
    vocab_size=64,
    d_model=32,
    d_kv=8,
    d_ff=48,
    num_layers=2,
    num_heads=4,
    feed_forward_proj="gated-gelu",
    decoder_start_token_id=0,
    tie_word_embeddings=False,
)
print(
    f"config: tie_word_embeddings {config.tie_word_embeddings}, "
    f"scale_decoder_outputs {config.scale_decoder_outputs}"
)
assert config.tie_word_embeddings is True
assert config.scale_decoder_outputs is False

model = transformers.T5ForConditionalGeneration(config)
assert model.lm_head.weight is model.shared.weight
print("new model: head and embedding are one matrix")

# A folder as T5 1.1 is published: two matrices, and a config.json that says so.
model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
model.save_pretrained("published")
path = pathlib.Path("published/config.json")
path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": False}))
loaded = transformers.T5ForConditionalGeneration.from_pretrained("published")
assert not torch.equal(loaded.lm_head.weight, loaded.shared.weight)
print("loaded from a file with two matrices: they stay two")
PYTHON
