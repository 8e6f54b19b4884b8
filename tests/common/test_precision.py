"""Products of float32 models are exact on TPU and GPU, whoever calls them."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import tiny

from jaxllm.common.precision import chosen_precision, matmul_precision
from jaxllm.models.build_options import Options
from jaxllm.models.quantize import quantize_model

PRODUCT = re.compile(r"stablehlo\.dot_general .*precision = \[(\w+), (\w+)\].*\(tensor<\S+x(\w+)>")


def precisions(function: Callable[..., Any], *arguments: Any, platform: str = "tpu") -> set[str]:
    """Precisions of the float32 products in a program for a platform."""
    traced = jax.jit(function).trace(*arguments)
    lines = traced.lower(lowering_platforms=(platform,)).as_text().splitlines()
    products = [line for line in lines if "stablehlo.dot_general" in line]
    found = [PRODUCT.search(line) for line in products]
    assert products
    assert all(found), products
    return {name for m in found if m is not None and m[3] == "f32" for name in m.groups()[:2]}


def training(model: Any, ids: jax.Array) -> jax.Array:
    return jax.grad(lambda model: model(ids, labels=ids).loss, allow_int=True)(model)


def two_calls(model: Any, ids: jax.Array) -> jax.Array:
    """A prefill and a decode step."""
    inputs = {"input_ids": ids} if model.is_encoder_decoder else {}
    cache = model.init_cache(len(ids), 80, **inputs)
    out = model.decode(ids, jnp.ones(ids.shape, bool), cache, cache_is_empty=True)
    one = ids[:, :1]
    return model.decode(one, jnp.ones(one.shape, bool), out.cache).logits


@pytest.mark.parametrize("platform", ["tpu", pytest.param("cuda", marks=pytest.mark.ci)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "t5", "bart"])
def test_float32_models_multiply_exactly(family: str, platform: str) -> None:
    model, ids = tiny.cached(family), jnp.asarray(tiny.ids())
    for function in (training, two_calls):
        assert precisions(function, model, ids, platform=platform) == {"HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert "DEFAULT" in precisions(two_calls, model, ids, platform=platform)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_weights(name: str) -> None:
    model = quantize_model(tiny.cached("llama"), name)
    assert precisions(two_calls, model, jnp.asarray(tiny.ids())) == {"HIGHEST"}


@pytest.mark.parametrize("implementation", ["blockwise", "xla"])
def test_attention_by_other_implementations(implementation: str) -> None:
    model = tiny.make("llama", options=Options(attn_implementation=implementation))
    assert precisions(training, model, jnp.asarray(tiny.ids(1, 300))) == {"HIGHEST"}
    with jax.default_matmul_precision("bfloat16"):
        assert precisions(training, model, jnp.asarray(tiny.ids(1, 300))) == {"DEFAULT"}


def test_half_precision_is_multiplied_as_the_platform_does() -> None:
    half = Options(dtype=jnp.dtype("bfloat16"), param_dtype=jnp.dtype("bfloat16"))
    model = tiny.make("llama", options=half)
    traced = jax.jit(two_calls).trace(model, jnp.asarray(tiny.ids()))
    lines = traced.lower(lowering_platforms=("tpu",)).as_text().splitlines()
    products = [PRODUCT.search(line) for line in lines if "stablehlo.dot_general" in line]
    assert {m[1] for m in products if m is not None and m[3] == "bf16"} == {"DEFAULT"}


def test_less_precision_is_set_for_all_threads() -> None:
    with matmul_precision("high"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(chosen_precision).result() == "high"
        with matmul_precision(None):
            assert chosen_precision() == "high"
    assert chosen_precision() is None
