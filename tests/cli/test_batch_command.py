"""`generate.py --input --output`: output, resume, kills."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pyarrow
import pytest
from paths import ROOT
from pyarrow import csv, parquet

import jaxllm
from jaxllm import BatchGenerator
from jaxllm.batch import BatchOutput
from jaxllm.batch.job.job import Job
from jaxllm.batch.job.journal import journal_folder, report_file
from jaxllm.batch.tables import read_source
from jaxllm.cli.batch_progress import BatchProgress
from jaxllm.cli.generate import main
from jaxllm.common.compiling import CompileClock
from jaxllm.common.progress import Reporter

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
SAMPLED = {"do_sample": True, "temperature": 0.8}
SAMPLED_FLAGS = ("--do-sample", "--temperature", "0.8", "--seed", "3")


def write_rows(path: Path, rows: list[Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def in_process(capsys, *arguments: object) -> tuple[int, str]:
    try:
        code = main([str(a) for a in (*arguments, "--no-compile-cache")], program="generate.py")
    except SystemExit as stop:  # argparse
        code = int(stop.code or 0)
    out, err = capsys.readouterr()
    assert out == ""
    return code, err


@pytest.mark.ci
def test_rows_report_and_errors(tmp_path, capsys):
    rows = [{"prompt": "Hello", "max_new_tokens": 4}, {"id": "x"}, {"messages": [], "id": 3}]
    write_rows(tmp_path / "rows.jsonl", rows)
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl")
    code, err = in_process(capsys, "--model", MODEL, *files, "--slots", 2, "--memory", "1GB")
    assert code == 0
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["id"] for line in lines] == [1, "x", 3]
    assert len(lines[0]["output_ids"]) <= 4
    assert "exactly one of" in lines[1]["error"]
    # The prediction comes before the table, which has what the report has.
    assert err.index("1 sequence at a time, up to 16 tokens each") < err.index("finished by")
    for name in ("rows", "errors", "2 InputError", "tokens/s", "busy", "compiling", "programs"):
        assert name in err
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["errors"] == {"InputError": 2}
    assert report["run"]["memory"][0]["budget"] == 10**9
    assert report["settings"]["--model"] == str(MODEL)
    code, err = in_process(capsys, "--model", MODEL, *files)
    assert (code, "exists already" in err) == (2, True)
    code, err = in_process(capsys, "--model", MODEL, *files, "--resume")
    assert (code, "nothing to resume" in err) == (0, True)
    code, err = in_process(capsys, "--model", MODEL, *files, "--resume", "--seed", 1)
    assert (code, "--seed: was 0" in err) == (2, True)


def test_chat_without_a_template(tmp_path, capsys):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello"}])
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl")
    code, err = in_process(capsys, "--model", MODEL, *files, "--chat", "--max-new-tokens", 3)
    assert (code, "s_llama_tok has no chat template; leave it out" in err) == (2, True)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--input", "rows.jsonl"), "--output"),
        (("--output", "out.jsonl", "hello"), "--output: has no effect without --input"),
        (("--resume", "hello"), "--resume: has no effect"),
        (("--input", "a", "--output", "b", "hello"), "PROMPT: cannot be combined"),
        (("--input", "a", "--output", "b", "--input-ids", "1"), "--input-ids: cannot be combined"),
        (("--input", "a", "--output", "b", "--no-stream"), "--no-stream: cannot be combined"),
        (("--input", __file__, "--output", "b", "--split", "train"), "--split, --dataset-name: "),
        (("--input", "none.jsonl", "--output", "b"), "no such file"),
        (("--input", "a", "--output", "b", "--seed", "-1"), "--seed must be"),
        (
            ("--input", "a", "--output", "-", "--resume"),
            "cannot continue a job that writes to stdout",
        ),
        (("--input", "rows.zip", "--output", "b"), "rows.zip: is compressed, and not by gzip"),
        (("--prompt-column", "q", "hello"), "--prompt-column: has no effect without --input"),
    ],
)
def test_mixed_up_options(arguments, why, capsys):
    code, err = in_process(capsys, *arguments)
    assert code == 2
    assert why in err


def test_progress_while_programs_are_compiled(tmp_path):
    write_rows(tmp_path / "rows.jsonl", [{"id": "x"}, {"prompt": "Hello"}])
    engine = BatchGenerator(*jaxllm.load(MODEL))
    job = Job(engine, read_source(tmp_path / "rows.jsonl"), tmp_path / "out.jsonl", {})
    with contextlib.closing(CompileClock()) as clock:
        progress = BatchProgress(Reporter(quiet=True), job, clock)
        engine.counts.add_output(BatchOutput(0, "x", error="wrong", error_kind="InputError"))
        assert progress.status() == "preparing, 1 errors"
        clock.started = time.monotonic() - 81
        engine.counts.programs, engine.counts.doing = 4, "decoding 16 rows at once"
        engine.counts.add_call("prefill")
        expected = r"compiling 2 of 4: decoding 16 rows at once \(8\d s\), 1 errors"
        assert re.fullmatch(expected, progress.status())
        clock.started = None
        engine.counts.add_decode_steps(steps=100, busy_slot_steps=1500, slots=16)
        steps = r"decoding 16 rows at once, 100 steps, 1,500 new tokens, \d+ new tokens/s, 1 errors"
        assert re.fullmatch(steps, progress.status())
        engine.counts.add_output(BatchOutput(1, 2, ([5, 6],), ("a",), ("eos",), 3))
        speeds = r"[\d.]+ rows/s, \d+ prompt tokens/s, \d+ new tokens/s, \? left, 1 errors"
        assert re.fullmatch(speeds, progress.status())


def test_a_dry_run(tmp_path, capsys):
    """It reads no weights: the file has none."""
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    rows = [{"prompt": "Hello " * count, "max_new_tokens": 4} for count in (1, 2, 10)]
    write_rows(tmp_path / "rows.jsonl", [*rows, {"id": "x"}, {"prompt": "a", "max_new_tokens": 0}])
    files = ("--input", tmp_path / "rows.jsonl", "--dry-run")
    code, err = in_process(capsys, "--model", model, *files)
    assert code == 0
    assert re.search(r"rows that can run +3", err)
    assert re.search(r" 1 to 16 +2  #{40}\n", err)
    assert "the longest prompt: " in err
    assert "the first prompt: " in err
    assert "ello" in err.partition("the first prompt: ")[2]
    assert "tokens, line 3" in err
    assert "rows that would have an error: 2\n  line 4: " in err
    memory = r"\d sequences at a time, up to \d+ tokens each: weights"
    assert re.search(memory, " ".join(err.split()))
    assert "loading" not in err
    price = ("--calibrate", "--price-per-hour", 2)
    code, err = in_process(capsys, "--model", model, *files, *price)
    assert code == 0
    assert re.search(r"expected time +about \d:\d\d, compiling not counted", err)
    assert re.search(r"expected price +about 0\.0", err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "rows.jsonl"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--calibrate", "--output", "x"), "--calibrate: has no effect without --dry-run"),
        (("--dry-run", "--price-per-hour", 2), "--price-per-hour has no effect without --cal"),
        (("--dry-run", "--score"), "--dry-run: only for rows that generate"),
        (("--dry-run", "--float-embeddings"), "--float-embeddings has no effect without --quant"),
        (("--dry-run", "--quantize", "keep"), "--quantize keep: cannot be combined with --dry-run"),
        (
            ("--dry-run", "--adapter", "a"),
            "--adapter: cannot be combined with --dry-run; add --cal",
        ),
    ],
)
def test_options_of_dry_runs(tmp_path, capsys, options, why):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello"}])
    code, err = in_process(capsys, "--model", MODEL, "--input", tmp_path / "rows.jsonl", *options)
    assert (code, why in err) == (2, True)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--param-dtype", "bfloat16"),
        ("--dtype", "bfloat16"),  # of the computation: the weights stay in the file's float32
        ("--quantize", "int8", "--float-embeddings"),
    ],
)
def test_a_dry_run_has_the_weights_of_the_job(tmp_path, capsys, options):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello"}])
    job = ("--model", MODEL, "--input", tmp_path / "rows.jsonl", *options, "--max-new-tokens", 1)
    code, plan = in_process(capsys, *job, "--dry-run")
    assert code == 0
    code, run = in_process(capsys, *job, "--output", tmp_path / "out.jsonl")
    assert code == 0
    planned, held = (re.findall(r"weights ([\d.]+\s+\w+)", text) for text in (plan, run))
    assert planned[0].split() == held[0].split()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["id,prompt", "1,Hello"], r"no line has a prompt, .*line 1: not JSON"),
        (
            [json.dumps({"text": "Hi"})] * 2,
            r"no column is called prompt or messages",
        ),
        ([], "has no rows"),
        (['{"id": "a", "prompt": "x"}'] * 2, r"lines 1 and 2 have the same id, 'a'"),
        (['{"id": 2, "prompt": "x"}', '{"prompt": "x"}'], r"lines 1 and 2 have the same id, 2"),
    ],
)
def test_input_that_is_refused_before_loading(tmp_path, capsys, lines, why):
    (tmp_path / "rows").write_text("\n".join(lines))
    files = ("--input", tmp_path / "rows", "--output", tmp_path / "out.jsonl")
    code, err = in_process(capsys, "--model", MODEL, *files)
    (line,) = err.splitlines()
    assert code == 2
    assert re.search(why, line)
    assert "loading" not in err
    assert len(list(tmp_path.iterdir())) == 1


def one_bit_changed(data: bytes | None) -> bytes:
    assert data is not None
    return data[:-1] + bytes([data[-1] ^ 1])


def test_another_model_under_the_same_path_is_refused(tmp_path, capsys):
    model = Path(shutil.copytree(MODEL, tmp_path / "model"))
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello", "max_new_tokens": 2}])
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl", "--resume")
    assert in_process(capsys, "--model", model, *files)[0] == 0
    (model / "additional_chat_templates").mkdir()
    for name, path, more in (
        ("model weights", model / "model.safetensors", None),  # one bit
        ("model config", model / "config.json", b" "),
        ("generation config", model / "generation_config.json", b" "),
        ("tokenizer", next(model.glob("tokenizer*")), b" "),
        ("tokenizer", model / "additional_chat_templates" / "rag.jinja", b" "),
    ):
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(one_bit_changed(before) if more is None else (before or b"{}") + more)
        code, err = in_process(capsys, "--model", model, *files)
        assert (code, f"{name}: was " in err) == (2, True), err
        path.unlink() if before is None else path.write_bytes(before)
    code, err = in_process(capsys, "--model", model, *files, "--schema", "{}")
    assert (code, "--schema: was None when this job began, and is {} now" in err) == (2, True), err
    assert in_process(capsys, "--model", model.rename(tmp_path / "moved"), *files)[0] == 0


@pytest.mark.ci
def test_what_a_job_computes_with_is_compared(tmp_path, capsys, monkeypatch):
    """The default dtype depends on the device, and random numbers on the environment."""
    jaxllm.save_hf(tmp_path / "model", *jaxllm.load(MODEL), dtype="bfloat16")
    write_rows(tmp_path / "rows.jsonl", [{"prompt": "Hello", "max_new_tokens": 2}])
    out = tmp_path / "out.jsonl"
    job = ("--model", tmp_path / "model", "--input", tmp_path / "rows.jsonl", "--output", out)
    assert in_process(capsys, *job)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "gpu")
        code, err = in_process(capsys, *job, "--resume")
        assert (code, "--dtype: was 'float32' when this" in err) == (2, True), err
        assert in_process(capsys, *job, "--resume", "--dtype", "float32")[0] == 0
    with jax.default_prng_impl("rbg"):
        code, err = in_process(capsys, *job, "--resume")
    assert (code, "jax_default_prng_impl: was 'threefry2x32'" in err) == (2, True), err
    report = json.loads(report_file(out).read_text())
    parts = journal_folder(out)
    parts.mkdir()
    out.unlink()
    began = report["settings"]
    for environment, code, remark in (
        ({}, 2, "earlier version"),
        ({"environment": began["environment"] | {"kind": "x"}}, 0, 'kind: was "x", is "cpu"'),
    ):
        old = {name: value for name, value in began.items() if name != "environment"}
        (parts / "job.json").write_text(json.dumps(old | environment))
        found, err = in_process(capsys, *job, "--resume")
        assert (found, remark in err) == (code, True), err


@pytest.mark.ci
def test_stdin_and_stdout(tmp_path, capsysbinary, monkeypatch):
    rows = [{"id": f"r{i}", "prompt": "Hello", "max_new_tokens": 9 - i} for i in range(6)]
    rows.insert(2, {"id": "bad", "prompt": 5})
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    flags = ["--input", "-", "--output", "-", "--slots", "2", "--no-compile-cache"]
    assert main(["--model", str(MODEL), *flags], program="generate.py") == 0
    out, err = capsysbinary.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    assert lines[2]["error"].startswith("line 3: prompt: expected a string")
    assert b"errors" in err
    write_rows(tmp_path / "rows.jsonl", rows)
    files = ("--input", tmp_path / "rows.jsonl", "--output", tmp_path / "out.jsonl")
    assert main(["--model", str(MODEL), *map(str, files), "--slots", "2"]) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == out


PIPE = """
cat {rows} | {python} -m jaxllm generate --model {model} --input - --output - {flags} \
    2> {err} | head -n 3
echo "${{PIPESTATUS[@]}}"
"""


@pytest.mark.slow
def test_a_pipe_into_head(tmp_path):
    rows = [{"prompt": "Hello", "max_new_tokens": 4 + i % 50} for i in range(3000)]
    write_rows(tmp_path / "rows.jsonl", rows)
    script = PIPE.format(
        rows=tmp_path / "rows.jsonl",
        python=sys.executable,
        model=MODEL,
        err=tmp_path / "err",
        flags="--quiet --slots 8 --no-compile-cache",
    )
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    *lines, codes = run.stdout.splitlines()
    assert [json.loads(line)["id"] for line in lines] == [1, 2, 3]
    assert codes == "0 141 0"
    assert (tmp_path / "err").read_text() == ""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_1000_rows_of_a_table(tmp_path, capsys, kind):
    count = 1000
    table = pyarrow.table(
        {
            "question": [f"Hello, {i}" for i in range(count)],
            "max_new_tokens": [1 + i % 9 for i in range(count)],
            "topic": ["greeting"] * count,
        }
    )
    source, output = tmp_path / f"rows.{kind}", tmp_path / f"out.{kind}"
    (csv.write_csv if kind == "csv" else parquet.write_table)(table, source)
    flags = ("--prompt-column", "question", "--slots", 16)
    code, err = in_process(capsys, "--model", MODEL, "--input", source, "--output", output, *flags)
    assert code == 0
    assert "these columns are not read: topic" in err
    answers = (csv.read_csv if kind == "csv" else parquet.read_table)(output).to_pylist()
    model, tokenizer = jaxllm.load(MODEL)
    rows = [
        {"prompt": row["question"], "max_new_tokens": row["max_new_tokens"]}
        for row in table.to_pylist()
    ]
    expected = BatchGenerator(model, tokenizer, slots=16).generate(rows)
    assert [row["id"] for row in answers] == list(range(2 if kind == "csv" else 0, count + 2))[
        :count
    ]
    ids = [json.loads(str(row["output_ids"])) for row in answers]
    assert ids == [result.output_ids[0] for result in expected]


@pytest.mark.ci
def test_tasks_and_constraints(tmp_path, capsys):
    """A score, an embedding and a text of every row of a table; what does not fit together."""
    (tmp_path / "rows.csv").write_text("q,a,topic\nHello,you,x\nHello you,too,y\n")
    (tmp_path / "rule").write_text('start: "a"')
    question = ("--input", tmp_path / "rows.csv", "--prompt-column", "q")
    for flags, keys in (
        (("--score", "--completion-column", "a"), {"log_likelihood", "is_greedy"}),
        (("--embed", "last"), {"embedding"}),
        (("--grammar", tmp_path / "rule", "--max-new-tokens", 4), {"text", "finish_reason"}),
    ):
        output = tmp_path / f"out-{flags[0]}.jsonl"
        command = ("--model", MODEL, *question, "--output", output, *flags)
        code, err = in_process(capsys, *command)
        assert code == 0
        for words in ("finished by", "busy over", "new lengths", "new tokens/s"):
            assert (words in err) == ("text" in keys)
        lines = read_lines(output)
        assert [line["id"] for line in lines] == [2, 3]
        assert all(line.keys() > keys for line in lines)
        assert f"{flags[0]}" in json.loads(report_file(output).read_text())["settings"]
    assert [line["text"] for line in lines] == ["a", "a"]
    for flags, why in (
        (("--score", "--embed"), "--score cannot be combined with --embed"),
        (("--score", "--top-k", 5), "--top-k: has no effect with --score"),
        (("--score", "--memory", "1KB"), "--memory: has no effect with --score"),
        (("--embed", "--slots", 0), "--slots: expected 1 or more, found 0"),
        (("--embed", "--regex", "a"), "--regex: has no effect with --embed"),
        (("--completion-column", "a"), "--completion-column has no effect without --score"),
        (("--regex", "a", "--schema", "{}"), "--schema and --regex: give only one"),
        (("--schema", "[]"), "--schema: expected a JSON object"),
        (("--schema", "none.json"), "'none.json' is neither a JSON object nor a file"),
        (("--score", "--completion-column", "b"), "no column 'b'"),
    ):
        code, err = in_process(capsys, *question, "--output", tmp_path / "x", *flags)
        assert (code, why in err, "loading" in err) == (2, True, False), err


class Killed:
    """The real command, which is killed again and again while it works.

    Args:
        rows: so many of them, and so long, that it takes a few seconds.
    """

    def __init__(self, folder: Path, rows: list[dict[str, Any]]) -> None:
        self.folder, self.rows = folder, rows
        write_rows(folder / "rows.jsonl", rows)
        self.part = folder / "out.jsonl.parts" / "rows.jsonl"

    def start(self) -> subprocess.Popen:
        command = [
            *(sys.executable, str(ROOT / "generate.py"), "--model", str(MODEL), "--quiet"),
            *("--input", str(self.folder / "rows.jsonl"), "--output"),
            *(str(self.folder / "out.jsonl"), "--resume", "--slots", "2", *SAMPLED_FLAGS),
        ]
        environment = {**os.environ, "JAXLLM_CACHE_DIR": str(self.folder / "programs")}
        return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)

    def kill_once(self, rng: random.Random) -> bool:
        """Starts it, and kills it some time after its first new rows; whether it was killed."""
        before = self.part.stat().st_size if self.part.exists() else 0
        process = self.start()
        while process.poll() is None:
            if self.part.exists() and self.part.stat().st_size > before:
                time.sleep(rng.uniform(0, 0.3))
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        _, err = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), err
        return process.returncode == -signal.SIGKILL

    def finish(self) -> list[dict[str, Any]]:
        process = self.start()
        _, err = process.communicate()
        assert process.returncode == 0, err
        return read_lines(self.folder / "out.jsonl")


def check_kills(folder: Path, kills: int, count: int) -> None:
    rng = random.Random(0)
    rows = [
        {
            "id": f"row-{i}",
            "input_ids": [rng.randrange(3, 90) for _ in range(rng.randrange(1, 16))],
            "max_new_tokens": rng.choice((4, 8, 16, 100)),
        }
        for i in range(count)
    ]
    killed = Killed(folder, rows)
    sizes = []
    for _ in range(kills):
        assert killed.kill_once(rng), "it ended before it was killed: give it more rows"
        sizes.append(killed.part.stat().st_size)
    assert sizes == sorted(sizes)
    lines = killed.finish()
    assert [line["id"] for line in lines] == [row["id"] for row in rows]
    model, tokenizer = jaxllm.load(MODEL)
    engine = BatchGenerator(model, tokenizer, slots=8, seed=3, **SAMPLED)
    expected = [{**output.to_dict(), "row": output.index} for output in engine.generate(rows)]
    assert lines == expected
    report = json.loads((folder / "out.jsonl.report.json").read_text())
    assert 0 < report["resumed"] < count


@pytest.mark.ci
def test_kills_lose_and_repeat_nothing(tmp_path):
    check_kills(tmp_path, kills=2, count=300)


@pytest.mark.slow
def test_50_kills_lose_and_repeat_nothing(tmp_path):
    check_kills(tmp_path, kills=50, count=6000)


@pytest.mark.ci
def test_ctrl_c_keeps_what_was_done(tmp_path):
    killed = Killed(tmp_path, [{"input_ids": [5], "max_new_tokens": 60}] * 2000)
    process = killed.start()
    # A signal before the second row ends the process at once.
    while not (killed.part.exists() and killed.part.read_bytes().count(b"\n") > 1):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert killed.part.read_bytes().endswith(b"}\n")
    assert err == ""


def test_a_delimiter_is_named_and_kept_by_the_job(tmp_path, capsys):
    (tmp_path / "rows.csv").write_text('id;q;price\n1;"Why; x?";5.0\n2;a, b;6\n')
    files = ("--input", tmp_path / "rows.csv", "--output", tmp_path / "out.jsonl")
    job = ("--model", MODEL, *files, "--prompt-column", "q", "--max-new-tokens", 2)
    code, err = in_process(capsys, *job)
    assert (code, "--delimiter" in err) == (2, True)
    code, err = in_process(capsys, *job, "--delimiter", ";", "--keep", "price")
    assert code == 0, err
    lines = read_lines(tmp_path / "out.jsonl")
    assert [line["price"] for line in lines] == ["5.0", "6"]
    report = json.loads((tmp_path / "out.jsonl.report.json").read_text())
    assert report["settings"]["--delimiter"] == ";"
    code, err = in_process(capsys, "--delimiter", ";", "Hello")
    assert (code, "--delimiter" in err) == (2, True)
