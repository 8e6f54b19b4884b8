"""Public names of each package, and the import paths that the documentation has named."""

from __future__ import annotations

import importlib

import pytest

PACKAGES = ["models", "nn", "cache", "parallel", "checkpoint", "tokenizers", "generation", "batch"]
PACKAGES += [
    "batch.job",
    "generation.processors",
    "generation.settings",
    "generation.stopping",
    "evaluate",
    "planning",
    "serve",
    "training",
    "training.data",
    "training.run",
    "training.evaluation",
    "errors",
]

DOCUMENTED = {
    "jaxllm": "BatchGenerator GenerationConfig JaxLLMError generate generate_texts load load_orbax"
    " make_mesh pipeline plan save_hf save_orbax score stream train",
    "jaxllm.auto": "AutoConfig AutoModelForCausalLM AutoModelForSeq2SeqLM AutoTokenizer",
    "jaxllm.checkpoint": "RunCheckpoints load_adapter save_adapter smollm2",
    "jaxllm.checkpoint.orbax": "RunCheckpoints",
    "jaxllm.checkpoint.peft": "load_adapter save_adapter",
    "jaxllm.evaluate": "perplexity",
    "jaxllm.planning": "abstract_model lower plan",
    "jaxllm.serve": "AsyncEngine",
    "jaxllm.flax_classes": "AutoTokenizer FlaxAutoModelForCausalLM FlaxAutoModelForSeq2SeqLM"
    " FlaxT5ForConditionalGeneration shift_tokens_right",
    "jaxllm.generation": "DisjunctiveConstraint HostLogitsProcessor LogitsProcessorList"
    " MaxTimeCriteria PhrasalConstraint TemperatureLogitsWarper TopKLogitsWarper TopPLogitsWarper"
    " WatermarkDetector WatermarkLogitsProcessor WatermarkingConfig compute_transition_scores"
    " grammar",
    "jaxllm.models.gpt2": "GPT2LMHeadModel",
    "jaxllm.models.t5": "T5Config T5ForConditionalGeneration",
    "jaxllm.parallel": "make_mesh use_mesh",
    "jaxllm.tokenizers.byte_level": "byte_tokenizer",
    "jaxllm.training": "OptimizerConfig TrainState loss_for make_optimizer make_train_step",
    "jaxllm.training.data": "DataConfig ModelInfo make_batches",
    "jaxllm.training.lora": "LoraConfig add_lora is_trainable merge_lora partition",
    "jaxllm.training.losses": "TokenLoss",
    "jaxllm.training.run": "read_recipe train",
}


@pytest.mark.parametrize("module", DOCUMENTED)
def test_documented_import_paths(module: str) -> None:
    actual = importlib.import_module(module)
    assert [name for name in DOCUMENTED[module].split() if not hasattr(actual, name)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_packages(package: str) -> None:
    actual = importlib.import_module(f"jaxllm.{package}")
    assert actual.__doc__
    assert actual.__all__
    assert [name for name in actual.__all__ if not hasattr(actual, name)] == []


@pytest.mark.parametrize(
    ("name", "successor"),
    [
        ("GPT2TokenizerFast", "jaxllm.auto.AutoTokenizer"),
        ("FlaxT5ForConditionalGeneration", "jaxllm.models.T5ForConditionalGeneration"),
        ("FlaxAutoModelForCausalLM", "jaxllm.auto.AutoModelForCausalLM"),
    ],
)
def test_names_of_transformers_say_what_to_write(name: str, successor: str) -> None:
    with pytest.raises(AttributeError, match=f"{name}': use {successor}$"):
        getattr(importlib.import_module("jaxllm"), name)
