"""`jax.export` of forward passes with open numbers of rows and columns, and of `generate`."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax import export
from paths import ROOT

from jaxllm.common.errors import InputError
from jaxllm.models.quantize import quantize_model


def forward(model, ids, mask=None):
    names = ("attention_mask", "decoder_input_ids")
    given = dict(zip(names, (mask, ids if model.is_encoder_decoder else None), strict=True))
    return model(ids, **{name: x for name, x in given.items() if x is not None}).logits


@pytest.mark.parametrize("shape", ["rows, 6", "rows, columns"])
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name in ("llama", "gpt2", "t5") else pytest.mark.ci)
        for name in tiny.CONFIGS
        if name not in ("mixtral", "qwen3_moe")  # tiles of their tokens have known sizes
    ],
)
def test_a_forward_pass_with_open_sizes(family, shape):
    model = tiny.cached(family)
    ids = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.int32)
    bare = export.export(jax.jit(forward))(model, ids)
    masked = export.export(jax.jit(forward))(model, ids, ids)
    for rows in (1, 3):
        tokens = tiny.ids(rows, 6)
        expected = forward(model, tokens)
        assert expected.std() > 0.1
        np.testing.assert_allclose(bare.call(model, tokens), expected, rtol=0, atol=1e-4)
        mask = np.ones_like(tokens)
        mask[0, -2:] = 0
        expected = forward(model, tokens, mask)
        np.testing.assert_allclose(
            masked.call(model, tokens, mask)[:, :4], expected[:, :4], rtol=0, atol=1e-4
        )


@pytest.mark.parametrize("columns", [1, 4])
@pytest.mark.parametrize(
    ("family", "tokens"), [("t5", 70), pytest.param("bart", 60, marks=pytest.mark.ci)]
)
def test_an_open_prompt_with_known_columns_of_the_decoder(family, tokens, columns):
    model = tiny.cached(family)
    rows, width = export.symbolic_shape("rows, width")
    shapes = [jax.ShapeDtypeStruct((rows, n), jnp.int32) for n in (width, columns)]
    both = jax.jit(lambda model, ids, answers: model(ids, decoder_input_ids=answers).logits)
    program = export.export(both)(model, *shapes)
    given = (tiny.ids(3, tokens), tiny.ids(3, columns))
    np.testing.assert_allclose(program.call(model, *given), both(model, *given), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_weights_with_an_open_number_of_rows(name):
    model = quantize_model(tiny.cached("llama"), name)
    ids = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 6"), jnp.int32)
    program, tokens = export.export(jax.jit(forward))(model, ids), tiny.ids(3, 6)
    # XLA's product for a few rows of int8 rounds the rows to int8, too.
    np.testing.assert_allclose(program.call(model, tokens), forward(model, tokens), atol=3e-3)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generation_with_open_sizes_says_what_to_do(family):
    model = tiny.cached(family)
    ids = jax.ShapeDtypeStruct(export.symbolic_shape("rows, 6"), jnp.int32)

    @jax.jit
    def answer(bare, ids):
        return bare.with_card(model.card).generate(ids, max_new_tokens=4).sequences

    with pytest.raises(InputError, match=r"^input_ids: generate needs the numbers of rows and col"):
        export.export(answer)(model, ids)


GENERATION = """
import jax, jax.numpy as jnp, numpy as np, tiny
from jax import export
for family in ("llama", "gpt2", "t5"):
    model, ids = tiny.cached(family), tiny.ids(3, 6)
    fields = {"max_new_tokens": 5, "eos_token_id": None, "do_sample": False}
    @jax.jit
    def answer(bare, ids):
        return bare.with_card(model.card).generate(ids, **fields).sequences
    program = export.export(answer)(model, jax.ShapeDtypeStruct(ids.shape, jnp.int32))
    assert np.array_equal(program.call(model, ids), model.generate(ids, **fields).sequences)
"""


@pytest.mark.ci
def test_generation_of_a_fixed_size_without_kernels():
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    env = {**os.environ, "JAXLLM_CPU_KERNELS": "0", "JAX_PLATFORMS": "cpu", "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", GENERATION], check=True, env=env, timeout=300)
