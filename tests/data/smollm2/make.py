"""Makes tensors.json: checksums of SmolLM2's float32 weights as transformers reads them from GGUF.

Run it where torch and transformers (made with 5.23.0) are installed:

    python make.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

NAMES = [
    "model.embed_tokens.weight",
    "model.norm.weight",
    *(
        f"model.layers.{layer}.{name}.weight"
        for layer, names in {
            0: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
            17: ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm"),
            29: ("self_attn.q_proj", "self_attn.k_proj", "post_attention_layernorm"),
        }.items()
        for name in names
    ),
]

path = Path(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
state = model.state_dict()
checksums = {
    "every name": hashlib.sha256("\n".join(sorted(state)).encode()).hexdigest(),
    **{n: hashlib.sha256(state[n].contiguous().numpy().tobytes()).hexdigest() for n in NAMES},
}
text = json.dumps(checksums, indent=1) + "\n"
Path(__file__).with_name("tensors.json").write_text(text)
