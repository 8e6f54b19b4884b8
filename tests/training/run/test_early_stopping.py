"""Early stopping: when it ends a run, and that a resumed run counts on."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import go_on, measured, plain, recipe, saved

from jaxllm.common.errors import ConfigError
from jaxllm.training.run.loop import Patience, patience_of
from jaxllm.training.run.recipe import EarlyStopping, Recipe
from jaxllm.training.run.run import train


def stopping(folder: Path, **changes: Any) -> Recipe:
    """A run with a learning rate that spoils the model from the first step on."""
    fields = {
        "eval_data": plain(folder)["data"],
        "optimizer": {"name": "sgd", "learning_rate": 1000.0, "clip_norm": None},
        "evaluation": {"every": 1, "at_start": True},
        "early_stopping": {"patience": 3},
        "ema_decay": None,
        **changes,
    }
    return recipe(folder, **fields)


@pytest.mark.ci
def test_a_run_that_gets_worse_ends(tmp_path: Path):
    result = train(stopping(tmp_path), quiet=True)
    assert result.step == 3
    assert result.stopped_by is None
    reason = result.stopped_early or ""
    assert re.fullmatch(
        r"eval_loss has not improved on 5\.\d+ in 3 evaluations \(early_stopping.patience 3\)",
        reason,
    )
    assert reason in (result.folder / "report.html").read_text()
    # The last step is saved, and resuming changes nothing.
    before = saved(result.folder)
    assert go_on(stopping(tmp_path)).step == 3
    assert saved(result.folder) == before


@pytest.mark.slow
def test_a_resumed_run_counts_on(tmp_path: Path):
    """Stopped by another end after four steps, with more patience it ends at the fifth."""
    patient = {"patience": 5, "min_delta": 0.1}
    assert train(stopping(tmp_path), quiet=True).step == 3
    assert go_on(stopping(tmp_path, early_stopping=patient), max_steps=4).stopped_early is None
    assert go_on(stopping(tmp_path, early_stopping=patient)).step == 5
    assert [row["step"] for row in measured(tmp_path / "run")] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("metric", "values", "settings", "waited"),
    [
        ("eval_loss", [3, 2, 1], EarlyStopping(), 0),
        ("eval_loss", [3, 3, 3.1], EarlyStopping(), 2),
        ("eval_loss", [3, 2.9, 2.8], EarlyStopping(min_delta=0.3), 2),
        # As EarlyStoppingCallback of transformers 5.24.0 counts (early_stopping_threshold).
        ("eval_loss", [3, 2.8, 2.6], EarlyStopping(min_delta=0.3), 0),
        ("eval_loss", [3, 2.8, 2.6], EarlyStopping(min_delta=0.3, min_delta_from="best"), 2),
        ("eval_loss", [3, 2.8, 2.4], EarlyStopping(min_delta=0.3, min_delta_from="best"), 0),
        ("eval_accuracy", [0.1, 0.2, 0.3], EarlyStopping(min_delta=0.2, min_delta_from="best"), 2),
        ("eval_accuracy", [0.1, 0.2, 0.15, float("nan")], EarlyStopping(), 2),
        ("eval_rewards/margins", [float("nan"), 0.1], EarlyStopping(), 0),
    ],
)
def test_what_counts_as_an_improvement(
    metric: str, values: list[float], settings: EarlyStopping, waited: int
):
    state = Patience(metric)
    for value in values:
        state = state.after({metric: value}, settings)
    assert state.waited == waited


@pytest.mark.ci
def test_settings_without_effect(tmp_path: Path):
    with pytest.raises(ConfigError, match=re.escape("no effect without evaluation.every")):
        stopping(tmp_path, evaluation={})
    with pytest.raises(ConfigError, match="early_stopping: has no effect without eval_data"):
        stopping(tmp_path, eval_data=None, evaluation={})
    wrong = stopping(tmp_path, early_stopping={"metric": "eval_bleu"})
    with pytest.raises(ConfigError, match=r"early_stopping\.metric: unknown metric 'eval_bleu'"):
        train(wrong, quiet=True)


def test_values_of_other_data_are_not_compared(tmp_path: Path):
    begun = stopping(tmp_path)
    state = Patience("eval_loss", best=1.0, waited=2, measured_on="eval_loss of one")
    meta = {"early_stopping": dataclasses.asdict(state)}
    assert patience_of(begun, meta, "{} of one".format) == state
    new = Patience("eval_loss", measured_on="eval_loss of another")
    assert patience_of(begun, meta, "{} of another".format) == new
    assert patience_of(begun, {}, "{} of another".format) == new
