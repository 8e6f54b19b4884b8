"""`plan` and `lower`: the library's own programs, on abstract models, meshes and topologies."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import types
import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny
from devices import on_devices
from paths import ROOT

import jaxllm
from jaxllm.cli.plan import _parser
from jaxllm.common.errors import (
    ConfigError,
    InputError,
    MissingExtraError,
    MissingFileError,
    UnsupportedError,
)
from jaxllm.generation.call import prepare
from jaxllm.generation.call.prepare import prepare_call
from jaxllm.planning import LoweredProgram, abstract_model, hlo, lower
from jaxllm.planning.plan import floor_us, plan_program, times_of
from jaxllm.planning.topology import CHIPS, chip_and_count, find_topology

SMALL = {"batch": 2, "prompt": 5, "new": 6, "slots": 4}
FIELDS = (
    "name",
    "mesh",
    "rows",
    "tokens",
    "weight_bytes",
    "cache_bytes",
    "argument_bytes",
    "temp_bytes",
    "peak_bytes",
    "fits",
    "estimated_step_us",
    "floor_step_us",
    "inner_loops",
    "cache_copies",
    "kernels",
    "collectives",
    "collective_bytes",
    "collective_us",
    "series_step_us",
    "overlapped_step_us",
    "mfu",
    "overlapped_mfu",
    "uncosted",
    "branch_us",
    "compile_seconds",
)


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def needs(compiler: str, module: str) -> pytest.MarkDecorator:
    """Skips a test where a compiler is not installed, unless `make test-compilers` says it is."""
    missing = not installed(module) and os.environ.get("JAXLLM_TEST_COMPILER") != compiler
    return pytest.mark.skipif(missing, reason=f"{module} is not installed")


needs_tpu = needs("tpu", "libtpu")
needs_gpu = needs("gpu", "jax_plugins.xla_cuda12")


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_lowered_programs_are_those_that_generate_runs(family: str) -> None:
    model = tiny.cached(family)
    ids = tiny.ids(SMALL["batch"], SMALL["prompt"])
    keywords = {"max_new_tokens": SMALL["new"], "do_sample": False}
    call = prepare_call(model, ids, None, None, 0, keywords)
    bare = call.model
    prefill, decode = (lower(model, name, **SMALL)[0].compile() for name in ("prefill", "decode"))
    # A compiled program refuses arguments of other shapes, dtypes or structure.
    state = prefill(call.strategy, bare, call.inputs, call.settings)
    limit = np.int32(call.request.max_length)
    state = decode(call.strategy, bare, state, call.settings, limit)
    expected = jaxllm.generate(model, ids, **keywords).sequences
    np.testing.assert_array_equal(state.sequences[:, : expected.shape[1]], expected)


@pytest.fixture(scope="module")
def llama() -> Any:
    return jaxllm.planning.abstract_model(tiny.CONFIGS["llama"], dtype="float32")


def test_an_abstract_model_has_the_shapes_of_a_real_one(llama: Any) -> None:
    real = tiny.cached("llama")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (llama, real), is_leaf=is_array)
    assert jax.tree.leaves(shapes[0]) == jax.tree.leaves(shapes[1])
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(llama))


def is_array(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct | jax.Array)


def test_an_abstract_model_of_a_gguf_header(smollm2_gguf: Path) -> None:
    model = jaxllm.planning.abstract_model(smollm2_gguf)
    assert sum(x.size for x in jax.tree.leaves(model)) == 134_515_008


@pytest.mark.ci
@pytest.mark.parametrize("family", tiny.mostly("llama"))
def test_costs_of_all_programs(family: str) -> None:
    actual = jaxllm.plan(tiny.CONFIGS[family], "cpu", dtype="float32", **SMALL)
    by_name = {program.name: program for program in actual.programs}
    assert list(by_name) == ["decode", "prefill", "batch.decode", "batch.prefill", "train"]
    weights = sum(x.nbytes for x in jax.tree.leaves(tiny.cached(family)))
    assert {program.weight_bytes for program in actual.programs} == {weights}
    for program in actual.programs:
        assert program.peak_bytes >= program.argument_bytes + program.temp_bytes > 0
        assert program.kernels > 0
        assert program.collectives == program.collective_bytes == 0
        assert (program.fits, program.estimated_step_us, program.floor_step_us) == (None,) * 3
    assert by_name["decode"].cache_copies == by_name["batch.decode"].cache_copies == 0
    if family != "t5":  # two rows of 16 + 16 slots, or four slots of 16 columns, and counters
        cache = tiny.cached(family).init_cache(2, 32)
        keys_and_values = sum(x.nbytes for x in jax.tree.leaves(cache.layers))
        assert 0 < by_name["decode"].cache_bytes - keys_and_values < 100
        assert 0 < by_name["batch.decode"].cache_bytes - keys_and_values < 200
    assert by_name["train"].cache_bytes == 0
    assert by_name["train"].argument_bytes > 3 * weights  # with Adam's moments


@pytest.mark.ci
@pytest.mark.parametrize("family", ["llama", "t5"])
def test_the_prefill_of_slots(family: str) -> None:
    """A chunk of a prompt beside the slots, or whole prompts into them."""
    sizes = {"prompt": 40, "new": 10, "slots": 4, "dtype": "float32", "program": "batch"}
    decode, prefill = jaxllm.plan(tiny.CONFIGS[family], "cpu", **sizes).programs
    is_chunk = family == "llama"
    assert (decode.tokens, prefill.tokens) == (4, 64 if is_chunk else 40)
    assert (decode.rows, prefill.rows) == (4, 1)
    for program, other in [(decode, prefill), (prefill, decode)]:
        own = program.argument_bytes + program.temp_bytes
        assert program.peak_bytes >= own + other.cache_bytes * is_chunk


def test_this_machine_s_memory_is_no_limit(monkeypatch: Any) -> None:
    monkeypatch.setattr(prepare, "total_memory", lambda devices: 0)
    raw = tiny.CONFIGS["gpt2"] | {"n_positions": 4096}
    (program,) = lower(abstract_model(raw), "decode", batch=32, prompt=1000, new=1000)
    assert program.cache_bytes > 1e6


@pytest.mark.ci
def test_the_floor_counts_the_weights_that_a_step_reads() -> None:
    """T5 without its encoder and the cross-attention's projections of keys; rows of a table."""
    model = tiny.cached("t5")
    decode, prefill = (lower(model, name, **SMALL)[0] for name in ("decode", "prefill"))
    blocks = model.decoder.blocks
    of_prefill = [model.encoder, *(x for block in blocks for x in (block.cross.k, block.cross.v))]
    table = model.shared.weight.size
    shared_rows = model.config.d_model * SMALL["batch"]  # one token of each row
    unread = sum(x.size for x in jax.tree.leaves(of_prefill)) + table - shared_rows
    bias = model.decoder.position_bias[0].table.weight.size  # all of it, for the keys' distances
    assert 0 <= decode.weight_bytes - 4 * unread - decode.read_weight_bytes <= 4 * bias
    assert decode.argument_weight_bytes < prefill.argument_weight_bytes == prefill.weight_bytes
    tied = lower(tiny.make("llama", tie_word_embeddings=True), "decode", **SMALL)[0]
    assert tied.read_weight_bytes == tied.weight_bytes


MESH = """
import json, sys, tiny, jaxllm
sizes = {"batch": 4, "prompt": 5, "new": 6, "slots": 4}
for mesh in ({"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}):
    found = jaxllm.plan(tiny.CONFIGS["llama"], "cpu", mesh=mesh, dtype="float32", **sizes)
    for p in found.programs:
        print(found.devices, p.name, p.weight_bytes, p.cache_bytes, p.collectives)
try:
    jaxllm.plan(tiny.CONFIGS["llama"], "cpu", mesh={"data": 16}, program="decode")
except jaxllm.JaxLLMError as error:
    print(error)
"""


@pytest.mark.slow
def test_meshes_over_the_first_devices() -> None:
    *lines, error = on_devices(MESH).splitlines()
    rows = [line.split() for line in lines]
    assert [row[0] for row in rows] == ["8"] * 10  # of the topology, not of the mesh
    full = sum(x.nbytes for x in jax.tree.leaves(tiny.cached("llama")))
    assert all(0.5 <= int(row[2]) / full < 0.6 for row in rows[:5])
    assert all(0.25 <= int(row[2]) / full < 0.4 for row in rows[5:])
    assert int(rows[5][3]) < int(rows[0][3]) / 2  # rows of the cache are sharded too
    assert all(int(row[4]) > 0 for row in rows)
    assert (
        error == "mesh: data=16 makes 16 devices, but topology cpu has 8; choose a larger topology"
    )


def test_an_unknown_topology_and_a_compiler_that_is_missing(monkeypatch: Any) -> None:
    config = tiny.CONFIGS["llama"]
    with pytest.raises(UnsupportedError, match="topology: unknown 'v9:2x2'; known: v5e:2x4"):
        jaxllm.plan(config, "v9:2x2")
    with pytest.raises(UnsupportedError, match="expected the sizes of a slice, such as v5e:2x4"):
        jaxllm.plan(config, "v5e")
    with pytest.raises(UnsupportedError, match="expected h100 or a number of them"):
        jaxllm.plan(config, "h100:2x2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for topology, package in (("v5e:2x2", "libtpu"), ("h100", "jax-cuda12-plugin")):
        extra = "plan-tpu" if package == "libtpu" else "plan-gpu"
        with pytest.raises(MissingExtraError, match=rf"{package}: pip install .*\[{extra}\]'"):
            jaxllm.plan(config, topology)


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"config.json: no such file; give a folder with"):
        jaxllm.plan(tmp_path, "cpu")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 0}')
    with pytest.raises(ConfigError, match=r"config.json: .*vocab_size"):
        jaxllm.plan(tmp_path, "cpu")
    config = tiny.CONFIGS["llama"]
    with pytest.raises(InputError, match="mesh: tensor=4 makes 4 devices, but topology cpu has 1"):
        jaxllm.plan(config, "cpu", mesh={"tensor": 4})
    with pytest.raises(InputError, match="mesh: unknown axis 'pipe'"):
        jaxllm.plan(config, "cpu", mesh={"pipe": 1})
    with pytest.raises(InputError, match="slots: expected an integer from 1 to 1048576, found 0"):
        jaxllm.plan(config, "cpu", slots=0)
    with pytest.raises(InputError, match="program: unknown 'score'"):
        jaxllm.plan(config, "cpu", program="score")
    for dtype in ("int8", None, np.float32(2.0)):
        with pytest.raises(UnsupportedError, match="dtype: expected float32, bfloat16 or float16"):
            jaxllm.plan(config, "cpu", dtype=dtype)
    for argument, value, why in (
        ("mesh", 3, "mesh: expected sizes of axes"),
        ("mesh", [], "mesh: expected sizes of axes"),
        ("program", 3, "program: expected a list"),
        ("program", [], "program: expected one or several of decode"),
        ("program", [[]], r"program: unknown \[\]"),
        ("progress", "rich", "progress: expected a function"),
        ("quantize", ["int8"], "quantize: expected a name or None"),
        ("quantize", "keep", "quantize: unknown 'keep'; known: int8, int4$"),
        ("scan_layers", "no", "scan_layers: expected True or False"),
        ("remat", True, "remat: has an effect on a training step only"),
    ):
        with pytest.raises(InputError, match=why):
            jaxllm.plan(config, "cpu", **{"program": "decode", argument: value})
    with pytest.raises(InputError, match="max_new_tokens: leave it out; `new` is the number"):
        lower(abstract_model(config), max_new_tokens=3)
    with pytest.raises(InputError, match="model: expected a model, found llama"):
        jaxllm.planning.lower("llama")
    with pytest.raises(InputError, match="devices: expected devices of JAX"):
        jaxllm.make_mesh(devices=["cpu"])
    with pytest.raises(InputError, match="positions"):
        jaxllm.plan(tiny.CONFIGS["gpt2"], "cpu", program="decode", prompt=60, new=60)


@pytest.mark.parametrize(
    "fields",
    [
        {"guidance_scale": 2.0},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    ],
    ids=["guidance", "contrastive", "groups"],
)
def test_rows_without_slots_have_no_programs_of_slots(fields: dict[str, Any]) -> None:
    model = abstract_model(tiny.CONFIGS["llama"])
    with pytest.raises(UnsupportedError, match=rf"\({', '.join(sorted(fields))}\).*plan decode"):
        lower(model, "batch", **SMALL, **fields)


def test_cudnn_is_for_gpus() -> None:
    with pytest.raises(UnsupportedError, match="cudnn is a kernel for GPUs, and this runs on cpu"):
        jaxllm.plan(
            tiny.CONFIGS["llama"], "cpu", program="prefill", attn_implementation="cudnn", **SMALL
        )


class Refused:
    """A lowered program that its compiler refuses, with libtpu's words."""

    def compile(self) -> None:
        raise jax.errors.JaxRuntimeError(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory "
            "space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."
        )


def test_a_program_that_the_compiler_refuses_does_not_fit() -> None:
    program = LoweredProgram("decode", Refused(), True, 100, 100, 10)  # type: ignore[arg-type]
    actual = plan_program(program, CHIPS["v5e"])
    assert actual.fits is False
    assert actual.peak_bytes == int(20.5 * 2**30)
    assert actual.temp_bytes is actual.estimated_step_us is None


def test_the_floor_counts_the_cache_beside_the_weights() -> None:
    refused: Any = Refused()
    program = LoweredProgram("decode", refused, 1, 100, 100, read_weight_bytes=60, cache_bytes=40)
    chip = CHIPS["v5e"]
    assert chip.bandwidth is not None
    twice = dataclasses.replace(program, read_weight_bytes=10**9, cache_bytes=10**9)
    assert floor_us(twice, chip) == round(2e15 / chip.bandwidth, 3)
    assert plan_program(program, chip).floor_step_us == round(1e8 / chip.bandwidth, 3)


def test_the_floor_counts_flops() -> None:
    """Those of float32 products are exact, and so slower, unless another precision is chosen."""
    refused: Any = Refused()
    program = LoweredProgram("prefill", refused, 0, 0, 0, 0, flops=197e9, dtype="bfloat16")
    assert floor_us(program, CHIPS["v5e"]) == 1000.0
    program = dataclasses.replace(program, dtype="float32")
    assert floor_us(program, CHIPS["v5e"]) == 6000.0
    with jax.default_matmul_precision("bfloat16"):
        assert floor_us(program, CHIPS["v5e"]) == 1000.0


def test_times_of_collectives() -> None:
    """Asynchronous ones are hidden by what is computed; no estimate is below the floor."""
    text = """HloModule m

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %g = (f32[9000000], f32[18000000]) all-gather-start(%x), replica_groups=[1,2]<=[2]
  %d = f32[18000000] all-gather-done(%g)
  %s = f32[9000000] all-reduce(%d), replica_groups=[1,2]<=[2]
  ROOT %y = f32[8]{0} fusion(%s), kind=kLoop, backend_config={"estimated_cycles":"3000000"}
}
"""
    refused: Any = Refused()
    mesh: Any = types.SimpleNamespace(size=2)
    program = LoweredProgram("train", refused, 0, 0, 0, 0, model_flops=394e9, mesh=mesh)
    found = times_of(hlo.Module.parse(text), "main", program, CHIPS["v5e"])
    assert (found["collective_bytes"], found["collective_us"]) == (72_000_000, 800.0)
    assert (found["estimated_step_us"], found["series_step_us"]) == (2000.0, 2800.0)
    assert found["overlapped_step_us"] == 2400.0
    assert (found["mfu"], found["overlapped_mfu"]) == (round(1 / 2.8, 3), round(1 / 2.4, 3))
    slow = dataclasses.replace(program, cache_bytes=819 * 10**7)
    floor = times_of(hlo.Module.parse(text), "main", slow, CHIPS["v5e"])
    assert floor["estimated_step_us"] == 10_000.0


def check_decode(topology: str) -> Any:
    actual = jaxllm.plan(tiny.CONFIGS["llama"], topology, program="decode", **SMALL)
    (program,) = actual.programs
    assert program.fits
    assert program.floor_step_us > 0
    assert program.kernels > 0
    assert program.temp_bytes < 2**20
    return program


@needs_tpu
def test_a_tpu_compiles_the_decode_loop() -> None:
    program = check_decode("v5e:2x2")
    assert program.estimated_step_us >= program.floor_step_us
    assert program.series_step_us == program.overlapped_step_us == program.estimated_step_us


@needs_tpu
@pytest.mark.parametrize("topology", ["v5e:1x1", "v6e:1x1", "v5e:2x4"])
def test_a_topology_has_the_devices_that_it_names(topology: str) -> None:
    assert len(find_topology(topology).devices) == chip_and_count(topology)[1]


@needs_tpu
def test_programs_of_an_absent_tpu_are_not_kept(tmp_path: Path) -> None:
    """JAX would keep them in its compile cache, and warn that it cannot load them."""
    folder = jax.config.jax_compilation_cache_dir
    jaxllm.enable_compile_cache(tmp_path)
    try:
        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                check_decode("v5e:2x2")
        kept = list(tmp_path.iterdir())
        assert not any(path.name.startswith("jit_decode") for path in kept)
        jax.jit(lambda x: x * 3 + 5)(np.arange(7)).block_until_ready()
        assert len(list(tmp_path.iterdir())) > len(kept)  # this machine's own are kept
    finally:
        jaxllm.enable_compile_cache(folder)


@needs_tpu
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_a_tpu_copies_no_short_cache(family: str) -> None:
    """Short caches, and rows times heads that fill the lanes, are the case that it copied."""
    wide = {
        "t5": {"d_kv": 64, "num_heads": 16, "d_model": 64},
        "gpt2": {"n_embd": 1024, "n_head": 16, "n_positions": 256},
    }
    config = tiny.CONFIGS[family] | wide[family]
    (program,) = jaxllm.plan(
        config, "v5e:2x2", batch=8, prompt=64, new=64, program="decode"
    ).programs
    assert (program.cache_copies, program.inner_loops) == (0, 0)


@needs_tpu
def test_a_tpu_mesh_of_two_processes() -> None:
    actual = jaxllm.plan(
        tiny.CONFIGS["llama"],
        "v5e:2x4",
        mesh={"data": 4, "tensor": 2},
        program=("decode", "batch"),
        **SMALL | {"batch": 4},
    )
    assert actual.devices == 8
    assert [p.name for p in actual.programs] == ["decode", "batch.decode", "batch.prefill"]
    assert all(program.collectives > 0 for program in actual.programs)


@needs_gpu
def test_a_gpu_compiles_the_decode_loop() -> None:
    assert check_decode("h100").estimated_step_us is None


@needs_gpu
def test_a_gpu_writes_the_keys_of_a_prompt_into_the_cache_without_copies() -> None:
    sizes = {"batch": 1, "prompt": 512, "new": 128}
    (prefill,) = jaxllm.plan(tiny.CONFIGS["llama"], "h100", program="prefill", **sizes).programs
    assert prefill.cache_copies == 0


@needs_gpu
def test_a_gpu_projects_the_keys_of_cross_attention_layer_by_layer() -> None:
    """XLA would join the products of all layers, whose result is as long as there are layers."""
    sizes = {"batch": 8, "prompt": 128, "new": 8, "program": "prefill"}

    def temp_bytes(layers: int) -> int:
        config = tiny.CONFIGS["t5"] | {"num_decoder_layers": layers}
        (prefill,) = jaxllm.plan(config, "h100", **sizes).programs
        return prefill.temp_bytes

    assert temp_bytes(8) < 1.01 * temp_bytes(4)


@pytest.mark.ci
def test_the_command_prints_a_table_or_json(tmp_path: Path, capsys: Any) -> None:
    from jaxllm.cli.main import main

    (tmp_path / "config.json").write_text(json.dumps(tiny.CONFIGS["gpt2"]))
    command = ["plan", str(tmp_path), "--topology", "cpu", "--batch", "2", "--prompt", "5"]
    command += ["--new", "6", "--program", "decode"]
    assert main([*command, "--json"]) == 0
    captured = capsys.readouterr()
    actual = json.loads(captured.out)
    assert captured.err == ""
    assert [tuple(program) for program in actual["programs"]] == [FIELDS]
    assert actual["workload"] == {"batch": 2, "prompt": 5, "new": 6, "slots": 64}
    assert main(command) == 0
    captured = capsys.readouterr()
    assert captured.err == "compiling decode\n"
    assert captured.out.startswith("cpu, 1 x CPU, bfloat16; batch 2, prompt 5, new 6, slots 64\n")
    assert "kernels of a step" in captured.out
    assert main(["plan", str(tmp_path / "no"), "--topology", "cpu"]) == 2
    assert capsys.readouterr().err.endswith("give a folder with config.json, or the path of one\n")


def test_the_documentation_names_every_figure_and_option() -> None:
    text = (ROOT / "docs" / "plan.md").read_text(encoding="utf-8")
    assert [field for field in FIELDS if f"`{field}`" not in text] == []
    flags = [flag for action in _parser("plan")._actions for flag in action.option_strings]
    own = [flag for flag in flags if flag not in ("-h", "--help", "--debug")]
    assert [flag for flag in own if f"`{flag}`" not in text] == []
