"""What a fresh process imports to load a model and to generate, and what is left for later."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from paths import DATA, ROOT
from tiny_runs import recipe

import jaxllm
from jaxllm.common.errors import MissingExtraError

LATER = frozenset(
    {
        *("gguf", "grain", "huggingface_hub", "jinja2", "llguidance", "orbax", "psutil"),
        *("pydantic", "sentencepiece", "tensorstore", "torch", "transformers"),
        *("datasets", "pyarrow", "pandas", "polars", "requests", "httpx", "starlette", "uvicorn"),
        *("matplotlib", "ray", "lm_eval", "tensorboardX", "wandb", "jaxllm.training"),
    }
)
"""Packages that are imported where a call needs them."""
NEEDED = frozenset({"jax", "jaxlib", "flax", "numpy", "ml_dtypes", "jaxtyping", "tokenizers"})
GENERATE = """
import json, sys
import jaxllm
model, tokenizer = jaxllm.load(sys.argv[1])
text = sys.argv[2]
jaxllm.generate(model, tokenizer([text], return_tensors="np").input_ids, max_new_tokens=2)
jaxllm.generate_texts(model, [text], tokenizer, max_new_tokens=2)
sys.stderr.write(json.dumps(sorted(sys.modules)))
"""
REFERENCE = DATA / "reference"


def modules(folder: Path) -> set[str]:
    """The modules, and packages of all levels, of a process that generates from a folder."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", GENERATE, str(folder), "the"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize(
    "folder",
    [
        DATA / "conformance" / "models" / "s_llama_tok",
        REFERENCE / "tiny-gpt2",
        REFERENCE / "tiny-t5",
    ],
    ids=["llama", "gpt2", "t5"],
)
def test_what_generation_from_a_folder_imports(folder):
    loaded = modules(folder)
    assert loaded >= NEEDED
    assert sorted(loaded & LATER) == []


@pytest.mark.ci
def test_a_sentencepiece_model_needs_its_library(tmp_path):
    """T5's class follows `spiece.model`, also beside a tokenizer.json."""
    for file in (REFERENCE / "tiny-t5").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "spiece.model").symlink_to(DATA / "tokenizers" / "t5.model")
    (tmp_path / "tokenizer_config.json").unlink()  # names no class; without it, config.json does
    assert modules(tmp_path) & LATER == {"sentencepiece"}


def test_training_without_grain_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grain", None)
    made = recipe(tmp_path)
    message = r"^training runs need the package grain: pip install .*\[train\]'$"
    with pytest.raises(MissingExtraError, match=message):
        jaxllm.train(made)
    assert not Path(made.output_dir).exists()
