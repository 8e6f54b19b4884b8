"""Parameters that a run trains of the model that it begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_runs import recipe

from jaxllm.common.errors import ConfigError
from jaxllm.models.weights import parameters
from jaxllm.training.run.setup import initial_model, trainable_paths


def test_patterns_choose_what_is_trained(tmp_path: Path):
    spec = replace(recipe(tmp_path), trainable=(r"blocks\.0\.attn", "embed"))
    model, _ = initial_model(spec)
    chosen = trainable_paths(spec, model)
    assert chosen is not None
    expected = {path for path in parameters(model) if "blocks.0.attn" in path or "embed" in path}
    assert {path for path in parameters(model) if chosen(path)} == expected


def test_a_pattern_that_matches_nothing_is_an_error(tmp_path: Path):
    spec = replace(recipe(tmp_path), trainable=("embed", r"final_norm"))
    model, _ = initial_model(spec)
    with pytest.raises(ConfigError, match=r"trainable: 'final_norm' matches no parameter; there"):
        trainable_paths(spec, model)
