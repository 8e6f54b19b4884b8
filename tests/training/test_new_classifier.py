"""A classifier with a new head, from a language model's checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
from paths import DATA

import jaxllm
from jaxllm.common.errors import CheckpointError, UnsupportedError
from jaxllm.training import with_classifier

GPT2 = DATA / "reference" / "tiny-gpt2"


def test_a_checkpoint_without_the_head_names_the_function():
    with pytest.raises(CheckpointError, match=r"missing score\.weight.*with_classifier"):
        jaxllm.auto.AutoModelForSequenceClassification.from_pretrained(
            GPT2, config={"num_labels": 3}
        )


def test_saved_and_loaded_the_classifier_is_the_same(tmp_path: Path):
    model = jaxllm.auto.AutoModelForCausalLM.from_pretrained(GPT2)
    classifier = with_classifier(model, num_labels=3, key=1)
    score = np.asarray(classifier.score.weight[...])
    assert score.shape == (3, model.config.width)
    np.testing.assert_allclose(score.std(), model.config.initializer_range, rtol=0.3)
    classifier.save_pretrained(tmp_path)
    saved = jaxllm.auto.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    np.testing.assert_array_equal(saved.score.weight[...], score)
    np.testing.assert_array_equal(
        saved.backbone.embed.weight[...], model.backbone.embed.weight[...]
    )


def test_t5_has_none():
    with pytest.raises(UnsupportedError, match="cannot be made a classifier"):
        with_classifier(tiny.cached("t5"), num_labels=3)
