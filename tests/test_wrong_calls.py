"""Wrong values in calls from Python: an InputError with the argument and its value."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
from paths import DATA

import jaxllm
from jaxllm import models
from jaxllm.errors import InputError, JaxLLMError

GPT2, T5 = (DATA / "reference" / name for name in ("tiny-gpt2", "tiny-t5"))


@pytest.fixture(scope="module")
def tokenizer():
    return jaxllm.AutoTokenizer.from_pretrained(T5)


MODEL_CALLS = {
    "config: expected a config": lambda model: jaxllm.load(GPT2, config=3),
    "config: expected names of fields, found 3": lambda model: jaxllm.load(GPT2, config={3: 3}),
    "architecture: expected a class": lambda model: jaxllm.load(GPT2, architecture=[]),
    "attn_implementation: expected": lambda m: jaxllm.load(GPT2, attn_implementation=np.zeros(0)),
    "quantize: expected a name": lambda model: jaxllm.load(GPT2, quantize=[]),
    "remat: expected True or False, found 3": lambda model: jaxllm.load(GPT2, remat=np.int64(3)),
    "allow_nonfinite: expected": lambda model: jaxllm.load(GPT2, allow_nonfinite=np.zeros(0)),
    "progress: expected a function": lambda model: jaxllm.load(GPT2, progress=3),
    "folder: expected a path, found None": lambda model: model.save_pretrained(None),
    "model: expected a model, found 3": lambda model: jaxllm.save_hf("x", 3),
    "tokenizer: expected a tokenizer": lambda model: jaxllm.save_hf("x", model, "tok"),
    "max_shard_bytes: expected .*1GB": lambda m: jaxllm.save_hf("x", m, max_shard_bytes="1GB"),
    "folder: expected a path, found 3": lambda model: jaxllm.save_orbax(3, model),
    "model: expected a model, found tok": lambda model: jaxllm.save_orbax("x", "tok"),
    "folder: expected a path": lambda model: jaxllm.load_orbax(None),
    "size: expected an integer, found a": lambda model: model.resize_token_embeddings("a"),
    "seed: expected an integer": lambda m: type(m).from_config(m.config, seed="a"),
    "dtype, param_dtype: .*zz": lambda m: type(m).from_config(m.config, dtype="zz"),
    "config: expected a config.json object": lambda model: models.model_spec("x"),
    "source: expected a path, found 3": lambda model: jaxllm.abstract_model(3),
    "tokenizer: expected a tok.* 3": lambda model: jaxllm.BatchGenerator(model, 3),
    "tokenizer: expected a tok": lambda model: jaxllm.AsyncEngine(model, 3),
    "rows: ": lambda m: jaxllm.BatchGenerator(m).generate(None),
    "save_directory: expected": lambda m: jaxllm.GenerationConfig().save_pretrained(3),
}


@pytest.mark.parametrize("message", MODEL_CALLS)
def test_of_models(message: str) -> None:
    with pytest.raises(InputError, match=message) as failure:
        MODEL_CALLS[message](tiny.cached("gpt2"))
    assert len(str(failure.value)) < 500


def test_a_long_path_of_a_model() -> None:
    with pytest.raises(JaxLLMError, match="File name too long") as failure:
        tiny.cached("gpt2").save_pretrained("x" * 5000)
    assert len(str(failure.value)) <= 500


TOKENIZER_CALLS = {
    "new_tokens: expected a list, found None": lambda t: t.add_tokens(None),
    "tokens: expected a dict of tokens": lambda t: t.add_special_tokens(3),
    "additional_special_tokens: expected a list": lambda t: t.add_special_tokens(
        {"additional_special_tokens": 3}
    ),
    "input_ids: expected a list, found 3": lambda t: t.pad({"input_ids": 3}),
    "1 rows of 1000000000000 tokens": lambda t: t("a", padding=True, pad_to_multiple_of=10**12),
    "2 rows of 1000000000000 tokens": lambda t: t(
        ["a", "b"], padding="max_length", max_length=10**12
    ),
    "save_directory: expected a path": lambda t: t.save_pretrained(None),
    "folder: expected a path": lambda t: t.save(np.zeros(3)),
}


@pytest.mark.parametrize("message", TOKENIZER_CALLS)
def test_of_tokenizers(message: str, tokenizer) -> None:
    with pytest.raises(InputError, match=message):
        TOKENIZER_CALLS[message](tokenizer)


def test_of_a_pipeline() -> None:
    pipe = jaxllm.pipeline("text2text-generation", T5)
    for inputs in (None, 3):
        with pytest.raises(InputError, match=f"inputs: expected a list, found {inputs}"):
            pipe(inputs)
