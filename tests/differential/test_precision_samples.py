"""SmolLM2's losses in bfloat16 beside stored ones of transformers in the same dtype."""

from __future__ import annotations

import json

import numpy as np
import pytest
from half_precision import token_losses
from helpers import SAMPLES

import jaxllm


@pytest.mark.ci
def test_bfloat16_is_as_exact_as_the_reference(smollm2_gguf):
    """The reference's own rounding is the measure: its distance from its float32 results."""
    sample = json.loads((SAMPLES / "precision.json").read_text())
    exact, reference = (np.array(sample["losses"][name]) for name in ("float32", "bfloat16"))
    model = jaxllm.load(smollm2_gguf, dtype="bfloat16", param_dtype="bfloat16")[0]
    ours = token_losses(model, np.array(sample["ids"]))
    rounding = np.abs(reference - exact)
    assert np.abs(ours - exact).mean() < 1.5 * rounding.mean()
    assert np.abs(ours - exact).max() < 2 * rounding.max()
