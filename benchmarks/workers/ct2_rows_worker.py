"""CTranslate2 as a peer for rows of many lengths: `python ct2_rows_worker.py CONVERTED_FOLDER`.

It sorts the rows by length, and leaves a row out of its batch when it has ended.
"""

import json
import sys
from pathlib import Path

import ctranslate2

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Rows, serve

folder = Path(sys.argv[1])
vocabulary = json.loads((folder / "vocabulary.json").read_text())
model = ctranslate2.Generator(str(folder), device="cpu", compute_type="float32", intra_threads=2)


def run(work: Rows) -> int:
    results = model.generate_batch(
        [[vocabulary[i] for i in row] for row in work.rows],
        max_batch_size=work.size,
        max_length=work.new,
        beam_size=1,
        end_token=[work.eos],
        return_end_token=True,
        include_prompt_in_result=False,
    )
    return sum(len(result.sequences_ids[0]) for result in results)


serve({"peer": "CTranslate2", "version": ctranslate2.__version__}, run, Rows)
