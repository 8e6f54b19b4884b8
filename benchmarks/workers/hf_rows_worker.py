"""transformers on torch as a peer for rows of many lengths, in static batches sorted by length:
`python hf_rows_worker.py FOLDER` in an environment that has both."""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Rows, serve

transformers.logging.set_verbosity_error()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()


@torch.inference_mode()
def run(work: Rows) -> int:
    made = 0
    rows = sorted(work.rows, key=len)
    for start in range(0, len(rows), work.size):
        batch = rows[start : start + work.size]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in batch])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in batch])
        new = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=work.new,
            do_sample=False,
            eos_token_id=work.eos,
            pad_token_id=0,
        )[:, width:]
        for row in new.tolist():
            made += row.index(work.eos) + 1 if work.eos in row else len(row)
    return made


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
serve({"peer": "HF torch", "version": version}, run, Rows)
