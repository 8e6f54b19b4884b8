"""Programs for TPUs and GPUs: no loop inside a decode step, no copy of the cache, no T x T.

Their lowered text is read everywhere. Where their compilers are installed (the extras plan-tpu and
plan-gpu), so is what these make of it.
"""

from __future__ import annotations

import importlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from test_plan import needs_gpu, needs_tpu

import jaxllm
from jaxllm.nn.platform.training import MAX_LOGITS
from jaxllm.planning import find_topology, hlo, lower
from jaxllm.planning.plan import plan_program, topology_mesh

TOPOLOGIES = [
    pytest.param("v5e:2x2", marks=needs_tpu),
    pytest.param("h100", marks=needs_gpu),
]
MOST_KERNELS = {"gpt2": 44 if jax.__version_info__ < (0, 12) else 48, "llama": 49, "t5": 55}
"""Of a decode step on an H100: two layers, and what comes before and after them. XLA of jaxlib 0.12
fuses less of GPT-2's."""
LENGTH = 600
"""More than the 256 queries of a block of attention, times the heads that share keys."""
VOCAB = 1 << 17
"""So many that the logits of 2 x 600 tokens are computed in chunks, of 16 x 600 on a GPU."""
LONG: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1, "max_position_embeddings": 2048, "vocab_size": VOCAB},
    "gpt2": {"n_layer": 1, "n_positions": 2048},
}


@pytest.mark.ci
@pytest.mark.parametrize(
    ("platform", "family"),
    [("tpu", "llama"), ("cuda", "gpt2"), pytest.param("tpu", "t5", marks=pytest.mark.slow)],
)
def test_lowered_decode_steps(platform: str, family: str, monkeypatch: Any) -> None:
    """The loop over tokens is the only one, and no array of keys or values is transposed."""
    target = importlib.import_module("jaxllm.planning.topology")
    slot_programs = importlib.import_module("jaxllm.batch.slots")
    monkeypatch.setattr(target, "platform_of", lambda device: platform)
    monkeypatch.setattr(slot_programs, "platform_of_arrays", lambda tree: platform)
    model = tiny.cached(family)
    (decode,) = lower(model, "decode", batch=3, prompt=16, new=48)
    programs = [decode, lower(model, "batch", prompt=16, new=48, slots=3)[0]]
    for program in programs:
        text = program.lowered.as_text()
        assert text.count("stablehlo.while") == 1
        sizes = {size for _, size in program.cache_arrays}
        operands = re.findall(r"stablehlo.transpose.*: \(tensor<([\dx]+)x\w+>\)", text)
        assert not sizes & {size_of(shape) for shape in operands}


def size_of(shape: str) -> int:
    size = 1
    for length in shape.split("x"):
        size *= int(length)
    return size


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_compiled_decode_steps(topology: str, family: str) -> None:
    found = jaxllm.plan(
        tiny.CONFIGS[family],
        topology,
        program=("decode", "batch"),
        batch=8,
        prompt=16,
        new=32,
        slots=8,
    )
    decode, step, _ = found.programs
    assert (decode.name, step.name) == ("decode", "batch.decode")
    assert decode.inner_loops == step.inner_loops == 0
    if family != "t5":  # fewer slots than lanes: docs/decisions/tpu-decode-step.md
        assert decode.cache_copies == step.cache_copies == 0
    if topology == "h100":
        assert max(decode.kernels, step.kernels) <= MOST_KERNELS[family]


WIDE_ROWS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": (
        "num_hidden_layers",
        {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8},
        16,
    ),
    "gpt2": ("n_layer", {"n_embd": 1600, "n_head": 25}, 12),
}
"""Family -> field of the number of layers, sizes, and most kernels of a layer for one row."""


STEP_KERNELS: dict[str, tuple[str, dict[str, Any], int]] = {
    "llama": (*WIDE_ROWS["llama"][:2], 11),
    "gpt2": ("n_layer", {"n_embd": 1600, "n_head": 25, "n_positions": 128}, 10),
    "t5": (
        "num_decoder_layers",
        {"d_model": 2048, "d_kv": 64, "num_heads": 32, "d_ff": 5120, "num_layers": 1},
        17,
    ),
}
"""As `WIDE_ROWS`, with the kernel of attention and for 64 rows."""


@needs_gpu
@pytest.mark.parametrize("family", tuple(WIDE_ROWS))
def test_norms_of_a_single_row_are_few_kernels_on_a_gpu(family: str) -> None:
    """The sum of a row is in the kernel before it. It was one of its own, 18 and 13 in all."""
    depth, sizes, most = WIDE_ROWS[family]

    def kernels(layers: int) -> int:
        config = tiny.CONFIGS[family] | sizes | {depth: layers}
        options = {"program": "decode", "batch": 1, "prompt": 16, "new": 16, "dtype": "bfloat16"}
        (decode,) = jaxllm.plan(config, "h100", **options).programs
        return decode.kernels

    assert kernels(3) - kernels(1) <= 2 * most


@needs_gpu
@pytest.mark.parametrize("family", tuple(STEP_KERNELS))
def test_a_step_with_a_kernel_of_attention_is_few_kernels_on_a_gpu(family: str) -> None:
    """Mosaic compiles it for the GPU. It writes into the cache, which is not copied."""
    depth, sizes, most = STEP_KERNELS[family]

    def decode(layers: int) -> Any:
        config = tiny.CONFIGS[family] | sizes | {depth: layers}
        options = {"program": "decode", "batch": 64, "prompt": 64, "new": 64, "dtype": "bfloat16"}
        return jaxllm.plan(config, "h100", **options, attn_implementation="mosaic").programs[0]

    small, large = decode(1), decode(3)
    assert large.kernels - small.kernels <= 2 * most
    assert large.cache_copies == 0


@needs_tpu
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_a_tpu_decodes_one_row_as_fast_as_eight(quantize: str | None) -> None:
    """It took three to six times as long on the vector unit."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 32000}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}

    def step_us(rows: int) -> float:
        (decode,) = jaxllm.plan(
            tiny.CONFIGS["llama"] | sizes | heads,
            "v5e:2x2",
            program="decode",
            batch=rows,
            prompt=16,
            new=16,
            dtype="bfloat16",
            quantize=quantize,
        ).programs
        assert decode.estimated_step_us is not None
        return decode.estimated_step_us

    assert step_us(1) < 1.3 * step_us(8)


@needs_tpu
def test_a_tpu_decodes_wide_feed_forward_layers_as_fast_as_it_reads_them() -> None:
    """Inside of the product that reads them, the features took up to twice as long."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 1024}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = tiny.CONFIGS["llama"] | sizes | heads
    options = {"program": "decode", "batch": 8, "prompt": 16, "new": 16, "dtype": "bfloat16"}
    (decode,) = jaxllm.plan(config, "v5e:2x2", **options).programs
    assert decode.estimated_step_us is not None
    assert decode.estimated_step_us < 1.25 * decode.floor_step_us


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("family", tuple(LONG))
def test_compiled_training_steps_and_prefills_hold_no_array_of_tokens_x_tokens_or_vocabulary(
    topology: str, family: str
) -> None:
    config = tiny.CONFIGS[family] | LONG[family]
    device = find_topology(topology).devices[0]
    rows = 16 if topology == "h100" else 2

    def squares(implementation: str) -> set[str]:
        model = jaxllm.planning.abstract_model(
            config, device=device, attn_implementation=implementation
        )
        found = set()
        for name in ("train", "prefill"):
            (program,) = lower(model, name, batch=rows, prompt=LENGTH, new=8)
            text = program.compile().as_text()
            assert text is not None
            types = [x for line in text.split("\n") for x in hlo.array_types(line)]
            # Kernels pad the tokens to tiles. Other long sides are parts of the vocabulary's.
            tokens = range(LENGTH, LENGTH + 128)
            found |= {str(x.shape) for x in types if sum(n in tokens for n in x.shape) > 1}
            whole = rows * LENGTH * VOCAB
            found |= {str(x) for x in types if x.dtype == "float32" and x.size >= whole}
        return found

    assert squares("auto") == set()
    assert squares("eager") != set()


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize(
    ("family", "more"), [("llama", {"max_position_embeddings": 256}), ("t5", {})]
)
def test_a_forward_pass_compiles_in_shard_map(topology: str, family: str, more: Any) -> None:
    """Long enough for JAX's kernels of attention, which it refuses there."""
    mesh = Mesh(np.array(find_topology(topology).devices[:2]), ("x",), axis_types=(AxisType.Auto,))
    model = jaxllm.planning.abstract_model(tiny.CONFIGS[family] | more, device=mesh.devices[0])
    ids = jax.ShapeDtypeStruct((2, 256), jnp.int32)

    def logits(model: Any, ids: jax.Array) -> jax.Array:
        targets = {"decoder_input_ids": ids} if model.is_encoder_decoder else {}
        return model(ids, **targets).logits

    for rows in (PartitionSpec("x"), PartitionSpec()):
        specs = {"in_specs": (PartitionSpec(), rows), "out_specs": rows}
        shardings = [NamedSharding(mesh, spec) for spec in specs["in_specs"]]
        arguments = (
            jax.tree.map(lambda x, to=to: x.update(sharding=to), tree)
            for tree, to in zip((model, ids), shardings, strict=True)
        )
        jax.jit(jax.shard_map(logits, mesh=mesh, **specs)).lower(*arguments).compile()


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_a_training_step_updates_its_state_in_place(topology: str) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 2}
    config = tiny.CONFIGS["llama"] | sizes
    (step,) = jaxllm.plan(config, topology, program="train", batch=1, prompt=16).programs
    # The gradients, and little else: moments and parameters have two more copies of each weight.
    assert step.temp_bytes is not None
    assert step.temp_bytes < 1.3 * step.weight_bytes


@needs_gpu
def test_a_training_step_of_a_gpu_has_no_loop() -> None:
    """Neither over chunks of the logits, if they take less than 2 GiB, nor around the update, of
    which the host would read the condition."""
    config = tiny.CONFIGS["llama"] | LONG["llama"]
    options = {"program": "train", "batch": 4, "prompt": LENGTH, "dtype": "bfloat16"}
    (step,) = jaxllm.plan(config, "h100", **options).programs
    assert 4 * LENGTH * VOCAB > MAX_LOGITS
    assert step.inner_loops == 0


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_remat_takes_less_memory(topology: str) -> None:
    sizes = {"num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 1024}
    config = tiny.CONFIGS["llama"] | sizes | {"max_position_embeddings": 512}
    temporary = [
        jaxllm.plan(config, topology, program="train", batch=8, prompt=512, remat=remat)
        .programs[0]
        .temp_bytes
        for remat in (False, True)
    ]
    assert temporary[1] < 0.7 * temporary[0]


@needs_tpu
@pytest.mark.parametrize(("remat", "kernels"), [(False, 3), ("dots", 3), ("full", 4)])
def test_remat_by_dots_keeps_what_the_kernel_of_a_tpu_returns(remat: Any, kernels: int) -> None:
    """A layer runs one kernel forward and two backward, and with "full" the first one twice."""
    mesh = topology_mesh(find_topology("v5e:2x2"), {"fsdp": 2, "tensor": 2})
    model = jaxllm.planning.abstract_model(tiny.CONFIGS["llama"], mesh=mesh, remat=remat)
    (program,) = lower(model, "train", batch=4, prompt=256)
    text = program.compile().as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 2 * kernels


@pytest.mark.by_default("v5e:2x4")
@pytest.mark.parametrize(
    "topology",
    [pytest.param("v5e:2x4", marks=needs_tpu), pytest.param("h100:8", marks=needs_gpu)],
)
def test_a_training_step_returns_the_state_in_its_shards(topology: str) -> None:
    """The compiler of GPUs returned it whole on every device where nothing was said."""
    found = find_topology(topology)
    mesh = topology_mesh(found, {"fsdp": 8})
    # Large enough for the state to be more than the program's code.
    sizes = {"hidden_size": 512, "intermediate_size": 2048}
    model = jaxllm.planning.abstract_model(tiny.CONFIGS["llama"] | sizes, mesh=mesh)
    (program,) = lower(model, "train", batch=8, prompt=16)
    compiled = program.compile()
    state, _ = compiled.output_shardings
    sharded = [x for x in jax.tree.leaves(state) if "fsdp" in str(x.spec)]
    assert len(sharded) >= 3 * 2 * 7  # parameters and both moments of the matrices of two layers
    plan = plan_program(program, found.chip)
    assert plan.peak_bytes < 2 * (plan.argument_bytes + plan.temp_bytes)


QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,  # of 48
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


@needs_tpu
def test_experts_are_computed_by_the_kernel_of_a_tpu() -> None:
    """Three products a layer, whose experts stay in their shards."""
    found = find_topology("v5e:2x4")
    mesh = topology_mesh(found, {"fsdp": 2, "tensor": 4})
    model = jaxllm.planning.abstract_model(QWEN3_30B_A3B, mesh=mesh)
    (decode,) = lower(model, "decode", batch=64, prompt=512, new=128)
    text = decode.compile().as_text()
    assert text is not None
    assert len(re.findall(r'custom_call_target="tpu_custom_call"', text)) == 3 * 2
    own = 128 * 2048 * 768 // 8
    types = [x for line in text.split("\n") for x in hlo.array_types(line)]
    assert any(is_experts(x, own) for x in types)
    assert not any(is_experts(x, 2 * own) for x in types)
    plan = plan_program(decode, found.chip)
    assert plan.fits
    assert plan.cache_copies == 0


def is_experts(x: hlo.ArrayType, size: int) -> bool:
    """True for an array of so many numbers, or more, of a layer's experts: a device has a part of
    their 768 features."""
    return x.size >= size and x.size % (64 * 192 * 2048) == 0 and bool({192, 768} & {*x.shape})
