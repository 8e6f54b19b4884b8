"""Whole checkpoints against the reference: layer by layer, and the real SmolLM2."""

from __future__ import annotations

import functools
import json
import sys

import numpy as np
import pytest
from paths import DATA

import jaxllm

REFERENCE, CONFORMANCE = DATA / "reference", DATA / "conformance"
sys.path.insert(0, str(CONFORMANCE))
import compare  # noqa: E402

pytestmark = pytest.mark.usefixtures("highest_precision")

FORWARD = [
    case
    for case in json.loads((CONFORMANCE / "cases.json").read_text())["cases"]
    if case["kind"] == "forward"
]
TINY = ("tiny-llama", "tiny-gpt2", "tiny-t5", "tiny-t5-v1_1")


@functools.cache
def arrays():
    return dict(np.load(CONFORMANCE / "arrays.npz"))


@pytest.mark.parametrize("case", FORWARD, ids=lambda case: case["id"])
def test_conformance(case):
    model, _ = jaxllm.load(compare.model_dir(case))
    inputs = {name: np.array(value) for name, value in case["inputs"].items()}
    out = model(**inputs)
    actual = {key.split("/", 1)[1] for key in case["expected"]["arrays"]}
    actual = {name: np.asarray(getattr(out, name)) for name in actual}
    assert compare.check(case, actual, arrays(), atol=1e-4) == []


@pytest.mark.parametrize("name", TINY)
def test_every_layer(name):
    model, _ = jaxllm.load(REFERENCE / name)
    stored = dict(np.load(REFERENCE / f"{name}.npz"))
    inputs = {k: stored[k] for k in ("input_ids", "attention_mask")}
    real = inputs["attention_mask"].astype(bool)
    if "decoder_input_ids" in stored:
        inputs["decoder_input_ids"] = stored["decoder_input_ids"]
        out = model(**inputs, output_hidden_states=True)
        layers = {"enc_hidden": out.encoder_hidden_states, "dec_hidden": out.decoder_hidden_states}
        close(out.logits, stored["logits"])
    else:
        out = model(**inputs, output_hidden_states=True)
        layers = {"hidden": out.hidden_states}
        close(out.logits[real], stored["logits"][real])
    for key, states in layers.items():
        assert f"{key}_{len(states)}" not in stored
        for i, state in enumerate(states):
            where = slice(None) if key == "dec_hidden" else real
            close(state[where], stored[f"{key}_{i}"][where])


def close(got, expected) -> None:
    """Within 1e-4 of the reference's standard deviation."""
    assert np.abs(np.asarray(got) - expected).max() < 1e-4 * expected.std()


@pytest.mark.ci
def test_smollm2(smollm2_gguf):
    """The real model: last logits of three padded prompts, and 32 greedy tokens of each."""
    stored = dict(np.load(REFERENCE / "smollm2_text.npz"))
    ids, mask = stored["input_ids"], stored["attention_mask"]
    model, _ = jaxllm.load(smollm2_gguf)
    logits = model(ids, mask).logits
    close(logits[:, -1], stored["last_logits"])
    close(logits[2, 8][None], stored["early_logits"])
    new = stored["greedy"].shape[1] - ids.shape[1]
    out = jaxllm.generate(model, ids, mask, max_new_tokens=new, eos_token_id=None, do_sample=False)
    np.testing.assert_array_equal(out.sequences, stored["greedy"])
