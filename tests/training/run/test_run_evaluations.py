"""Evaluations of a run: before the first step, given up and made up for; and what they leave."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_runs import go_on, measured, plain, run_of, spoil, stops, tiny

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.training.monitor.metrics_log import read_metrics
from jaxllm.training.run.run import train


@pytest.mark.ci
def test_a_stop_gives_an_evaluation_up(tmp_path: Path):
    spec = tiny(tmp_path)
    spec = replace(spec, eval_data=spec.data)
    spec = replace(spec, evaluation=replace(spec.evaluation, every=2))
    # Asked at the start, after step 1, and before each batch of the evaluation at step 2.
    result = train(spec, quiet=True, stop=stops(4))
    assert (result.step, result.stopped_by) == (2, 15)
    assert "eval_loss" not in measured(run_of(spec))[-1]
    # Going on begins with it; stopped there once more, nothing has changed.
    assert train(spec, quiet=True, resume=True, stop=stops(1)).step == 2
    assert "eval_loss" not in measured(run_of(spec))[-1]
    assert go_on(spec).step == 4
    lines = measured(run_of(spec))
    assert ["eval_loss" in line for line in lines] == [False, True, False, True]
    with RunCheckpoints(run_of(spec) / "checkpoints", writable=False) as checkpoints:
        actual = [checkpoints.read(step) for step in (2, 4)]
    assert [record.metric for record in actual] == [lines[1]["eval_loss"], lines[3]["eval_loss"]]
    assert all(record.meta["evaluated"] for record in actual)


@pytest.mark.ci
def test_the_last_evaluation_is_made_up_for(tmp_path: Path):
    """And so is one that nobody asked for until the run was at its end."""
    spec = tiny(tmp_path, max_steps=2)
    spec = replace(spec, eval_data=spec.data)
    assert train(spec, quiet=True, stop=stops(3)).step == 2
    result = go_on(spec)
    assert (result.step, result.stopped_by) == (2, None)
    assert "eval_loss" in measured(run_of(spec))[-1]
    report = (run_of(spec) / "report.html").read_text()
    assert "lowest evaluation loss, step 2" in report
    before = (run_of(spec) / "metrics.jsonl").read_bytes()
    go_on(spec)
    assert (run_of(spec) / "metrics.jsonl").read_bytes() == before


@pytest.mark.ci
def test_an_evaluation_before_the_first_step(tmp_path: Path):
    spec = tiny(tmp_path, max_steps=2)
    spec = replace(spec, eval_data=spec.data)
    spec = replace(spec, evaluation=replace(spec.evaluation, at_start=True))
    # Killed in the first step, it begins anew.
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 1.0}\n')
    go_on(spec)
    lines = measured(run_of(spec))
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0].keys() == {"step", "eval_loss", "eval_perplexity", "eval_accuracy"}
    assert abs(lines[0]["eval_loss"] - np.log(260)) < 0.1
    assert go_on(spec, max_steps=3).step == 3
    assert [line["step"] for line in measured(run_of(spec))] == [0, 1, 2, 3]


@pytest.mark.ci
def test_the_best_step_is_a_sound_one(tmp_path: Path):
    """A damaged step is made anew; that it was the best is no reason to lose it."""
    spec = tiny(tmp_path, checkpoints={"every": 100})
    spec = replace(spec, eval_data=spec.data, evaluation=replace(spec.evaluation, every=2))
    train(spec, quiet=True)
    spoil(run_of(spec), 4)
    go_on(spec, max_steps=5)
    with RunCheckpoints(run_of(spec) / "checkpoints", writable=False) as checkpoints:
        assert checkpoints.read(4).metric == measured(run_of(spec))[3]["eval_loss"]


@pytest.mark.ci
def test_metrics_of_other_data_are_not_compared(tmp_path: Path):
    spec = tiny(tmp_path, max_steps=2, checkpoints={"every": 100})
    spec = replace(spec, eval_data=spec.data)
    train(spec, quiet=True)
    # The model has learned nothing of these letters.
    assert spec.data.path is not None
    other = tmp_path / "other.jsonl"
    other.write_text('{"text": "XYZ"}\n' * 8)
    go_on(replace(spec, eval_data=replace(spec.data, path=str(other))), max_steps=3)
    with RunCheckpoints(run_of(spec) / "checkpoints", writable=False) as checkpoints:
        first, second = (checkpoints.read(step).metric for step in (2, 3))
        assert first is not None
        assert second is not None
        assert first < second
        assert checkpoints.best() == 3


@pytest.mark.ci
def test_answers_stay_in_the_report(tmp_path: Path):
    """A run that goes on at its end generates nothing, and shows what it had."""
    pairs = {**plain(tmp_path)["data"], "format": "prompt_completion"}
    pairs |= {"prompt_field": "source", "completion_field": "target", "bucket": None}
    spec = tiny(
        tmp_path,
        max_steps=1,
        data=pairs,
        eval_data=pairs,
        evaluation={"metrics": ["exact_match"], "rows": 4, "fields": {"max_new_tokens": 2}},
    )
    train(spec, quiet=True)
    report = (run_of(spec) / "report.html").read_text()
    assert report.count("After training") == report.count("Before training") == 4
    # The step compiled, which is told of it and not of its evaluation: it has no speed.
    assert "tokens_per_second" not in read_metrics(run_of(spec) / "metrics.jsonl")[0]
    go_on(spec)
    assert (run_of(spec) / "report.html").read_text().count("After training") == 4
