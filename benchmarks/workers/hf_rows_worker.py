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
    for ids, mask in work.batches():
        sequences = model.generate(
            input_ids=torch.from_numpy(ids),
            attention_mask=torch.from_numpy(mask),
            max_new_tokens=work.new,
            do_sample=False,
            eos_token_id=work.eos,
            pad_token_id=0,
        )
        made += work.made(sequences[:, ids.shape[1] :].numpy())
    return made


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
serve({"peer": "HF torch", "version": version}, run, Rows)
