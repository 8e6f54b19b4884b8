"""jaxllm as a peer for rows of many lengths: `python jaxllm_rows_worker.py MODEL`.

With `STATIC=1` in the environment it decodes static batches, else it refills slots.
"""

import os
import sys
from pathlib import Path

import jax
import numpy as np

import jaxllm

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Rows, serve

model, _ = jaxllm.load(sys.argv[1])


def refilled(work: Rows) -> int:
    engine = jaxllm.BatchGenerator(
        model,
        slots=work.size,
        max_new_tokens=work.new,
        eos_token_id=work.eos,
        pad_token_id=0,
        do_sample=False,
    )
    outputs = engine.generate([{"input_ids": row} for row in work.rows])
    assert not any(output.error for output in outputs)
    return sum(len(output.output_ids[0]) for output in outputs)


def static(work: Rows) -> int:
    made = 0
    for ids, mask in work.batches():
        sequences = jaxllm.generate(
            model,
            ids.astype(np.int32),
            mask.astype(np.int32),
            max_new_tokens=work.new,
            eos_token_id=work.eos,
            pad_token_id=0,
            do_sample=False,
        ).sequences
        made += work.made(np.asarray(sequences)[:, ids.shape[1] :])
    return made


run = static if os.environ.get("STATIC") else refilled
serve({"peer": "jaxllm", "version": f"jax {jax.__version__}"}, run, Rows)
