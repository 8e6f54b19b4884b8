"""Makes reference.npz: compute_transition_scores of torch transformers 5.23.0.

Run with torch and transformers installed: ``python make.py``. Models are those of ../conformance.
Keys are <case>/<name>: `sequences`, `scores` [steps, rows, vocab], `beam_indices` (beams only),
`plain` and `normalized` (the results without and with normalize_logits).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

HERE = Path(__file__).parent
CASES = {
    "greedy": ("s_llama", {"max_new_tokens": 6, "pad_token_id": 0}),
    "beams": ("s_gpt2", {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 2}),
    "t5_beams": ("s_t5", {"max_new_tokens": 8, "num_beams": 3, "num_return_sequences": 3}),
}


def main() -> None:
    arrays: dict[str, np.ndarray] = {}
    for case, (name, settings) in CASES.items():
        auto = AutoModelForSeq2SeqLM if "t5" in name else AutoModelForCausalLM
        folder = HERE.parent / "conformance" / "models" / name
        model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        torch.manual_seed(0)
        ids = torch.randint(3, model.config.vocab_size - 1, (2, 5))
        kept = {"output_scores": True, "return_dict_in_generate": True}
        if "beams" in case:
            # An end token that some beams reach early, so that -1 is in their indices.
            for eos in range(3, model.config.vocab_size):
                out = model.generate(ids, **settings, **kept, eos_token_id=eos, pad_token_id=0)
                if 0 < (out.beam_indices < 0).any(1).sum() < len(out.beam_indices):
                    break
        else:
            out = model.generate(ids, **settings, **kept)
        beams = getattr(out, "beam_indices", None)
        arrays[f"{case}/sequences"] = out.sequences.numpy().astype(np.int32)
        arrays[f"{case}/scores"] = torch.stack(out.scores).numpy()
        if beams is not None:
            arrays[f"{case}/beam_indices"] = beams.numpy().astype(np.int32)
        for key, normalize in (("plain", False), ("normalized", True)):
            actual = model.compute_transition_scores(out.sequences, out.scores, beams, normalize)
            arrays[f"{case}/{key}"] = actual.numpy()
    np.savez_compressed(HERE / "reference.npz", **arrays)


if __name__ == "__main__":
    main()
