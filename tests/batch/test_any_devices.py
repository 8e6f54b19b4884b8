"""1,003 uneven rows, greedy and sampled: equal to alone on any number of devices."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tiny
from batch_tools import uneven_rows
from devices import environment, on_devices
from paths import ROOT

import jaxllm

HEADS = {"llama": {"num_key_value_heads": 4}}

COMPARE = """
import json, sys
from pathlib import Path
import jax, jaxllm
from batch_tools import alone, differences
from jaxllm.batch.rows import BatchOutput

def output(index, line):
    ids = line.get("output_ids", [])
    return BatchOutput(index, line["id"], (ids,), error=line.get("error"))

folder = Path(sys.argv[1])
rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]

def load(count=1, **sizes):
    mesh = None
    if count > 1:
        mesh = jaxllm.make_mesh(devices=jax.devices()[:count], **sizes)
    return jaxllm.load(folder / "model", mesh=mesh)[0]

model = load()
wanted = [alone(model, row, i, seed=7) for i, row in enumerate(rows)]
found = {
    "1 device": jaxllm.BatchGenerator(model, slots=32, seed=7).generate(rows),
    "2 devices": jaxllm.BatchGenerator(load(2), slots=32, seed=7).generate(rows),
    "8 devices": jaxllm.BatchGenerator(load(8, fsdp=2, tensor=2), slots=64, seed=7).generate(rows),
}
for path in sorted(folder.glob("out-*.jsonl")):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    found[path.stem] = [output(index, line) for index, line in enumerate(lines)]
for name, outputs in found.items():
    assert [output.id for output in outputs] == [row["id"] for row in rows], name
    wrong, close = differences(model, rows, outputs, wanted)
    assert wrong == [], (name, wrong)
    print(f"{name}: {len(outputs)} rows, {close} decisions closer than 1e-5")
"""


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_1003_rows(family, tmp_path):
    jaxllm.save_hf(tmp_path / "model", tiny.make(family, vocab_size=64, **HEADS.get(family, {})))
    rows = uneven_rows(1003, seed=5)
    for i, row in enumerate(rows):
        if i % 2:
            row |= {"do_sample": True, "temperature": 0.8}
        if i % 4 == 1:
            row["seed"] = i
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for devices in (1, 2):
        command = [
            *(sys.executable, str(ROOT / "generate.py"), "--model", str(tmp_path / "model")),
            *("--input", str(tmp_path / "rows.jsonl"), "--seed", "7", "--slots", "32"),
            *("--output", str(tmp_path / f"out-{devices}.jsonl"), "--no-compile-cache"),
        ]
        done = subprocess.run(command, env=environment(devices), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    said = on_devices(COMPARE, tmp_path)
    print(said)
    assert said.count("1003 rows") == 5
