"""transformers on torch as a peer in training: `python hf_train_worker.py FOLDER`."""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Training, serve

transformers.logging.set_verbosity_error()
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)


def run(workload: Training) -> object:
    model.train(workload.dropout)
    ids = torch.from_numpy(workload.ids(model.config.vocab_size))
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item()


version = f"transformers {transformers.__version__}, torch {torch.__version__}"
serve({"peer": "HF torch", "version": version}, run, Training)
