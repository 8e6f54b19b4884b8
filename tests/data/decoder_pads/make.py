"""Makes reference.npz: M2M100 of transformers 5.24.0 with pad tokens in its inputs that no mask
hides.

Run with torch and transformers installed: ``python make.py``. The model is ../parity/m2m_100_full.
`logits` are those of the inputs, `sequences` the greedy continuation of the decoder's prompt, and
`steps` its logits [step, row, vocabulary].
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

HERE = Path(__file__).parent


def main() -> None:
    folder = HERE.parent / "parity" / "m2m_100_full"
    model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32).eval()
    pad = model.config.pad_token_id
    inputs = {
        "input_ids": torch.tensor([[8, pad, 9, 10, 2], [7, 11, 12, pad, 2]]),
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]),
        "decoder_input_ids": torch.tensor([[3, pad, 9, 7, 12], [3, 13, pad, pad, 14]]),
    }
    with torch.no_grad():
        logits = model(**inputs).logits
        fields = {"max_new_tokens": 5, "do_sample": False, "num_beams": 1, "eos_token_id": None}
        kept = {"output_logits": True, "return_dict_in_generate": True}
        out = model.generate(**inputs, **fields, **kept, forced_bos_token_id=None)
    arrays = {name: x.numpy().astype(np.int32) for name, x in inputs.items()}
    arrays |= {"logits": logits.numpy(), "sequences": out.sequences.numpy()}
    np.savez_compressed(HERE / "reference.npz", **arrays, steps=torch.stack(out.logits).numpy())


if __name__ == "__main__":
    main()
