"""`generate.py --input` on several devices of one process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from batch_tools import uneven_rows
from devices import environment
from paths import ROOT

from jaxllm import BatchGenerator, load

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
SAMPLED = {"do_sample": True, "temperature": 0.8}
SAMPLED_FLAGS = ("--do-sample", "--temperature", "0.8", "--seed", "3")


@pytest.mark.slow
def test_all_devices_are_used_or_the_mesh_that_is_asked_for(tmp_path):
    rows = uneven_rows(30)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outputs = BatchGenerator(*load(MODEL), slots=8, seed=3, **SAMPLED).generate(rows)
    weights = []
    for name, flags in (("data", []), ("mesh", ["--mesh", "data=2,tensor=2"])):
        output = tmp_path / f"{name}.jsonl"
        command = [
            *(sys.executable, ROOT / "generate.py", "--model", MODEL, "--slots", 4, *flags),
            *("--input", tmp_path / "rows.jsonl", "--output", output, *SAMPLED_FLAGS),
        ]
        env = environment(4) | {"JAXLLM_CACHE_DIR": str(tmp_path / "programs")}
        done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in output.read_text().splitlines()]
        assert lines == [each.to_dict() for each in outputs]
        report = json.loads((tmp_path / f"{name}.jsonl.report.json").read_text())
        (memory,) = report["run"]["memory"]
        assert memory["devices"] == 4
        weights.append(memory["weights"])
    assert weights[1] < 0.6 * weights[0]
