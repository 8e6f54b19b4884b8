"""Makes cases.json: greedy assisted generation with `assistant_ensemble_weight`, by transformers.

    python tests/data/ensemble/make_cases.py      # transformers==5.23.0, torch, CPU

Which tokens are judged by the mixture depends on where drafts begin. jaxllm's begin after the first
new token, so here that token, which greedy search chose, is a part of the prompt. T5 is not here:
what transformers gives for it is not what the definition gives, step by step.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
MODELS = HERE.parent / "conformance" / "models"
NEW = 14


def load(name):
    actual = AutoModelForCausalLM.from_pretrained(MODELS / name, attn_implementation="eager")
    model = actual.float().eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    return model


def main():
    rng, cases = random.Random(0), []
    for name in ("s_llama", "s_gpt2"):
        model, assistant = load(name), load(f"{name}_draft")
        assistant.generation_config = transformers.GenerationConfig(
            num_assistant_tokens=4,
            num_assistant_tokens_schedule="constant",
            assistant_confidence_threshold=0.0,
            pad_token_id=0,
        )
        for weight in (0.2, 0.5, 0.8):
            ids = torch.tensor([[rng.randrange(3, model.config.vocab_size - 1) for _ in range(6)]])
            plain = model.generate(ids, max_new_tokens=NEW, do_sample=False)
            out = model.generate(
                plain[:, :7],
                max_new_tokens=NEW - 1,
                do_sample=False,
                assistant_model=assistant,
                assistant_ensemble_weight=weight,
            )
            cases.append(
                {
                    "model": name,
                    "weight": weight,
                    "ids": ids.tolist(),
                    "differs": out.tolist() != plain.tolist(),
                    "sequences": out.tolist(),
                }
            )
    assert sum(case["differs"] for case in cases) > 3  # or plain greedy search would pass, too
    text = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "cases.json").write_text(f"[\n{text}\n]\n")


main()
