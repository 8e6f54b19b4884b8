"""Models in a caller's own JAX: its default device, `jax.shard_map`, strict settings and guards."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from devices import on_devices
from jax.sharding import AxisType, PartitionSpec
from paths import DATA

import jaxllm
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.models.build_options import Options
from jaxllm.models.registry import FAMILIES
from jaxllm.planning import abstract_model, lower
from jaxllm.training.losses import loss_for
from jaxllm.training.state import TrainState
from jaxllm.training.step import make_train_step

SETTINGS = {
    "default_matmul_precision": "highest",
    "enable_x64": True,
    "numpy_rank_promotion": "raise",
    "numpy_dtype_promotion": "strict",
    "transfer_guard": "log",
    "debug_nans": True,
    "default_prng_impl": "rbg",
    "threefry_partitionable": False,
    "disable_jit": True,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_thread_has_the_settings_of_its_caller(name: str) -> None:
    found: list[Any] = []
    with getattr(jax, name)(SETTINGS[name]):
        expected = getattr(jax.config, f"jax_{name}")
        function = with_settings_of_this_thread(
            lambda: found.append(getattr(jax.config, f"jax_{name}"))
        )
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
    assert found == [expected] != [getattr(jax.config, f"jax_{name}")]


PLACES = """
import asyncio, sys
from pathlib import Path
import jax, jax.numpy as jnp
import jaxllm
from jaxllm.checkpoint import load_adapter, save_adapter
from jaxllm.generation.generate import compile_programs
from jaxllm.models.lora import add_lora
from jaxllm.serve import AsyncEngine
data, folder = Path(sys.argv[1]), Path(sys.argv[2])
second = jax.devices()[1]

def check(name, tree):
    places = {device for x in jax.tree.leaves(tree) for device in x.devices()}
    assert places == {second}, (name, places)

with jax.default_device(second), jax.transfer_guard_device_to_device("disallow"):
    llama = data / "reference" / "tiny-llama"
    model = jaxllm.load(llama)[0]
    check("load", model)
    check("from_pretrained", jaxllm.auto.AutoModelForCausalLM.from_pretrained(llama))
    for quantize in ("int8", "int4"):
        check(quantize, jaxllm.load(llama, quantize=quantize)[0])
    jaxllm.save_orbax(folder / "orbax", model)
    check("orbax", jaxllm.load_orbax(folder / "orbax")[0])
    for quantize in (None, "int8"):
        check("gguf", jaxllm.load(data / "gguf" / "llama.gguf", quantize=quantize)[0])
    save_adapter(folder / "adapter", add_lora(model))
    check("adapter", load_adapter(model, folder / "adapter"))
    check("merged adapter", jaxllm.load(llama, adapter=folder / "adapter")[0])
    seen = []
    jaxllm.load(llama, while_loading=lambda *_: seen.append(jnp.zeros(1)))
    check("while_loading", seen)
    ids = jnp.asarray([[5, 6, 7]])
    compile_programs(model, ids, max_new_tokens=3)
    model.generate(ids, max_new_tokens=3)
    jaxllm.BatchGenerator(model, None, slots=2, max_new_tokens=2).generate(
        [{"input_ids": [3, 4, 5]}] * 3)

    async def serve():
        async with AsyncEngine(model, slots=2, context=32) as engine:
            await engine.generate({"input_ids": [3, 4, 5], "max_new_tokens": 2})

    asyncio.run(serve())
print("placed")
"""


@pytest.mark.ci
def test_everything_is_placed_on_the_default_device(tmp_path: Path) -> None:
    assert "placed" in on_devices(PLACES, DATA, tmp_path, devices=2)


IN_SHARD_MAP = """
import os, sys
os.environ["JAXLLM_CPU_KERNELS"] = "1"
import jax, jax.numpy as jnp, numpy as np, tiny
from jax.sharding import AxisType, PartitionSpec
from jaxllm.models.quantize import quantize_model

mesh = jax.make_mesh((2,), ("x",), (AxisType.Auto,))
rows, whole = PartitionSpec("x"), PartitionSpec()

def logits(model, ids, labels):
    more = {"decoder_input_ids": labels} if model.is_encoder_decoder else {}
    return model(ids, **more).logits

def gradients(model, ids, labels):
    return jax.grad(lambda model: jnp.mean(jnp.square(logits(model, ids, labels))))(model)

def summed(model, ids, labels):
    # The model is the same on all devices, so its gradient is a sum over them.
    return jax.tree.map(lambda x: x / 2, gradients(model, ids, labels))

ids, labels = tiny.ids(4, 8), tiny.ids(4, 8, seed=1)
for name in sys.argv[1:]:
    family, _, quantized = name.partition("-")
    base = family if family in tiny.CONFIGS else "t5"
    model = tiny.make({**tiny.CONFIGS[base], "model_type": family})
    if quantized:
        model = quantize_model(model, quantized)
    def run(function, out):
        specs = {"in_specs": (whole, rows, rows), "out_specs": out}
        return jax.jit(jax.shard_map(function, mesh=mesh, **specs))(model, ids, labels)
    expected = jax.jit(logits)(model, ids, labels)
    np.testing.assert_allclose(run(logits, rows), expected, atol=1e-4, err_msg=name)
    # JAX 0.12 raises an error for the gradient of its own erf in a shard_map that checks axes.
    has_erf = " erf" in str(jax.make_jaxpr(logits)(model, ids, labels))
    if quantized or (has_erf and jax.__version_info__ >= (0, 12)):
        continue
    actual, expected = run(summed, whole), jax.jit(gradients)(model, ids, labels)
    scale = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-4 * scale, err_msg=name)
    print(name)
"""


@pytest.mark.parametrize(
    "families",
    [
        ("llama",),
        pytest.param(("t5",), marks=pytest.mark.ci),
        *(pytest.param((*FAMILIES,)[i::4], marks=pytest.mark.ci) for i in range(4)),
        pytest.param(("llama-int8", "t5-int4", "llama-int4"), marks=pytest.mark.ci),
    ],
    ids=lambda families: families[0] if len(families) == 1 else f"{families[0]}_and_others",
)
def test_families_run_in_shard_map(families: tuple[str, ...]) -> None:
    on_devices(IN_SHARD_MAP, *families, devices=2)


@pytest.mark.by_default("True-same")
@pytest.mark.parametrize("rows", [PartitionSpec(), PartitionSpec("x")], ids=["same", "varying"])
@pytest.mark.parametrize("checked", [True, False])
def test_kernels_of_a_tpu_in_shard_map(checked: bool, rows: PartitionSpec) -> None:
    """JAX refuses its kernels where it checks over which axes arrays vary, even if none does."""
    options = Options(attn_implementation="splash", platform="tpu")
    model = tiny.make(
        tiny.CONFIGS["mixtral"] | {"num_hidden_layers": 1, "max_position_embeddings": 128},
        options=options,
    )
    specs = {"in_specs": (PartitionSpec(), rows), "out_specs": rows, "check_vma": checked}
    mesh = jax.make_mesh((1,), ("x",), (AxisType.Auto,))
    run = jax.shard_map(lambda model, ids: model(ids).logits, mesh=mesh, **specs)
    program = str(jax.make_jaxpr(run)(model, jnp.ones((1, 128), jnp.int32)))
    assert ("pallas_call" in program) != checked


STRICT_CALLS = [
    *itertools.product(
        ("llama", "gpt2", "t5", "bart", "gemma2", "bloom", "xglm"),
        ("greedy", "sample", "beams", "train"),
    ),
    *itertools.product(["llama"], ("lookup", "early_exit", "groups", "constraints")),
]


@pytest.mark.by_default("llama-greedy", "llama-lookup", "t5-train")
@pytest.mark.parametrize(("family", "call"), STRICT_CALLS, ids=map("-".join, STRICT_CALLS))
def test_strict_settings(family: str, call: str) -> None:
    model = tiny.make(family)
    ids = jnp.asarray(tiny.ids(2, 5))
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        if call == "train":
            optimizer = optax.adamw(1e-3)
            step = make_train_step(optimizer, loss_for(model, label_smoothing=0.1))
            batch = {"input_ids": ids, "labels": ids}
            _, metrics = step(TrainState.create(model, optimizer), batch)
            loss = model(ids, labels=ids).loss
            assert np.isfinite([metrics["loss"], loss]).all()
            return
        options = {
            "greedy": {},
            "sample": {"do_sample": True, "top_k": 5, "top_p": 0.9, "temperature": 0.8, "key": 0},
            "beams": {"num_beams": 3, "repetition_penalty": 1.1},
            "lookup": {"prompt_lookup_num_tokens": 3},
            "early_exit": {"assistant_early_exit": 1, "do_sample": True, "key": 0},
            "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
            "constraints": {"num_beams": 3, "force_words_ids": [[7]]},
        }[call]
        strict = model.generate(ids, max_new_tokens=4, **options).sequences
    free = model.generate(ids, max_new_tokens=4, **options).sequences
    np.testing.assert_array_equal(strict, free)


@pytest.mark.by_default("llama-int4", "mixtral")
@pytest.mark.parametrize("case", [*tiny.CONFIGS, "llama-int8", "llama-int4"])
def test_families_are_traced_in_strict_settings(case: str) -> None:
    """In bfloat16, whose products with float32 JAX then refuses. The trace has all platforms."""
    family, _, quantize = case.partition("-")
    model = abstract_model(tiny.CONFIGS[family], dtype="bfloat16", quantize=quantize or None)
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        lower(model, "decode", batch=2, prompt=8, new=4)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_generate_transfers_nothing_implicitly(family: str) -> None:
    model, ids = tiny.make(family), jnp.asarray(tiny.ids(2, 5))
    expected = model.generate(ids, max_new_tokens=4).sequences
    mask = jnp.ones_like(ids)
    with jax.transfer_guard("disallow"):
        guarded = model.generate(ids, attention_mask=mask, max_new_tokens=4)
        chunks = []
        for chunk in jaxllm.stream(model, ids, attention_mask=mask, max_new_tokens=4, chunk_size=2):
            chunks.append(chunk)
            with pytest.raises(Exception, match="Disallowed host-to-device"):
                jnp.sin(np.ones(3, np.float32))
    np.testing.assert_array_equal(guarded.sequences, expected)
    new = np.asarray(expected)[:, -np.concatenate(chunks, axis=1).shape[1] :]
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), new)
