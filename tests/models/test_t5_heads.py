"""Heads of T5, mT5 and umT5 as transformers 4 and 5 saved them: tied or own, scaled or not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tiny

import jaxllm
from jaxllm.models.registry import model_spec

ROOT = Path(__file__).parents[1] / "data" / "t5_heads"
NAMES = sorted(folder.name for folder in ROOT.iterdir() if folder.is_dir())


def logits(folder: Path) -> np.ndarray:
    with np.load(ROOT / folder.name / "expected.npz") as file:
        inputs = {name: file[name] for name in ("input_ids", "decoder_input_ids")}
    return np.asarray(jaxllm.load(folder)[0](**inputs).logits)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_version_that_saved_the_model(name, tmp_path):
    with np.load(ROOT / name / "expected.npz") as file:
        expected = file["logits"]
    assert expected.std() > 1
    np.testing.assert_allclose(logits(ROOT / name), expected, rtol=0, atol=2e-4)
    saved = tmp_path / name
    jaxllm.save_hf(saved, jaxllm.load(ROOT / name)[0])
    np.testing.assert_array_equal(logits(saved), logits(ROOT / name))
    orbax = tmp_path / "orbax"
    jaxllm.save_orbax(orbax, jaxllm.load(ROOT / name)[0])
    model, _ = jaxllm.load_orbax(orbax)
    jaxllm.save_hf(tmp_path / "again" / name, model)
    np.testing.assert_array_equal(logits(tmp_path / "again" / name), logits(ROOT / name))


def test_the_names_of_the_cases_are_true():
    assert len(NAMES) == 18
    for name in NAMES:
        config = json.loads((ROOT / name / "config.json").read_text())
        kind, head, version = name.split("_")
        assert config["model_type"] == kind
        assert config["transformers_version"][0] == version[1]
        assert ("scale_decoder_outputs" in config) == (
            version == "v5" and kind != "mt5" and head != "nokey"
        )


# (type, tie_word_embeddings, scale_decoder_outputs, transformers_version) -> scaled, if tied.
SCALED = [
    *((kind, True, None, version, True) for kind in ("t5", "mt5", "umt5") for version in (None, 4)),
    *((kind, False, None, v, False) for kind in ("t5", "mt5", "umt5") for v in (None, 4, 5)),
    *((kind, True, None, 5, kind != "mt5") for kind in ("t5", "mt5", "umt5")),
    *(
        (kind, tied, key, version, key)
        for kind in ("t5", "mt5", "umt5")
        for tied in (True, False)
        for key in (True, False)
        for version in (None, 4, 5)
    ),
]
VERSIONS = {4: ("4.57.6", "4.6.0.dev0"), 5: ("5.24.0", "5.0.0rc1", "10.1"), None: (None, "", "?")}


@pytest.mark.parametrize(("kind", "tied", "key", "version", "scaled"), SCALED)
def test_what_config_json_says_of_the_scale(kind, tied, key, version, scaled):
    fields = {"model_type": kind, "tie_word_embeddings": tied, "scale_decoder_outputs": key}
    for text in VERSIONS[version]:
        raw = {**tiny.CONFIGS["t5"], **fields, "transformers_version": text}
        given = {name: value for name, value in raw.items() if value is not None}
        assert model_spec(given).config.scaled is scaled, given
        assert model_spec(raw).config.scaled is scaled, raw


def test_an_override_of_the_scale_wins(tmp_path):
    folder = tmp_path / "mt5_tied_v5"
    shutil.copytree(ROOT / folder.name, folder)
    plain = logits(folder)
    changed, _ = jaxllm.load(folder, config={"scale_decoder_outputs": True})
    with np.load(folder / "expected.npz") as file:
        inputs = {name: file[name] for name in ("input_ids", "decoder_input_ids")}
    np.testing.assert_allclose(changed(**inputs).logits * 4, plain, rtol=1e-5, atol=1e-4)
