"""Programs that are compiled while weights are read: the model that is returned finds them."""

from __future__ import annotations

import contextlib
from pathlib import Path

import jax
import numpy as np
import pytest
from devices import on_devices
from paths import DATA

import jaxllm
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError
from jaxllm.generation import compile_programs

IDS = [[5, 9, 2, 7, 3]]
REFERENCE = DATA / "reference"


class CompiledNames(CompileClock):
    """The names of the programs that are compiled."""

    def __init__(self):
        self.names = []
        super().__init__()

    def _duration(self, event, duration_secs, **kwargs):
        if event == "/jax/core/compile/backend_compile_duration":
            self.names.append(kwargs.get("fun_name"))
        super()._duration(event, duration_secs, **kwargs)


def load_and_generate(folder, options=None, **fields):
    """Number of programs that loading compiled, names of those that generating did, the ids, and
    those of a plain `load`."""
    options = options or {}
    call = {"input_ids": IDS, "max_new_tokens": 6, "key": 3, "eos_token_id": None, **fields}
    jax.clear_caches()
    with contextlib.closing(CompiledNames()) as clock:
        model, _ = jaxllm.load(
            folder, while_loading=lambda model, _: compile_programs(model, **call), **options
        )
        loaded = len(clock.names)  # several threads count programs
        ids = jaxllm.generate(model, **call).sequences
        generated = clock.names[loaded:]
    plain, _ = jaxllm.load(folder, **options)
    return loaded, generated, ids, jaxllm.generate(plain, **call).sequences


@pytest.mark.parametrize(
    ("name", "options", "fields"),
    [
        ("tiny-llama", {}, {}),
        ("tiny-llama", {"quantize": "int8"}, {"do_sample": True}),
        ("tiny-gpt2", {"param_dtype": "bfloat16"}, {"num_beams": 2}),
        ("tiny-t5", {}, {"repetition_penalty": 1.5}),
    ],
    ids=["llama", "int8", "beams", "t5"],
)
def test_generating_compiles_nothing_more(name, options, fields):
    loaded, generated, ids, expected = load_and_generate(REFERENCE / name, options, **fields)
    assert loaded >= 3
    assert generated == []
    np.testing.assert_array_equal(ids, expected)


@pytest.mark.ci
def test_the_bundled_model():
    loaded, generated, ids, expected = load_and_generate("smollm2")
    assert (loaded >= 3, generated) == (True, [])
    np.testing.assert_array_equal(ids, expected)


ON_A_MESH = """
import sys, numpy as np, jaxllm
sys.path.insert(0, sys.argv[2])
from test_while_loading import load_and_generate
mesh = jaxllm.make_mesh(data=2, fsdp=2, tensor=2)
loaded, generated, ids, expected = load_and_generate(sys.argv[1], {"mesh": mesh})
np.testing.assert_array_equal(ids, expected)
print(loaded >= 3, generated)
"""


def test_on_a_mesh():
    folder = Path(__file__).parent
    found = on_devices(ON_A_MESH, REFERENCE / "tiny-llama", folder)
    assert found.split() == ["True", "[]"]


def test_the_model_has_its_settings_and_no_weights():
    seen = []
    model, tokenizer = jaxllm.load(
        REFERENCE / "tiny-gpt2", while_loading=lambda *found: seen.append(found)
    )
    [(planned, same_tokenizer)] = seen
    assert same_tokenizer is tokenizer
    assert (planned.config, planned.card) == (model.config, model.card)
    assert jax.tree.structure(planned) == jax.tree.structure(model)
    for shape, weight in zip(jax.tree.leaves(planned), jax.tree.leaves(model), strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (shape.shape, shape.dtype) == (weight.shape, weight.dtype)


def test_errors():
    def fails(model, tokenizer):
        raise InputError("the prompt is too long")

    with pytest.raises(InputError, match="the prompt is too long"):
        jaxllm.load(REFERENCE / "tiny-gpt2", while_loading=fails)
    with pytest.raises(InputError, match="while_loading: expected a function"):
        jaxllm.load(REFERENCE / "tiny-gpt2", while_loading=3)
    with pytest.raises(InputError, match="while_loading: not with an adapter"):
        jaxllm.load(REFERENCE / "tiny-gpt2", adapter="a", while_loading=fails)
