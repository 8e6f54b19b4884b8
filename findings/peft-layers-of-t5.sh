#!/usr/bin/env bash
# peft 0.21.2 applies only part of a T5 adapter that peft 0.19.1 wrote with layers_to_transform.
#
# T5's names hold two numbers, encoder.block.1.layer.0.SelfAttention.q: of the block and of its part.
# layers_to_transform counts the last number up to 0.19.1, so that 0 means the self-attention of
# every block. Since 0.20.0 it counts the first one, the block. An adapter_config.json of an older
# version then selects other modules in a newer one. What the file has for modules that are left out
# is ignored without a warning, since loading only tells of missing tensors. And the same numbers in
# a new config train another part of the model.
#
# Seen on 2026-11-29 with transformers 5.24.0 and torch 2.13.0, Python 3.11:
#   0.19.1 writes: encoder.block.0, encoder.block.1, decoder.block.0, decoder.block.1
#   0.21.2 loads: encoder.block.0, decoder.block.0
#   logits of std 1.1 differ by up to 0.4
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" --quiet install peft==0.21.2 transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/pip" --quiet install --no-deps --target "$folder/older" peft==0.19.1
cd "$folder"
cat >adapter.py <<'PYTHON'
import sys
import warnings

import peft
import torch
import transformers

transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore", FutureWarning)
warnings.simplefilter("error", UserWarning)
torch.manual_seed(0)
base = transformers.T5ForConditionalGeneration(
    transformers.T5Config(
        vocab_size=64,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
).eval()
if sys.argv[1] == "write":
    config = peft.LoraConfig(
        target_modules=["SelfAttention.q"], layers_to_transform=[0], init_lora_weights=False
    )
    model = peft.get_peft_model(base, config).eval()
    model.save_pretrained("adapter", save_embedding_layers=False)
else:
    model = peft.PeftModel.from_pretrained(base, "adapter").eval()
layers = [
    name.removeprefix("base_model.model.")
    for name, module in model.named_modules()
    if isinstance(module, peft.tuners.lora.LoraLayer)
]
ids = torch.arange(10)[None] + 5
with torch.no_grad():
    logits = model(input_ids=ids, decoder_input_ids=ids).logits
blocks = [name.removesuffix(".layer.0.SelfAttention.q") for name in layers]
print(f"{peft.__version__} {sys.argv[1]}s: {', '.join(blocks)}")
torch.save({"version": peft.__version__, "layers": layers, "logits": logits}, f"{sys.argv[1]}.pt")
PYTHON
PYTHONPATH=older venv/bin/python adapter.py write
venv/bin/python adapter.py load
venv/bin/python - <<'PYTHON'
import torch

older, newer = torch.load("write.pt"), torch.load("load.pt")
assert (older["version"], newer["version"]) == ("0.19.1", "0.21.2")
assert len(older["layers"]) == 4, older["layers"]
assert newer["layers"] == [x for x in older["layers"] if ".block.0." in x], newer["layers"]
change = (older["logits"] - newer["logits"]).abs().max().item()
print(f"logits of std {older['logits'].std():.1f} differ by up to {change:.1f}")
assert change > 0.1, change
PYTHON
