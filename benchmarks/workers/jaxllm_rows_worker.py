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
    rows = sorted(work.rows, key=len)
    for start in range(0, len(rows), work.size):
        batch = rows[start : start + work.size]
        width = max(map(len, batch))
        ids, mask = (np.zeros((len(batch), width), np.int32) for _ in range(2))
        for row, ids_row, mask_row in zip(batch, ids, mask, strict=True):
            ids_row[width - len(row) :], mask_row[width - len(row) :] = row, 1
        new = jaxllm.generate(
            model,
            ids,
            mask,
            max_new_tokens=work.new,
            eos_token_id=work.eos,
            pad_token_id=0,
            do_sample=False,
        ).sequences[:, width:]
        for row in np.asarray(new):
            ends = np.flatnonzero(row == work.eos)
            made += int(ends[0]) + 1 if ends.size else len(row)
    return made


run = static if os.environ.get("STATIC") else refilled
serve({"peer": "jaxllm", "version": f"jax {jax.__version__}"}, run, Rows)
