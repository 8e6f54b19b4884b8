"""jaxllm as a peer: `python jaxllm_worker.py MODEL`; QUANTIZE in the environment names a format."""

import os
import sys
from pathlib import Path

import jax

import jaxllm

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Workload, serve

model, _ = jaxllm.load(sys.argv[1], quantize=os.environ.get("QUANTIZE"))


def run(workload: Workload) -> object:
    ids = workload.ids(model.config.vocab_size)
    fields = {"max_new_tokens": workload.new, "eos_token_id": None, "num_beams": workload.beams}
    if workload.sample:
        fields |= {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.95, "key": 0}
    out = jaxllm.generate(model, ids, pad_token_id=0, **fields).sequences
    start = 1 if model.is_encoder_decoder else workload.prompt
    assert out.shape == (workload.batch, start + workload.new), out.shape
    return out


weights = sum(x.nbytes for x in jax.tree.leaves(model))
serve({"peer": "jaxllm", "version": f"jax {jax.__version__}", "weight_bytes": weights}, run)
