"""`generate.py --input` in several processes: killed, replaced, and on other numbers of them."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from devices import environment, free_port
from paths import ROOT

import jaxllm
from jaxllm import BatchGenerator

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
SAMPLED = {"do_sample": True, "temperature": 0.8}
SAMPLED_FLAGS = ("--do-sample", "--temperature", "0.8", "--seed", "3")
DEVICES = 2


class Batch:
    """A job in a folder, started in several ways."""

    def __init__(self, folder: Path, count: int) -> None:
        rng = random.Random(0)
        self.folder = folder
        self.rows: list[dict[str, Any]] = [
            {
                "id": f"row-{i}",
                "input_ids": [rng.randrange(3, 90) for _ in range(rng.randrange(1, 16))],
                "max_new_tokens": rng.choice((4, 8, 16, 100)),
            }
            for i in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        (folder / "rows.jsonl").write_text(text)
        self.output = folder / "out.jsonl"
        self.parts = folder / "out.jsonl.parts"
        self.environment = environment(DEVICES) | {"JAXLLM_CACHE_DIR": str(folder / "programs")}

    @property
    def command(self) -> list[str]:
        return [
            *(
                sys.executable,
                str(ROOT / "generate.py"),
                "--model",
                str(MODEL),
                "--slots",
                "4",
            ),
            *("--input", str(self.folder / "rows.jsonl"), "--output", str(self.output)),
            *SAMPLED_FLAGS,
        ]

    def open(self, command: list[str]) -> subprocess.Popen:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=self.environment, **pipes)

    def supervised(self, *flags: str) -> subprocess.Popen:
        words = "import sys; from jaxllm.cli.supervise import main; sys.exit(main(sys.argv[1:]))"
        return self.open([sys.executable, "-c", words, *flags, "--", *self.command])

    def start(self, processes: int, *flags: str) -> list[subprocess.Popen]:
        together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(processes)]
        ranks = [[*together, "--process-id", str(index)] for index in range(processes)]
        own = ranks if processes > 1 else [[]]
        return [self.open([*self.command, "--resume", *flags, *rank]) for rank in own]

    def written(self, process: int) -> int:
        part = self.parts / f"part-{process:05d}.jsonl"
        return part.stat().st_size if part.exists() else 0

    def wait_for_rows(self, process: int, running: list[subprocess.Popen], before: int) -> None:
        while self.written(process) <= before:
            assert all(each.poll() is None for each in running)
            time.sleep(0.02)

    def check(self) -> dict[str, Any]:
        """All rows, once, as one process on one device says them; the report."""
        lines = [json.loads(line) for line in self.output.read_text().splitlines()]
        assert [line["id"] for line in lines] == [row["id"] for row in self.rows]
        model, tokenizer = jaxllm.load(MODEL)
        engine = BatchGenerator(model, tokenizer, slots=8, seed=3, **SAMPLED)
        assert lines == [output.to_dict() for output in engine.generate(self.rows)]
        assert not self.parts.exists()
        return json.loads((self.folder / "out.jsonl.report.json").read_text())


def ended(running: list[subprocess.Popen]) -> list[str]:
    """Stderr of each process; all must have succeeded."""
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0] * len(running), said
    return said


@pytest.mark.slow
def test_a_lost_process_is_replaced(tmp_path):
    batch = Batch(tmp_path, 500)
    supervisor = batch.supervised("--processes", "2", "--restarts", "1")
    batch.wait_for_rows(1, [supervisor], 0)
    batch.wait_for_rows(0, [supervisor], 0)
    holder = (batch.parts / "process-00001" / "writer.lock").read_text()
    os.kill(int(holder.split()[1]), signal.SIGKILL)
    (said,) = ended([supervisor])
    assert "process 1 was killed by SIGKILL; restart 1 of 1" in said
    report = batch.check()
    assert report["processes"] == 2
    assert report["resumed"] > 0
    # What both did, and nothing that was done before.
    assert report["run"]["rows"] == 500 - report["resumed"]
    assert "processes" in said


@pytest.mark.slow
def test_another_number_of_processes_goes_on(tmp_path):
    batch = Batch(tmp_path, 700)
    for processes in (2, 1):
        running, before = batch.start(processes), batch.written(0)
        batch.wait_for_rows(0, running, before)
        for process in running:
            process.kill()
            process.communicate()
    ended(batch.start(2))
    assert batch.check()["resumed"] > 0
    # Again: all of them find that nothing is left.
    assert "is finished" in ended(batch.start(2))[0]


@pytest.mark.slow
def test_all_devices_are_used_or_the_mesh_that_is_asked_for(tmp_path):
    batch = Batch(tmp_path, 30)
    batch.environment |= environment(4)
    weights = []
    for flags in ([], ["--mesh", "data=2,tensor=2"]):
        ended(batch.start(1, *flags))
        (actual,) = batch.check()["run"]["memory"]
        assert actual["devices"] == 4
        weights.append(actual["weights"])
        batch.output.unlink()
    assert weights[1] < 0.6 * weights[0]


@pytest.mark.slow
def test_a_mesh_of_several_processes_is_refused(tmp_path):
    running = Batch(tmp_path, 3).start(2, "--mesh", "tensor=4")
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2], said
    assert "each process has its own mesh of 2 devices" in said[0]


@pytest.mark.slow
def test_what_fails_in_one_process_ends_all(tmp_path):
    batch = Batch(tmp_path, 3)
    part = batch.parts / "part-00001.jsonl"
    batch.parts.mkdir()
    part.write_text("damaged\n")
    running = batch.start(2)
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2], said
    assert "part-00001.jsonl, line 1" in said[0]
    assert "it failed in process 0" in said[1]
    assert not batch.output.exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all(tmp_path, number):
    batch = Batch(tmp_path, 5000)
    supervisor = batch.supervised("--processes", "2")
    batch.wait_for_rows(0, [supervisor], 0)
    supervisor.send_signal(number)
    _, said = supervisor.communicate(timeout=120)
    assert supervisor.returncode == 128 + number, said
    assert "restart" not in said
