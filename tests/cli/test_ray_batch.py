"""`generate.py --engine ray` on a cluster of two nodes: equal to one process, also after kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import tiny
from batch_tools import uneven_rows
from paths import ROOT
from ray_clusters import CPUS, actor_processes, two_nodes

import jaxllm
from jaxllm.batch.job.ray_actors import row_seed
from jaxllm.cli.generate import main

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
SLOTS = 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with two_nodes() as started:
        yield started


def start(cluster: Any, folder: Path, *flags: object, model: Path = MODEL) -> subprocess.Popen:
    """The command with an actor on each node."""
    command = [
        *(sys.executable, ROOT / "generate.py", "--model", model),
        *("--slots", SLOTS, *flags),
        *("--engine", "ray", "--address", cluster.address),
        *("--actors", 2, "--actor-resources", f"CPU={CPUS}"),
    ]
    environment = os.environ | {"JAXLLM_CACHE_DIR": str(folder / "programs")}
    return subprocess.Popen(
        list(map(str, command)), env=environment, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen) -> str:
    _, err = process.communicate(timeout=500)
    assert process.returncode == 0, err
    return err


def write_rows(folder: Path, count: int, new: int) -> list[dict[str, Any]]:
    """Greedy and sampled rows, some with a seed, and one that is wrong."""
    # With seed 5, two best tokens of a row differ by 1e-6, less than rounding.
    rows = uneven_rows(count, new=new, seed=6)
    for i, row in enumerate(rows):
        if i % 2:
            row |= {"do_sample": True, "temperature": 0.8}
        if i % 4 == 1:
            row["seed"] = i
    rows[17]["input_ids"] = []
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return rows


def expected(model_path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    model, tokenizer = jaxllm.load(model_path)
    outputs = jaxllm.BatchGenerator(model, tokenizer, slots=SLOTS, seed=7).generate(rows)
    return [output.to_dict() for output in outputs]


def check(output: Path, model_path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Every row once, as one process answers it; the report."""
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    wrong = lines.pop(17)
    assert wrong["error"].startswith("line 18: ")
    wanted = expected(model_path, rows)
    wanted.pop(17)
    assert lines == wanted
    assert not output.with_name(f"{output.name}.parts").exists()
    return json.loads(output.with_name(f"{output.name}.report.json").read_text())


@pytest.mark.slow
def test_1003_rows_over_two_actors(cluster, tmp_path):
    jaxllm.save_hf(tmp_path / "model", tiny.make("llama", vocab_size=64))
    rows = write_rows(tmp_path, 1003, new=32)
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl", "--seed", 7)
    finish(start(cluster, tmp_path, *files, model=tmp_path / "model"))
    report = check(tmp_path / "out.jsonl", tmp_path / "model", rows)
    assert (report["rows"], report["errors"]) == (1003, {"InputError": 1})
    assert report["run"]["rows"] == 1003
    assert report["run"]["programs"] > 0


@pytest.mark.slow
def test_files_and_tasks_are_those_of_one_process(cluster, tmp_path):
    """CSV to Parquet, scores, and requests of an OpenAI batch file."""
    (tmp_path / "rows.csv").write_text("id,prompt,completion\na,Hello,you\nb,One,two\n")
    body = {"model": "m", "prompt": "Once", "max_tokens": 4, "temperature": 1}
    request = {"method": "POST", "url": "/v1/completions", "body": body}
    lines = [json.dumps({"custom_id": str(i), **request}) for i in range(70)]  # two batches
    (tmp_path / "requests.jsonl").write_text("\n".join(lines))
    for input_name, output_name, flags in (
        ("rows.csv", "out.parquet", ["--max-new-tokens", 4, "--do-sample", "--seed", 7]),
        ("rows.csv", "scores.jsonl", ["--score"]),
        ("requests.jsonl", "answers.jsonl", ["--context", 32, "--seed", 7]),
    ):
        finish(
            start(
                cluster, tmp_path,
                *("--input", tmp_path / input_name, "--output", tmp_path / output_name, *flags),
            )
        )  # fmt: skip
        command = ["--model", MODEL, "--input", tmp_path / input_name, "--quiet"]
        command += ["--slots", SLOTS]
        command += ["--output", tmp_path / f"one-{output_name}", *flags]
        assert main(list(map(str, command))) == 0
    tables = [pyarrow.parquet.read_table(tmp_path / f"{n}out.parquet") for n in ("", "one-")]
    assert tables[0] == tables[1]

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]

    # An actor has another number of threads, so sums may be rounded differently.
    for actual, expected in zip(rows("scores.jsonl"), rows("one-scores.jsonl"), strict=True):
        assert actual == {
            name: pytest.approx(value, rel=1e-6) if "log" in name else value
            for name, value in expected.items()
        }
    answers, alone = rows("answers.jsonl"), rows("one-answers.jsonl")
    assert [line["custom_id"] for line in answers] == [str(i) for i in range(70)]
    texts, wanted = (
        [line["response"]["body"]["choices"][0]["text"] for line in each]
        for each in (answers, alone)
    )
    assert texts == wanted
    assert len(set(texts)) > 1


STAGE = """
import sys
import ray
from jaxllm.batch.job import JaxLLMStage
address, folder, model = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
results = ray.data.read_parquet(f"{folder}/rows.parquet").repartition(9).map_batches(
    JaxLLMStage,
    fn_constructor_kwargs={"model": model, "slots": 8, "seed": 7, "keep": ["label"]},
    compute=ray.data.ActorPoolStrategy(size=2),
    num_cpus=1,  # the others are for reading and writing
    batch_size=32,
    batch_format="pyarrow",
)
results.write_parquet(f"{folder}/results")
"""


@pytest.mark.slow
def test_a_stage_of_ray_data(cluster, tmp_path):
    """Parquet to Parquet; results do not depend on how rows are put into batches."""
    rows = [
        {"id": f"row-{i}", "prompt": "ab"[i % 2] * (i % 7 + 1), "max_new_tokens": 3 + i % 5}
        | {"do_sample": i % 3 > 0, "label": i}
        for i in range(200)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    words = [sys.executable, "-c", STAGE, cluster.address, str(tmp_path), str(MODEL)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = pyarrow.parquet.read_table(tmp_path / "results").sort_by("label").to_pylist()
    assert [(line["id"], line["label"]) for line in results] == [
        (row["id"], row["label"]) for row in rows
    ]
    for row in rows:
        row["seed"] = row_seed(7, row["id"])
        del row["label"]
    names = ("id", "text", "output_ids", "finish_reason")
    outputs = jaxllm.BatchGenerator(*jaxllm.load(MODEL), slots=SLOTS).generate(rows)
    assert [{name: line[name] for name in names} for line in results] == [
        output.to_dict() for output in outputs
    ]


@pytest.mark.slow
def test_an_error_of_an_actor_is_that_of_the_command(cluster, tmp_path):
    write_rows(tmp_path, 20, new=4)
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl", "--seed", 7)
    process = start(cluster, tmp_path, *files, "--mesh", "tensor=2")
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2, err
    assert "tensor=2" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_an_actor_and_a_node_are_lost(cluster, tmp_path):
    """Last: the cluster has one node after it."""
    rows = write_rows(tmp_path, 3000, new=100)
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl", "--seed", 7)
    process = start(cluster, tmp_path, *files)
    journal = tmp_path / "out.jsonl.parts" / "rows.jsonl"

    def wait_for_rows(before: int) -> int:
        while not journal.exists() or journal.stat().st_size <= before:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        return journal.stat().st_size

    size = wait_for_rows(0)
    while len(pids := actor_processes("MapWorker")) < 2:
        time.sleep(0.05)
    os.kill(pids[0], signal.SIGKILL)
    wait_for_rows(size)
    assert process.poll() is None
    (node,) = cluster.worker_nodes
    cluster.remove_node(node, allow_graceful=False)
    finish(process)
    report = check(tmp_path / "out.jsonl", MODEL, rows)
    assert (report["rows"], report["run"]["rows"], report["resumed"]) == (3000, 3000, 0)
