"""docs/migration.md: its scripts run as they stand, on small models, and its names exist."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from pages import run_python, run_shell, shell_blocks
from paths import DATA, ROOT
from weight_formats import copied, write_flax

import jaxllm
from jaxllm.models.registry import FAMILIES

PAGE = ROOT / "docs" / "migration.md"
TEXT = PAGE.read_text(encoding="utf-8")
CLASSES = {
    "FlaxBartForCausalLM": ["bart"],
    "FlaxBartForConditionalGeneration": ["bart"],
    "FlaxBertForCausalLM": ["bert"],
    "FlaxBigBirdForCausalLM": ["big_bird"],
    "FlaxBlenderbotForConditionalGeneration": ["blenderbot"],
    "FlaxBlenderbotSmallForConditionalGeneration": ["blenderbot-small"],
    "FlaxBloomForCausalLM": ["bloom"],
    "FlaxElectraForCausalLM": ["electra"],
    "FlaxEncoderDecoderModel": ["encoder-decoder"],
    "FlaxGPT2LMHeadModel": ["gpt2", "gpt-sw3"],
    "FlaxGPTJForCausalLM": ["gptj"],
    "FlaxGPTNeoForCausalLM": ["gpt_neo"],
    "FlaxGemmaForCausalLM": ["gemma"],
    "FlaxLlamaForCausalLM": ["llama"],
    "FlaxLongT5ForConditionalGeneration": ["longt5"],
    "FlaxMBartForConditionalGeneration": ["mbart"],
    "FlaxMT5ForConditionalGeneration": ["mt5"],
    "FlaxMarianMTModel": ["marian"],
    "FlaxMistralForCausalLM": ["mistral"],
    "FlaxOPTForCausalLM": ["opt"],
    "FlaxPegasusForConditionalGeneration": ["pegasus"],
    "FlaxRobertaForCausalLM": ["roberta"],
    "FlaxRobertaPreLayerNormForCausalLM": ["roberta-prelayernorm"],
    "FlaxT5ForConditionalGeneration": ["t5"],
    "FlaxXGLMForCausalLM": ["xglm"],
    "FlaxXLMRobertaForCausalLM": ["xlm-roberta"],
}
"""FLAX_MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and FLAX_MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES of
transformers 4.57.6, by class."""
SAME_AS = {"gpt-sw3": "gpt2"}
"""Model types of tokenizers; the config of such a model has the other type."""


def test_the_table_of_classes_is_the_registry() -> None:
    rows = re.findall(r"^\| `(Flax\w+)` \| (.+?) \| (yes|no) \|$", TEXT, re.MULTILINE)
    assert {name: kinds.split(", ") for name, kinds, _ in rows} == CLASSES
    for name, kinds, answer in rows:
        for kind in kinds.split(", "):
            family = FAMILIES.get(SAME_AS.get(kind, kind))
            reads = family is not None and name.removeprefix("Flax") in family.classes
            assert reads == (answer == "yes"), name


@pytest.mark.ci
def test_the_commands_run(tmp_path: Path) -> None:
    write_flax(
        tmp_path / "old-model", copied(DATA / "reference" / "tiny-t5", tmp_path / "old-model")
    )
    block = shell_blocks(PAGE)[0]
    install, commands = block.split("\n", 1)
    assert install == "pip install ."
    first, *text = run_shell(commands, tmp_path).splitlines()
    assert first in TEXT
    assert text
    assert (tmp_path / "new-model" / "model.safetensors").exists()


@pytest.mark.ci
def test_scripts_run(tmp_path: Path) -> None:
    folders = {name: DATA / "reference" / f"tiny-{name.lower()}" for name in ("GPT2", "T5")}
    namespace, _ = run_python(PAGE, **folders, OUTPUT=tmp_path / "saved")
    steps, losses = namespace["steps"], namespace["losses"]
    for run in (losses[:steps], losses[steps:]):
        assert len(run) == steps
        assert np.mean(run[-3:]) < 0.8 * run[0]
    saved, tokenizer = jaxllm.load(tmp_path / "saved")
    assert tokenizer is not None
    inputs = {"input_ids": namespace["inputs"]["input_ids"], "num_beams": 2, "max_new_tokens": 8}
    mask = namespace["inputs"]["attention_mask"]
    again = jaxllm.generate(saved, attention_mask=mask, **inputs)
    np.testing.assert_array_equal(again.sequences, namespace["beams"].sequences)
    before, _ = jaxllm.load(namespace["T5"])
    untrained = jaxllm.generate(before, attention_mask=mask, **inputs)
    assert not np.array_equal(untrained.sequences, again.sequences)


@pytest.mark.parametrize("name", sorted(set(re.findall(r"jaxllm\.((?:models\.)?\w+)", TEXT))))
def test_names_exist(name: str) -> None:
    package, _, member = name.rpartition(".")
    assert hasattr(jaxllm.models if package else jaxllm, member)
