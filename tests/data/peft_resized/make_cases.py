"""Makes adapters that PEFT wrote for a resized vocabulary or for single tokens, with their logits.

    python make_cases.py       # needs torch, transformers and peft

Each folder holds adapter_config.json and adapter_model.safetensors as PEFT saves them, and
expected.npz with `input_ids` (and `decoder_input_ids`), the logits of the model with its adapter,
and the number of tokens after the resize. The models are those of ../conformance/models.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model

HERE = Path(__file__).parent
MODELS = HERE.parent / "conformance" / "models"
LLAMA = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]}
GPT2 = {"task_type": "CAUSAL_LM", "target_modules": ["c_attn"], "fan_in_fan_out": True}
T5 = {"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q"]}
HEADS = {"modules_to_save": ["embed_tokens", "lm_head"]}
# Base model, tokens after the resize (None: not resized), options of LoraConfig.
CASES = {
    "llama_grown": ("s_llama", 140, LLAMA),
    "llama_saved": ("s_llama", 60, LLAMA | HEADS),
    "llama_tokens": ("s_llama", None, LLAMA | {"trainable_token_indices": [3, 5, 7]}),
    "llama_tokens_of_both": (
        "s_llama",
        60,
        LLAMA | {"trainable_token_indices": {"embed_tokens": [3, 59], "lm_head": [58]}},
    ),
    "gpt2_tied": ("s_gpt2", 160, GPT2),
    "gpt2_tokens": ("s_gpt2", 160, GPT2 | {"trainable_token_indices": [3, 158]}),
    "t5_tokens": ("s_t5_gated", 150, T5 | {"trainable_token_indices": [3, 148]}),
}


def base_model(name: str, size: int | None, task: str) -> torch.nn.Module:
    kind = {
        "CAUSAL_LM": transformers.AutoModelForCausalLM,
        "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
    }[task]
    model = kind.from_pretrained(MODELS / name, dtype=torch.float32, attn_implementation="eager")
    if size is not None:
        model.resize_token_embeddings(size)
    return model.eval()


def make(case: str) -> None:
    name, size, options = CASES[case]
    torch.manual_seed(0)
    base = base_model(name, size, options["task_type"])
    model = get_peft_model(base, LoraConfig(r=2, lora_alpha=3, **options)).eval()
    with torch.no_grad():
        for key, x in model.named_parameters():
            if "lora_" in key:
                x.normal_(0, 0.15)
            elif x.requires_grad:
                x.add_(0.5 * torch.randn_like(x))
    folder = HERE / case
    model.save_pretrained(folder)
    (folder / "README.md").unlink()
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text()) | {"base_model_name_or_path": name}
    path.write_text(json.dumps(config, indent=1) + "\n")
    ids = np.array([[3, 5, 7, 9, 20, 31], [6, 3, 15, 44, 7, 12]])
    if size is not None:
        ids[:, -1] = size - 2
    given = {"input_ids": ids}
    if options["task_type"] == "SEQ_2_SEQ_LM":
        given["decoder_input_ids"] = ids[:, ::-1].copy()
    again = PeftModel.from_pretrained(base_model(name, size, options["task_type"]), folder).eval()
    results = []
    with torch.no_grad():
        for each in (model, again):
            out = each(**{key: torch.tensor(x) for key, x in given.items()})
            results.append(out.logits.numpy())
    print(case, "loaded again:", np.abs(results[0] - results[1]).max(), results[1].std())
    tokens = base.get_input_embeddings().weight.shape[0]
    np.savez_compressed(folder / "expected.npz", logits=results[1], tokens=tokens, **given)


if __name__ == "__main__":
    for name in CASES:
        make(name)
