"""Presence and frequency penalties and the logit bias, alone and in batch slots."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from batch_tools import differences

import jaxllm

MODEL = tiny.make("llama", num_hidden_layers=1)


@pytest.mark.ci
def test_scores_are_lowered_by_what_was_generated():
    """Every step's processed scores follow from its logits and the new tokens before it."""
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {7: 2.0, 9: -100}}
    ids = np.array([[5, 6, 7], [0, 8, 9]])
    mask = np.array([[True, True, True], [False, True, True]])
    out = jaxllm.generate(
        MODEL, ids, mask, **fields, max_new_tokens=12, output_scores=True, output_logits=True
    )
    bias = np.zeros(50)
    bias[[7, 9]] = 2.0, -100
    new, repeated = np.asarray(out.sequences)[:, 3:], False
    for row in range(2):
        counts = np.zeros(50)
        for step, token in enumerate(new[row]):
            logits = np.asarray(out.logits[step][row])
            expected = logits + bias - 1.5 * (counts > 0) - 0.5 * counts
            np.testing.assert_allclose(out.scores[step][row], expected, atol=1e-5)
            repeated |= counts.max() > 1
            counts[token] += 1
            if token == 2:
                break
    assert repeated  # so that the two penalties differ


@pytest.mark.ci
def test_rows_with_different_penalties_share_a_program():
    rows = [
        {"input_ids": [5, 6, 7], "max_new_tokens": 10, "presence_penalty": 2.0},
        {"input_ids": [5, 6, 7], "max_new_tokens": 10},
        {"input_ids": [5, 6, 7, 8], "max_new_tokens": 10, "frequency_penalty": -2.0},
        {"input_ids": [5, 6], "max_new_tokens": 10, "logit_bias": {"11": 3, "12": -3}},
        {"input_ids": [5, 6], "max_new_tokens": 10, "logit_bias": {"13": 100}},
    ]
    engine = jaxllm.BatchGenerator(MODEL, slots=4)
    outputs = engine.generate(rows)
    assert differences(MODEL, rows, outputs)[0] == []
    assert len(engine.counts.program_calls) == 3  # prompts, first tokens, further tokens
    assert outputs[4].output_ids[0] == [13] * 10
    assert outputs[0].output_ids != outputs[1].output_ids != outputs[2].output_ids


def test_wrong_values_are_named():
    for field, value, error in [
        ("presence_penalty", 3, r"`presence_penalty` must be a number in \[-2, 2\]"),
        ("logit_bias", {"a": 1}, "`logit_bias` must be a map from token ids"),
        ("logit_bias", {3: 101}, "`logit_bias` must be a map from token ids"),
        ("logit_bias", dict.fromkeys(range(513), 1), "at most 512"),
        ("logit_bias", {50: 1}, "names token 50, but the vocabulary has 50"),
    ]:
        with pytest.raises(jaxllm.JaxLLMError, match=error):
            jaxllm.generate(MODEL, [[5]], max_new_tokens=1, **{field: value})
