"""docs/jax.md: its ordinary JAX code runs as it stands."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from pages import run_python
from paths import DATA, ROOT

import jaxllm

FIRST = DATA / "reference" / "tiny-llama"
T5 = DATA / "reference" / "tiny-t5"


@pytest.mark.ci
def test_the_page_runs(tmp_path: Path) -> None:
    """On two checkpoints that differ in weights, end token and context length."""
    model, tokenizer = jaxllm.load(FIRST)
    config = dataclasses.replace(model.config, eos_token_id=7, max_position_embeddings=99)
    second = jax.tree.map(lambda x: 0.9 * x, model).with_card(model.card, config=config)
    jaxllm.save_hf(tmp_path / "second", second, tokenizer)
    folders = {name.upper(): tmp_path / name for name in ("second", "averaged", "checkpoint")}
    names, _ = run_python(ROOT / "docs" / "jax.md", FIRST=FIRST, T5=T5, **folders)
    averaged = jaxllm.load(tmp_path / "averaged")[0]
    for x, y in zip(jax.tree.leaves(averaged), jax.tree.leaves(model), strict=True):
        np.testing.assert_allclose(x, 0.95 * y, rtol=1e-6)
    assert averaged.config.eos_token_id == model.config.eos_token_id
    assert names["logits"].shape == (2, 1, 6, model.config.vocab_size)
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["distilled"][-1] < names["distilled"][0]
    for x, y in zip(*map(jax.tree.leaves, (names["restored"], names["trained"])), strict=True):
        np.testing.assert_array_equal(x, y)
    assert names["restored"].card is names["first"].card
    np.testing.assert_allclose(
        names["exported"][:1], names["first"](names["ids"]).logits, rtol=0, atol=1e-4
    )
    np.testing.assert_array_equal(names["inside"], names["named"])
    settings = {"max_new_tokens": 8, "eos_token_id": None, "do_sample": False}
    for model, found in ((names["first"], "answer"), (names["t5"], "translation")):
        expected = model.generate(names["ids"], **settings).sequences[0, -8:]
        assert names[found] == expected.tolist()
