"""Adapters that jaxllm writes, loaded by PEFT: the same logits, no tensor missing or unexpected.

    python check_saved.py write FOLDER     # where jaxllm is installed
    python check_saved.py check FOLDER     # where torch, transformers and peft are

Every case has random A and B in each layer, so GPT-2's q, k and v have become different layers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

MODELS = Path(__file__).parents[1] / "conformance" / "models"
# Base model, options of LoraConfig.
CASES = {
    "llama_lora": ("s_llama", {"targets": ["q_proj", "attn.v"]}),
    "llama_all": ("s_llama", {"rslora": True, "dropout": 0.1}),
    "llama_one_layer": ("s_llama", {"targets": "blocks.1.attn.(q|k)"}),
    "llama_dora": ("s_llama", {"dora": True}),
    "llama_head": ("s_llama", {"targets": ["lm_head", "mlp.up"], "dora": True}),
    "llama_saved": (
        "s_llama",
        {"targets": "mlp.down", "modules_to_save": ["embed_tokens", "norm", "lm_head"]},
    ),
    "gpt2_apart": ("s_gpt2", {}),
    "gpt2_apart_rslora": ("s_gpt2", {"rslora": True}),
    "gpt2_apart_dora": ("s_gpt2", {"dora": True, "rslora": True}),
    "gpt2_q_and_v": ("s_gpt2", {"targets": "attn.(q|v)"}),
    "gpt2_q_and_v_dora": ("s_gpt2", {"targets": "attn.(q|v)", "dora": True}),
    "gpt2_cross": ("s_gpt2_xattn", {}),
    "gpt2_saved": ("s_gpt2", {"modules_to_save": ["positions", "attn_norm", "0.mlp.up"]}),
    "t5_lora": ("s_t5_gated", {"targets": ["q", "v"]}),
    "t5_all": ("s_t5_gated", {"rslora": True}),
    "t5_dora": ("s_t5_gated", {"dora": True}),
    "t5_v1_0": ("s_t5", {}),
}
ATOL = 1e-4


def inputs(name: str) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(3, 90, (2, 7))
    given = {"input_ids": ids, "labels": ids[:, ::-1].copy()}
    if name == "s_gpt2_xattn":
        states = np.random.default_rng(1).standard_normal((2, 4, 32), np.float32)
        given["encoder_hidden_states"] = states
    return given


def write(out: Path) -> None:
    import jax

    import jaxllm
    from jaxllm.checkpoint.peft import save_adapter
    from jaxllm.models.weights import with_parameters
    from jaxllm.training.lora import LoraConfig, add_lora, partition

    jax.config.update("jax_default_matmul_precision", "highest")
    for case, (name, options) in CASES.items():
        base, _ = jaxllm.load(MODELS / name)
        model = add_lora(base, LoraConfig(rank=2, alpha=3, **options))
        rng = np.random.default_rng(2)
        noise = {
            path: x + 0.15 * rng.standard_normal(x.shape).astype(np.float32)
            for path, x in partition(model)[0].items()
        }
        model = with_parameters(model, noise)
        save_adapter(out / case, model, base_model=name)
        np.save(out / f"{case}.npy", np.asarray(model(**inputs(name)).logits))
        print(case, "written")


def check(out: Path) -> None:
    import torch
    import transformers
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.numpy import load_file

    failed = []
    for case, (name, _) in CASES.items():
        task = json.loads((out / case / "adapter_config.json").read_text())["task_type"]
        kind = {
            "CAUSAL_LM": transformers.AutoModelForCausalLM,
            "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
        }[task]
        base = kind.from_pretrained(MODELS / name, dtype=torch.float32)
        model = PeftModel.from_pretrained(base, out / case).eval()
        result = model.load_adapter(out / case, adapter_name="again")
        wrong = [*result.missing_keys, *result.unexpected_keys]
        names = (
            get_peft_model_state_dict(model).keys()
            ^ load_file(out / case / "adapter_model.safetensors").keys()
        )
        wrong += [x for x in names if "base_layer" not in x]  # PEFT adds a targeted head itself
        given = {key: torch.tensor(x) for key, x in inputs(name).items()}
        with torch.no_grad():
            logits = model(**given).logits.numpy()
            merged = model.merge_and_unload()(**given).logits.numpy()
        expected = np.load(out / f"{case}.npy")
        distance = max(np.abs(x - expected).max() for x in (logits, merged))
        print(f"{case:20} {distance:.1e} of {np.abs(expected).max():.1f}", *wrong)
        if wrong or distance > ATOL:
            failed.append(case)
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    command, folder = sys.argv[1:]
    {"write": write, "check": check}[command](Path(folder))
