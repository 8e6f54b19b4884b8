"""A user's program whose types are checked against the installed package; it is never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import jax
import numpy as np

import jaxllm
from jaxllm import GenerationConfig, JaxLLMError


def answers(folder: str, questions: list[str]) -> list[str]:
    model, tokenizer = jaxllm.load(folder, dtype="bfloat16")
    config = GenerationConfig(max_new_tokens=8, do_sample=True)
    return jaxllm.generate_texts(model, questions, tokenizer, generation_config=config)


def sequences(folder: str, text: str) -> jax.Array:
    model, tokenizer = jaxllm.load(folder, mesh=jaxllm.make_mesh(data=1))
    assert tokenizer is not None  # a folder without the tokenizer's files
    batch = tokenizer([text], padding=True, return_tensors="np")
    return jaxllm.generate(model, **batch, max_new_tokens=8).sequences


def pieces(folder: str, text: str) -> Iterator[str]:
    model, tokenizer = jaxllm.load(folder)
    assert tokenizer is not None
    tokens = jaxllm.stream(model, tokenizer([text], return_tensors="np").input_ids, top_k=5)
    for token in tokens:
        assert_type(token, np.ndarray)
        yield tokenizer.decode(token[0])


def main() -> int:
    try:
        texts = answers("smollm2", ["Once upon a time"])
    except JaxLLMError as error:
        print(error)
        return 1
    assert_type(texts, list[str])
    assert_type(jaxllm.__version__, str)
    print(texts, sequences("smollm2", texts[0]).shape, *pieces("smollm2", texts[0]))
    return 0
