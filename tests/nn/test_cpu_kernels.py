"""The kernels of cpu_kernels/ compute what XLA does, in products, attention and whole models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from jax import export
from paths import DATA

import jaxllm
from jaxllm.cache.kv_cache import KV
from jaxllm.models.lora import LoraConfig, add_lora, merge_lora, module_at, replace_modules
from jaxllm.models.quantize import formats_of, quantize_model
from jaxllm.nn.attention import Scores, attend
from jaxllm.nn.linear import Embedding, Linear
from jaxllm.nn.platform import products
from jaxllm.nn.platform.attention import attend_cache
from jaxllm.nn.platform.products import times_transposed
from jaxllm.nn.quantized import Int4Matrix, Int8Matrix
from jaxllm.parallel.sharding import make_mesh, use_mesh


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels, which other tests leave out (conftest.py)."""
    monkeypatch.setenv("JAXLLM_CPU_KERNELS", os.environ.get("CPU_KERNELS_UNDER_TEST", "best"))
    products.kernels_registered.cache_clear()
    jax.clear_caches()
    if not products.kernels_registered():
        compiler = sysconfig.get_config_var("CXX").split()[0]
        assert shutil.which(compiler) is None, "not installed: make kernels"
        pytest.skip("no C++ compiler to build the kernels with")
    yield
    products.kernels_registered.cache_clear()
    jax.clear_caches()


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def close(out: jax.Array, expected: np.ndarray | jax.Array, tolerance: float = 1e-5) -> None:
    expected = np.asarray(expected)
    np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * expected.std())


@pytest.mark.by_default("7-48-5")
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(1, 48, 33), (2, 1, 5), (3, 2061, 130), (7, 48, 5), (64, 2061, 33)],
)
def test_products(rows, inputs, outputs):
    x, w = draw(rows, inputs), draw(outputs, inputs, seed=1)
    expected = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    close(products.kernel_product(x, w), expected)
    matrix = Int8Matrix.quantize(w)
    expected = np.asarray(x, np.float64) @ np.asarray(matrix.dequantized(), np.float64).T
    close(products.kernel_int8_product(x, matrix.values[...], matrix.scale[...]), expected)


@pytest.mark.ci
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 33), (7, 2080, 50)])
def test_products_of_int4(rows, inputs, outputs):
    x, matrix = draw(rows, inputs), Int4Matrix.quantize(draw(outputs, inputs, seed=1))
    assert "jaxllm_linear_int4" in jax.jit(Int4Matrix.times).lower(matrix, x).as_text()
    weight = matrix.dequantized()
    close(matrix.times(x), np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T)
    gradient = jax.grad(lambda x: jnp.sum(matrix.times(x) ** 2))(x)
    close(gradient, jax.grad(lambda x: jnp.sum((x @ weight.T) ** 2))(x))


@pytest.mark.ci
@pytest.mark.usefixtures("kernels")
def test_derivatives_and_maps_of_products():
    x, w = draw(2, 5, 48), draw(20, 48, seed=1)

    def loss(product, x, w):
        return jnp.sum(jnp.sin(product(x, w)))

    def plain(x, w):
        return x @ w.T

    for of in (0, 1):
        gradient = jax.grad(loss, of + 1)(times_transposed, x, w)
        close(gradient, jax.grad(loss, of + 1)(plain, x, w))
    close(jax.jvp(times_transposed, (x, w), (x, w))[1], 2 * plain(x, w))
    close(jax.vmap(times_transposed, (0, None))(x, w), plain(x, w))
    text = jax.jit(times_transposed).lower(x, w).as_text()
    assert "jaxllm_linear" in text
    many = draw(products.MAX_ROWS + 1, 48)
    assert "jaxllm_linear" not in jax.jit(times_transposed).lower(many, w).as_text()
    with use_mesh(make_mesh(data=1, devices=jax.devices()[:1])):
        assert "jaxllm_linear" not in jax.jit(times_transposed).lower(x, w).as_text()


@pytest.mark.ci
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("queries", "heads", "biased"),
    [(1, (6, 2, 64), False), (3, (4, 4, 16), True), (70, (5, 1, 80), False)],
)
def test_attention(queries, heads, biased):
    (n, k, size), rows, slots = heads, 3, 37
    q = draw(rows, queries, n, size)
    kv = KV.from_sequence(*(draw(rows, slots, k, size, seed=seed) for seed in (1, 2)))
    visible = np.random.default_rng(3).random((rows, 1, queries, slots)) < 0.6
    visible[0, :, :, 20:] = visible[1, :, 0, :] = False  # free slots; a query that sees nothing
    visible = jnp.asarray(visible if queries > 1 else visible[:, :, :1])
    bias = draw(1, n, queries, slots, seed=4) if biased else None

    def eager(q, kv, visible, bias):
        return attend(q, kv, visible=visible, bias=bias, scores=Scores(0.3))

    def run(q, kv):
        return attend_cache(eager, q, kv, None, visible=visible, bias=bias, scores=Scores(0.3))

    assert "jaxllm_attention" in jax.jit(run).lower(q, kv).as_text()
    expected = eager(q, kv, visible, bias)
    close(run(q, kv), expected)
    assert not np.asarray(run(q, kv))[1, 0].any()
    gradient = jax.grad(lambda kv: jnp.sum(run(q, kv) ** 2))(kv)
    close(gradient.k, jax.grad(lambda kv: jnp.sum(eager(q, kv, visible, bias) ** 2))(kv).k, 1e-4)


def dequantized(model):
    """The float model with the values of a quantized one."""
    layers = {path: module_at(model, path) for path in formats_of(model)}
    floats = {}
    for path, layer in layers.items():
        outputs, inputs = layer.matrix.shape
        sizes = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": None}
        if isinstance(layer, Embedding):
            floats[path] = Embedding(outputs, inputs, **sizes)
        else:
            floats[path] = Linear(inputs, outputs, use_bias=layer.bias is not None, **sizes)
            if layer.bias is not None:
                floats[path].bias = nnx.Param(layer.bias[...])
        floats[path].weight = nnx.Param(layer.matrix.dequantized())
    return replace_modules(model, floats)


@pytest.mark.slow
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_models_generate_the_same(family, request):
    sizes = {"llama": {"head_dim": 16}, "gpt2": {"n_embd": 64}, "t5": {"d_kv": 16}}
    model = tiny.make(family, **sizes[family])
    lora = add_lora(model, LoraConfig(rank=4), key=1)
    quantized = [quantize_model(model, name) for name in ("int8", "int4")]
    ids, mask = tiny.ids(3), np.ones((3, 9), int)
    ids[1, :4], mask[1, :4] = 0, 0

    def outputs(*models):
        for i, candidate in enumerate(models):
            for beams in (1, 3) if i == 0 else (1,):
                yield jaxllm.generate(
                    candidate, ids, mask, max_new_tokens=12, num_beams=beams, output_scores=True
                )

    # Without the kernels integers are multiplied by x in 16 bits, so the float values are compared.
    expected = list(outputs(model, lora, merge_lora(lora), *map(dequantized, quantized)))
    request.getfixturevalue("kernels")
    out = outputs(model, lora, merge_lora(lora), *quantized)
    for i, (with_kernels, without) in enumerate(zip(out, expected, strict=True)):
        np.testing.assert_array_equal(with_kernels.sequences, without.sequences)
        # Roundings of 12 steps.
        close(with_kernels.scores[-1], without.scores[-1], 3e-5 if i < 4 else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["plain", "avx2"])
def test_other_instruction_sets(instructions):
    run = f"import pytest; raise SystemExit(pytest.main(['-q', {__file__!r}, '-k', 'not other']))"
    environment = os.environ | {"CPU_KERNELS_UNDER_TEST": instructions}
    subprocess.run([sys.executable, "-c", run], env=environment, check=True)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "tiny-t5"])
def test_programs_with_an_open_number_of_rows_call_no_kernel(name):
    """`jax.export` refuses a program that calls one."""
    model, _ = jaxllm.load(DATA / "reference" / name)
    tokens = np.arange(18, dtype=np.int32).reshape(3, 6)
    given = {"decoder_input_ids": tokens} if model.is_encoder_decoder else {}

    def forward(model, ids):
        return model(ids, **dict.fromkeys(given, ids)).logits

    for shape in ("rows, 6", "rows, columns"):
        ids = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.int32)
        program = export.export(jax.jit(forward))(model, ids)
        np.testing.assert_allclose(
            program.call(model, tokens), forward(model, tokens), rtol=0, atol=1e-4
        )
