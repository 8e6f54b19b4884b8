"""5,000 rows of a table as people have them: template, kill, resume, retry, and the join back."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import polars as pl
import pytest
from paths import ROOT
from ray_clusters import CPUS, two_nodes

import jaxllm

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
TEMPLATE = 'Context: {{ context or "none" }} Question: {{ question }} ({{ row["asked by"] }})'
TEXTS = [
    "Why is the sky blue?",
    'Who invented the "wheel"?',
    "東京はどこですか",
    "ما هي العاصمة؟",
    "one line\nand another\r\nand a third",
    "comma, semicolon; tab\there",
    "emoji 🙂",
    "  spaces  ",
    "",
    "=1+1",
    "nan",
    "007",
]
KEPT = ["question", "context", "asked by", "price", "price.1"]


def table(count: int) -> pd.DataFrame:
    """Cells of many kinds. Every fiftieth prompt leaves too little room for 60 new tokens."""
    rng = random.Random(0)
    rows = []
    for i in range(count):
        context = rng.choice(TEXTS)
        if i % 50 == 49:
            context = "word " * 40
        rows.append(
            {
                "id": f"q-{i}",
                "question": rng.choice(TEXTS[:-4]),
                "context": context,
                "asked by": rng.choice(["Ann", "Bo", "Çelik", ""]),
                "price": rng.choice(["1.50", "2.00", "", "1e3"]),
                "second price": rng.choice(TEXTS),
            }
        )
    return pd.DataFrame(rows)


def csv_bytes(frame: pd.DataFrame) -> bytes:
    """With a byte order mark, Windows' line ends, and two columns of one name."""
    text = io.StringIO(newline="")
    frame.to_csv(text, index=False, lineterminator="\r\n")
    return b"\xef\xbb\xbf" + text.getvalue().replace("second price", "price", 1).encode()


def command(folder: Path, source: Path, output: Path, *flags: object) -> subprocess.Popen[str]:
    arguments = [
        *(sys.executable, ROOT / "generate.py", "--model", MODEL, "--slots", 16),
        *("--config", "max_position_embeddings=512"),  # for the long prompts
        *("--input", source, "--output", output, "--template", TEMPLATE, "--keep", "all"),
        *flags,
    ]
    environment = {**os.environ, "JAXLLM_CACHE_DIR": str(folder / "programs")}
    return subprocess.Popen(
        list(map(str, arguments)), env=environment, stderr=subprocess.PIPE, text=True
    )


def run(folder: Path, source: Path, output: Path, *flags: object) -> str:
    process = command(folder, source, output, *flags)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return err


def kill(folder: Path, source: Path, output: Path, *flags: object) -> None:
    """Ends the command by SIGKILL, after some rows."""
    process = command(folder, source, output, *flags)
    rows = output.with_name(output.name + ".parts") / "rows.jsonl"
    before = rows.stat().st_size if rows.exists() else 0
    while not (rows.exists() and rows.stat().st_size > before):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def check(frame: pd.DataFrame, result: pd.DataFrame, new_tokens: int) -> None:
    """The result joined to the table by `row`, beside the texts of a sample."""
    assert list(result["row"]) == list(range(len(frame)))
    assert list(result["id"]) == list(frame["id"])
    pd.testing.assert_frame_equal(result[KEPT], frame.set_axis(["id", *KEPT], axis=1)[KEPT])
    sample = frame.iloc[:: len(frame) // 20]
    prompts = [
        f"Context: {row['context'] or 'none'} Question: {row['question']} ({row['asked by']})"
        for _, row in sample.iterrows()
    ]
    rows = [{"prompt": text, "max_new_tokens": new_tokens} for text in prompts]
    engine = jaxllm.BatchGenerator(
        *jaxllm.load(MODEL, config={"max_position_embeddings": 512}), slots=16
    )
    expected = [output.text for output in engine.generate(rows)]
    assert list(result["text"].iloc[:: len(frame) // 20]) == expected


@pytest.mark.ci
def test_a_csv_file_is_killed_resumed_and_tried_again(tmp_path: Path):
    frame = table(5000)
    source, output = tmp_path / "rows.csv", tmp_path / "answers.csv"
    source.write_bytes(csv_bytes(frame))
    new = ("--max-new-tokens", 12)
    few = (*new, "--memory", "1.2MB")  # too little for the long prompts
    kill(tmp_path, source, output, *few)
    err = run(tmp_path, source, output, *few, "--resume")
    errors = tmp_path / "answers.csv.errors.jsonl"
    assert "  100 InputError, the first in line " in err
    assert f"rows with errors and their inputs: {errors}; try them again" in err
    before = pd.read_csv(output, dtype=str, keep_default_na=False)
    failed = before["error"] != ""
    assert list(before.index[failed]) == list(range(49, 5000, 50))
    lines = [json.loads(line) for line in errors.read_text(encoding="utf-8").splitlines()]
    assert [line["failed_row"]["row"] for line in lines] == list(before.index[failed])
    assert [line["id"] for line in lines] == list(frame["id"][failed])
    assert [line["context"] for line in lines] == list(frame["context"][failed])
    kill(tmp_path, source, output, *new, "--retry-errors")
    run(tmp_path, source, output, *new, "--retry-errors")
    after = pd.read_csv(output, dtype=str, keep_default_na=False)
    pd.testing.assert_frame_equal(after[~failed], before[~failed])  # to the byte
    assert not errors.exists()
    whole = tmp_path / "whole.csv"
    run(tmp_path, source, whole, *new)
    assert whole.read_bytes() == output.read_bytes()
    check(frame, after.astype({"row": int}), 12)


@pytest.mark.slow
def test_the_same_through_parquet_polars_and_ray(tmp_path: Path):
    frame = table(2000).rename(columns={"second price": "price.1"})
    pl.from_pandas(frame).write_parquet(tmp_path / "rows.parquet")
    new = ("--max-new-tokens", 12)
    run(tmp_path, tmp_path / "rows.parquet", tmp_path / "one.parquet", *new)
    result = pl.read_parquet(tmp_path / "one.parquet")
    check(frame, result.to_pandas(), 12)
    engine = jaxllm.BatchGenerator(
        *jaxllm.load(MODEL, config={"max_position_embeddings": 512}), slots=16, max_new_tokens=12
    )
    direct = engine.generate_table(pl.from_pandas(frame), template=TEMPLATE)
    assert direct["text"].equals(result["text"])
    assert direct.columns == result.columns
    with two_nodes() as cluster:
        ray = ("--engine", "ray", "--address", cluster.address, "--actors", 2)
        resources = ("--actor-resources", f"CPU={CPUS}")
        source, output = tmp_path / "rows.parquet", tmp_path / "ray.parquet"
        kill(tmp_path, source, output, *new, *ray, *resources)
        run(tmp_path, source, output, *new, *ray, *resources, "--resume")
    assert pl.read_parquet(output).equals(result)
