"""Records what lm-evaluation-harness's own backend for transformers answers, as reference.json.

The models are written by jaxllm, and read where torch, transformers (made with 5.23.0) and lm-eval
(0.4.13, with accelerate) are installed:

    python make_reference.py models FOLDER
    PYTHON_WITH_TORCH make_reference.py record FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))

from harness_runs import REFERENCE, RUNS, responses, write_model  # noqa: E402

command, folder = sys.argv[1], Path(sys.argv[2]).resolve()
models = dict.fromkeys(run.model for run in RUNS)
if command == "models":
    for name in models:
        write_model(name, folder / name)
    sys.exit()

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

os.chdir(HERE)  # the tasks name their data relative to it
manager = TaskManager(include_path=HERE, include_defaults=False)
reference = {}
for name in models:
    lm = HFLM(str(folder / name), device="cpu", dtype="float32", batch_size=4)
    for run in RUNS:
        if run.model == name:
            results = simple_evaluate(lm, tasks=[run.task], task_manager=manager, **run.arguments)
            reference[run.name] = responses(results, run.task)
REFERENCE.write_text(json.dumps(reference, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
