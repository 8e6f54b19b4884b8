"""Makes the PEFT cases: adapters that PEFT wrote, and PEFT's outputs and gradients in float64.

    python make_cases.py       # needs torch, transformers and peft

Writes one folder per case beside this file: adapter_config.json and adapter_model.safetensors as
PEFT saves them (an adapter that is there already is kept), for the models of ../conformance/models.
Beside it goes <case>.npz with the inputs (input_ids, labels), `logits` of the model in eval mode,
`merged` of merge_and_unload(), and the gradients of the loss as `grad:<tensor name in the adapter's
file>`. All adapter weights are random, B too.

The outputs are those of float64 throughout: `.double()` alone leaves softmax and norms in float32,
which on T5 is 2e-5 off. Inputs are such that float32 can compute them: for one batch in ten PEFT's
own float32 is 3e-4 away from its float64 on this T5, whose attention scores are not scaled.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import get_peft_model_state_dict
from torch.overrides import TorchFunctionMode

HERE = Path(__file__).parent
MODELS = HERE.parent / "conformance" / "models"
CLASSES = {
    "CAUSAL_LM": transformers.AutoModelForCausalLM,
    "SEQ_2_SEQ_LM": transformers.AutoModelForSeq2SeqLM,
    "SEQ_CLS": transformers.AutoModelForSequenceClassification,
}
LM, S2S, CLS = CLASSES
SEEDS = {"s_t5_gated": 59}  # of the inputs; 0 for the other models
MAX_FLOAT32_ERROR = 3e-5

CASES = {
    "llama_lora": ("s_llama", LM, {"target_modules": ["q_proj", "v_proj", "down_proj"]}),
    "llama_rslora": ("s_llama", LM, {"target_modules": "all-linear", "use_rslora": True}),
    "llama_dora": (
        "s_llama",
        LM,
        {
            "target_modules": "all-linear",
            "use_dora": True,
            "rank_pattern": {"q_proj": 3, "^model.layers.1.mlp.up_proj": 1},
            "alpha_pattern": {"o_proj": 7},
        },
    ),
    "llama_head": ("s_llama", LM, {"target_modules": ["lm_head", "k_proj"]}),
    "llama_saved": (
        "s_llama",
        LM,
        {"target_modules": ["o_proj"], "modules_to_save": ["embed_tokens", "model.norm"]},
    ),
    "llama_classifier": ("s_llama", CLS, {"target_modules": ["q_proj", "v_proj"]}),
    "gpt2_lora": ("s_gpt2", LM, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
    "gpt2_rslora": (
        "s_gpt2",
        LM,
        {"target_modules": "all-linear", "use_rslora": True, "fan_in_fan_out": True},
    ),
    "gpt2_dora": (
        "s_gpt2",
        LM,
        {"target_modules": "all-linear", "use_dora": True, "fan_in_fan_out": True},
    ),
    "t5_lora": ("s_t5_gated", S2S, {"target_modules": ["q", "v"]}),
    "t5_rslora": ("s_t5_gated", S2S, {"target_modules": "all-linear", "use_rslora": True}),
    "t5_dora": ("s_t5_gated", S2S, {"target_modules": "all-linear", "use_dora": True}),
}


def base_model(name: str, task: str) -> torch.nn.Module:
    options = {"num_labels": 3} if task == "SEQ_CLS" else {}
    torch.manual_seed(0)  # a classifier's score is drawn
    folder = MODELS / name
    return (
        CLASSES[task]
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
        .eval()
    )


class Float64(TorchFunctionMode):
    """Ignores casts to float32, so that a float64 model computes everything in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "float" and args[0].dtype == torch.float64:
            return args[0]

        def widened(value):
            return torch.float64 if value is torch.float32 else value

        return func(*map(widened, args), **{k: widened(v) for k, v in (kwargs or {}).items()})


def inputs(config, task: str, seed: int) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    ids = torch.tensor(rng.integers(3, config.vocab_size, (2, 7)))
    if task == "SEQ_CLS":
        return {"input_ids": ids, "labels": torch.tensor([2, 0])}
    labels = torch.tensor(rng.integers(3, config.vocab_size, (2, 5)))
    return {"input_ids": ids, "labels": labels if task == "SEQ_2_SEQ_LM" else ids}


def tidy(path: Path, base: str) -> None:
    """The same file on every machine: no path, and the sets in order."""
    config = json.loads(path.read_text())
    config["base_model_name_or_path"] = base
    config["target_modules"] = sorted(config["target_modules"])
    path.write_text(json.dumps(config, indent=1) + "\n")


def make_adapter(case: str) -> None:
    """Writes an adapter with random weights."""
    name, task, options = CASES[case]
    config = LoraConfig(task_type=task, **{"r": 2, "lora_alpha": 3, "lora_dropout": 0.1} | options)
    model = get_peft_model(base_model(name, task), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for key, x in model.named_parameters():
            if "magnitude" in key:
                x.mul_(1 + 0.3 * torch.rand_like(x))
            elif "lora_" in key:
                x.normal_(0, 0.15)
            elif x.requires_grad:
                x.add_(0.1 * torch.randn_like(x))
    model.save_pretrained(HERE / case)
    (HERE / case / "README.md").unlink()
    tidy(HERE / case / "adapter_config.json", name)


def reference(case: str) -> dict[str, np.ndarray]:
    """Inputs, outputs and gradients of a case."""
    name, task, _ = CASES[case]

    def load() -> PeftModel:
        return PeftModel.from_pretrained(
            base_model(name, task), HERE / case, is_trainable=True
        ).eval()

    model, again = load(), load().double()
    batch = inputs(model.config, task, SEEDS.get(name, 0))
    with torch.no_grad():
        float32 = model(**batch).logits
    with Float64():
        out = model.double()(**batch)
        out.loss.backward()
        with torch.no_grad():
            merged = again.merge_and_unload()(**batch).logits
    error = (float32 - out.logits).abs().max().item()
    if error > MAX_FLOAT32_ERROR:
        raise SystemExit(f"{case}: PEFT's float32 is {error:.1e} off: choose another seed")
    # The state's tensors share memory with the parameters, which finds their gradients.
    grads = {x.data_ptr(): x.grad for x in model.parameters() if x.requires_grad}
    state = get_peft_model_state_dict(model)
    actual = {key: grads.get(x.data_ptr()) for key, x in state.items()}
    arrays = {f"grad:{key}": x.numpy() for key, x in actual.items() if x is not None}
    arrays |= {key: x.numpy() for key, x in batch.items()}
    arrays |= {"logits": out.logits.detach().numpy(), "merged": merged.numpy()}
    print(case, len(state), float(out.loss.detach()), f"float32 is {error:.1e} off")
    return {key: x.astype({"f": "f4", "i": "i4"}[x.dtype.kind]) for key, x in arrays.items()}


def main() -> None:
    for case in CASES:
        if not (HERE / case).exists():
            make_adapter(case)
        np.savez_compressed(HERE / f"{case}.npz", **reference(case))


if __name__ == "__main__":
    main()
