"""Makes cases.json: hidden states and attentions of transformers' generate(), by strategy.

    python tests/data/records/make_cases.py       # torch, CPU; once with each transformers below

Contrastive search is core in transformers 4.55.4 and before, groups and constraints in 4.56.2; the
others are of 5.23. Each run replaces the cases of its own strategies. Every array becomes its shape
and three sums, one of them weighted by a wave, which notices an exchange of entries.

In transformers' assisted generation the tokens of the first round get the prompt's columns as
theirs, so that case has a first round without a match.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

HERE = Path(__file__).parent
MODELS = HERE.parent / "conformance" / "models"
BEAMS = {"num_beams": 3}
GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.7}
CONTRASTIVE = {"penalty_alpha": 0.6, "top_k": 4}
STRATEGIES = {
    "4.55.4": {"contrastive": CONTRASTIVE},
    "4.56.2": {"group": GROUPS, "constrained": {"num_beams": 3, "force_words_ids": [[17, 5]]}},
    "5.23.0": {"beam": BEAMS, "lookup": {"prompt_lookup_num_tokens": 4}},
}
FIELDS = (
    "hidden_states",
    "attentions",
    "decoder_hidden_states",
    "decoder_attentions",
    "cross_attentions",
    "encoder_hidden_states",
    "encoder_attentions",
)


def load(name):
    kind = AutoModelForSeq2SeqLM if "t5" in name else AutoModelForCausalLM
    model = kind.from_pretrained(MODELS / name, attn_implementation="eager").float().eval()
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, eos_token_id=None)
    if "t5" in name:
        model.generation_config.decoder_start_token_id = 0
    return model


def summed(x):
    if isinstance(x, tuple):
        return [summed(part) for part in x]
    flat = x.double().reshape(-1)
    wave = torch.cos(0.7 * torch.arange(flat.numel(), dtype=torch.float64))
    sums = (flat.sum(), flat.abs().sum(), flat @ wave)
    return {"shape": list(x.shape), "sums": [round(float(s), 5) for s in sums]}


def inputs(name, mode):
    if mode == "lookup":  # no token twice, and batch 1
        return [[7, 19, 31, 43, 55]], [[1] * 5]
    rows = [[23, 35, 90, 68, 77, 71], [74, 67, 23, 111, 101, 119]]
    mask = [[1] * 6, [1] * 6]
    if "t5" in name:
        rows[1][4:], mask[1][4:] = [0, 0], [0, 0]
    return rows, mask


def run(name, mode, fields):
    model = load(name)
    ids, mask = inputs(name, mode)
    out = model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        do_sample=False,
        return_dict_in_generate=True,
        output_hidden_states=True,
        output_attentions=True,
        **fields,
    )
    expected = {"sequences": out.sequences.tolist()}
    for field in FIELDS:
        if getattr(out, field, None) is not None:
            expected[field] = summed(getattr(out, field))
    return {
        "id": f"{mode}-{name}",
        "made_by": f"transformers {transformers.__version__}",
        "mode": mode,
        "model": name,
        "inputs": {"input_ids": ids, "attention_mask": mask},
        "generate_kwargs": {"do_sample": False, "pad_token_id": 0, **fields},
        "expected": expected,
    }


def main():
    path = HERE / "cases.json"
    cases = json.loads(path.read_text()) if path.exists() else []
    mine = STRATEGIES[transformers.__version__]
    cases = [case for case in cases if case["mode"] not in mine]
    for mode, fields in mine.items():
        names = ("s_llama_loop",) if mode == "lookup" else ("s_llama", "s_gpt2", "s_t5")
        for name in names:
            new = 12 if mode == "lookup" else 4
            cases.append(run(name, mode, {**fields, "max_new_tokens": new}))
    assert all(math.isfinite(s) for s in _sums([case["expected"] for case in cases]))
    cases.sort(key=lambda case: case["id"])
    path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")


def _sums(x):
    if isinstance(x, dict):
        return x["sums"] if "sums" in x else [s for v in x.values() for s in _sums(v)]
    return [s for v in x for s in _sums(v)] if isinstance(x, list) else []


if __name__ == "__main__":
    main()
