"""Models with joined projections: the same numbers, in fewer products, and their layers again."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from devices import on_devices
from paths import DATA

import jaxllm
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError
from jaxllm.generation import compile_programs
from jaxllm.models import join_projections, quantize_model, split_projections
from jaxllm.models.lora import LoraConfig, add_lora, lora_layers
from jaxllm.models.weights import is_joined, parameters


def copied(model: Any) -> Any:
    """A model with arrays of its own, which `join_projections` may delete."""
    return jax.tree.map(lambda x: x.copy(), model).with_card(model.card)


@pytest.mark.by_default("qwen2")
@pytest.mark.parametrize("family", tiny.CONFIGS)
def test_numbers_and_layers_are_those_of_the_model(family: str) -> None:
    model = tiny.cached(family)
    expected = tiny.logits(model)
    assert expected.std() >= 1
    joined = join_projections(copied(model))
    assert any(is_joined(path) for path in parameters(joined))
    np.testing.assert_allclose(tiny.logits(joined), expected, atol=1e-5 * expected.std())
    again = split_projections(joined)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    for path, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(model)[path], err_msg=path)


def test_projections_of_one_input_are_one_product() -> None:
    def products(model: Any) -> int:
        call = jax.jit(lambda model, ids: model(ids).logits)
        return call.lower(model, tiny.ids()).compile().as_text().count("__call__)/dot_general")

    model = tiny.cached("llama")
    apart, joined = products(model), products(join_projections(copied(model)))
    assert joined < apart


def test_the_weights_are_used_up() -> None:
    model = copied(tiny.cached("llama"))
    join_projections(model)
    gone = {
        path.rpartition(".blocks.0.")[2] for path, x in parameters(model).items() if x.is_deleted()
    }
    expected = {"attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up"}
    assert {path for path in gone if "blocks" not in path} == {f"{x}.weight" for x in expected}


def test_it_decodes_as_the_model_does() -> None:
    for family in ("llama", "t5"):
        model = tiny.cached(family)
        options = {"max_new_tokens": 8, "num_beams": 2}
        expected = jaxllm.generate(model, tiny.ids(2, 5), **options).sequences
        joined = join_projections(copied(model))
        np.testing.assert_array_equal(
            jaxllm.generate(joined, tiny.ids(2, 5), **options).sequences, expected
        )


def test_programs_that_are_compiled_while_loading_are_those_of_joined_projections() -> None:
    call = {"input_ids": tiny.ids(1, 5), "max_new_tokens": 5, "eos_token_id": None}

    def compile_joined(model: Any, _: Any) -> None:
        compile_programs(join_projections(model), **call)

    model, _ = jaxllm.load(DATA / "reference" / "tiny-llama", while_loading=compile_joined)
    joined = join_projections(model)
    with contextlib.closing(CompileClock()) as clock:
        jaxllm.generate(joined, **call)
        assert clock.programs == 0


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantized_weights(name: str) -> None:
    """Rows are quantized one by one, so that joining them first changes no number."""
    quantized = quantize_model(tiny.cached("llama"), name)
    assert not any(map(is_joined, parameters(join_projections(quantized))))
    joined = quantize_model(join_projections(copied(tiny.cached("llama"))), name)
    np.testing.assert_allclose(tiny.logits(joined), tiny.logits(quantized), rtol=1e-4, atol=1e-4)
    with pytest.raises(InputError, match="split_projections: joined weights are quantized"):
        split_projections(joined)


def test_layers_with_lora_stay_apart() -> None:
    model = copied(add_lora(tiny.cached("llama"), LoraConfig(targets="attn.q")))
    joined = join_projections(model)
    assert len(lora_layers(joined)) == 2
    paths = {path for path in parameters(joined) if is_joined(path)}
    assert {path.rpartition(".blocks.0.")[2] for path in paths if ".0." in path} == {
        "mlp.gate_up.weight"
    }


def test_what_needs_the_usual_layers_says_so(tmp_path: Any) -> None:
    joined = join_projections(copied(tiny.cached("llama")))
    for refuse in (
        add_lora,
        lambda model: jaxllm.save_hf(tmp_path / "hf", model),
        lambda model: jaxllm.save_orbax(tmp_path / "orbax", model),
    ):
        with pytest.raises(InputError, match=r"projections are joined .* call split_projections"):
            refuse(joined)
    assert not list(tmp_path.glob("*/*"))
    jaxllm.save_hf(tmp_path / "hf", split_projections(joined))


MESH = """
import jax, numpy as np
import tiny, tiny_meshes
import jaxllm
from jaxllm.models import join_projections, split_projections
from jaxllm.models.weights import is_joined, parameters
from jaxllm.parallel.placement import put_tree
from jaxllm.parallel.sharding import parameter_sharding, use_mesh
from jaxllm.planning import hlo

def collectives(model, mesh):
    call = jax.jit(lambda model, ids: model(ids).logits)
    with use_mesh(mesh):
        module = hlo.Module.parse(call.lower(model, tiny.ids(8)).compile().as_text())
    return hlo.collectives(module, module.entry)

for family in ("llama", "gpt2", "t5"):
    model = tiny_meshes.make(family)
    mesh = tiny_meshes.mesh(data=4, tensor=2)
    there = put_tree(model, mesh)
    expected = jaxllm.generate(model, tiny.ids(8, 5), max_new_tokens=8).sequences
    apart = collectives(there, mesh) if family == "llama" else None
    joined = join_projections(there)
    for path, x in parameters(joined).items():
        assert x.sharding == parameter_sharding(path, x.shape, mesh), path
        assert not is_joined(path) or x.addressable_shards[0].data.size == x.size // 2
    found = jaxllm.generate(joined, tiny.ids(8, 5), max_new_tokens=8).sequences
    np.testing.assert_array_equal(found, expected, err_msg=family)
    assert apart is None or collectives(joined, mesh) <= apart
    for path, x in parameters(split_projections(joined)).items():
        np.testing.assert_array_equal(x, parameters(model)[path], err_msg=path)
fsdp = put_tree(tiny_meshes.make("llama"), tiny_meshes.mesh(fsdp=8))
assert join_projections(fsdp) is fsdp
print("done")
"""


@pytest.mark.ci
def test_each_device_has_its_shard_of_every_projection() -> None:
    on_devices(MESH)
