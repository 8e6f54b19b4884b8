"""CTranslate2 as a peer: `python ct2_worker.py CONVERTED_FOLDER` (ct2-transformers-converter).

COMPUTE_TYPE in the environment is float32 by default.
"""

import json
import os
import sys
from pathlib import Path

import ctranslate2

sys.path.insert(0, str(Path(__file__).parents[1]))
from protocol import Workload, serve

folder = Path(sys.argv[1])
names = ("vocabulary.json", "shared_vocabulary.json")
vocabulary = json.loads(next(folder / n for n in names if (folder / n).exists()).read_text())
encoder_decoder = (folder / "shared_vocabulary.json").exists()
kind = ctranslate2.Translator if encoder_decoder else ctranslate2.Generator
compute_type = os.environ.get("COMPUTE_TYPE", "float32")
model = kind(str(folder), device="cpu", compute_type=compute_type, intra_threads=2)


def run(workload: Workload) -> object:
    rows = [[vocabulary[i] for i in row] for row in workload.ids(len(vocabulary))]
    n = workload.new
    options = {"beam_size": workload.beams, "max_batch_size": 0}
    if workload.sample:
        options |= {"sampling_temperature": 0.8, "sampling_topk": 50, "sampling_topp": 0.95}
    if encoder_decoder:
        return model.translate_batch(rows, min_decoding_length=n, max_decoding_length=n, **options)
    return model.generate_batch(
        rows,
        **options,
        min_length=n,
        max_length=n,
        include_prompt_in_result=False,
    )


serve({"peer": "CTranslate2", "version": ctranslate2.__version__}, run)
