"""Loading onto a mesh and saving from it: the same bytes; each process reads its own shards."""

from __future__ import annotations

import re

import numpy as np
import pytest
from devices import on_devices, on_processes
from gguf.constants import GGMLQuantizationType as Q
from paths import DATA
from test_gguf_names import convert
from weight_files import random_blocks, write_gguf

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.weight_files import open_weights


def random_indices(shape: tuple[int, ...], seed: int):
    rng = np.random.default_rng(seed)
    for _ in range(8):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
        yield tuple(slice(int(a), int(b)) for a, b in ends)


def check_slices(source) -> None:
    for name in source.names():
        full = source.read(name)
        # Halves, as a mesh asks for them, which fall together with heads; and anything else.
        halves = [tuple(slice(0, n // 2) for n in full.shape)]
        halves += [tuple(slice(n // 2, n) for n in full.shape), ()]
        for index in (*halves, *random_indices(full.shape, len(name))):
            part = source.read(name, index)
            assert part.dtype == full.dtype
            np.testing.assert_array_equal(part, full[index], err_msg=f"{name} {index}")
        source.release_pages(name)
        np.testing.assert_array_equal(source.read(name), full)


@pytest.mark.in_ci("t5_relu")
@pytest.mark.parametrize("name", ["llama_bias", "gpt2_hub_layout", "t5_relu"])
def test_slices_of_tensors(name, tmp_path):
    folder = DATA / "parity" / name
    with open_weights(folder) as source:
        check_slices(source)
    convert(folder, tmp_path / "a.gguf")
    with HFView(GGUFFile(tmp_path / "a.gguf")) as view:
        check_slices(view)


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q4_K], ids=lambda kind: kind.name)
def test_slices_of_quantized_tensors(kind, tmp_path):
    tensors = {"w": (random_blocks(kind, 6, 512), kind), "b": (np.ones(3, np.float32), None)}
    with write_gguf(tmp_path / "a.gguf", tensors) as file:
        check_slices(file)


def test_only_requested_rows_are_dequantized(tmp_path, monkeypatch):
    from jaxllm.checkpoint.gguf import reader as gguf

    seen = []
    dequantize = gguf._dequantize
    monkeypatch.setattr(
        gguf, "_dequantize", lambda data, *args: seen.append(data.size) or dequantize(data, *args)
    )
    with write_gguf(tmp_path / "a.gguf", {"w": (random_blocks(Q.Q8_0, 6, 512), Q.Q8_0)}) as file:
        file.read("w", (slice(2, 4), slice(0, 100)))
    assert seen == [2 * 512 // 32 * 34]


EIGHT = """
import sys
from pathlib import Path
import jax, numpy as np, pytest
import jaxllm
from jaxllm.checkpoint.load import load_model, open_checkpoint
from jaxllm.common.errors import InputError
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import make_mesh
from jaxllm.parallel.sharding import parameter_sharding
from jaxllm.parallel.placement import mesh_of

data, out = map(Path, sys.argv[1:3])
meshes = [make_mesh(fsdp=2, tensor=2), make_mesh(fsdp=8), make_mesh()]
thirds = [make_mesh(fsdp=2, tensor=3, devices=jax.devices()[:6])]  # three heads
folders = [data / "conformance" / "models" / name for name in ("s_llama", "s_gpt2", "s_t5_gated")]
folders += [data / "parity" / name for name in ("llama_bias", "gpt2_hub_layout", "t5_encoder")]
folders += [data / "parity" / "phi3_window"]  # fused, of parts that differ in size
folders += [data / "parity" / name for name in ("bloom_published", "gptj_full")]  # rows reordered
folders += [data / "parity" / "cohere_full"]  # and matrices of norms

def load(path, **options):
    if path.is_dir():
        return jaxllm.load(path, **options)[0]
    return load_model(open_checkpoint(path), **options)  # these have no tokenizer

for folder in (*folders, *map(Path, sys.argv[3:])):
    plain = load(folder)
    expected = parameters(plain)
    half = load(folder, param_dtype="bfloat16")
    three = plain.config.head_counts in ({"n_head": 3}, {"num_heads": 3})
    for mesh in thirds if three else meshes:
        model = load(folder, mesh=mesh)
        found = parameters(model)
        assert found.keys() == expected.keys() and mesh_of(model) is mesh
        for path, x in found.items():
            assert x.sharding == parameter_sharding(path, x.shape, mesh), path
            assert (x.dtype, x.shape) == (expected[path].dtype, expected[path].shape)
            assert np.asarray(x).tobytes() == np.asarray(expected[path]).tobytes(), (folder, path)
        assert (model.card.origin, model.config) == (plain.card.origin, plain.config)
        if mesh not in (meshes[0], thirds[0]):
            continue
        narrow = load(folder, mesh=mesh, param_dtype="bfloat16")
        for path, x in parameters(narrow).items():
            assert np.asarray(x).tobytes() == np.asarray(parameters(half)[path]).tobytes()
        if folder.is_dir():
            jaxllm.save_hf(out / "a", model, overwrite=True)
            jaxllm.save_hf(out / "b", plain, overwrite=True)
            for file in sorted((out / "b").iterdir()):
                assert (out / "a" / file.name).read_bytes() == file.read_bytes(), file
jaxllm.save_orbax(out / "orbax", model)
again, _ = jaxllm.load_orbax(out / "orbax", mesh=meshes[1])
for path, x in parameters(again).items():
    assert x.sharding == parameter_sharding(path, x.shape, meshes[1])
    np.testing.assert_array_equal(x, found[path])
with pytest.raises(InputError, match="tensor=2 does not divide num_key_value_heads, 1; .* be 1"):
    jaxllm.load(data / "parity" / "llama_untied", mesh=meshes[0])
print("done")
"""


@pytest.mark.ci
def test_load_and_save_on_eight_devices(tmp_path):
    convert(DATA / "parity" / "llama_bias", tmp_path / "llama.gguf")
    convert(DATA / "conformance" / "models" / "s_gpt2", tmp_path / "gpt2.gguf")
    ggufs = (tmp_path / "llama.gguf", tmp_path / "gpt2.gguf")
    assert on_devices(EIGHT, DATA, tmp_path, *ggufs) == "done\n"


TWO_PROCESSES = """
import sys
from pathlib import Path
address, index, data, out = *sys.argv[1:3], *map(Path, sys.argv[3:])
import jax, numpy as np
jax.distributed.initialize(address, 2, int(index))
import jaxllm
from jaxllm.checkpoint.safetensors import SafetensorsFile
from jaxllm.common.errors import CheckpointError
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import make_mesh

taken = []
read = SafetensorsFile.read
SafetensorsFile.read = lambda *args: taken.append(read(*args)) or taken[-1]
folder = data / "conformance" / "models" / "s_llama"
for sizes in dict(fsdp=4), dict(tensor=2), dict(fsdp=2, tensor=2):
    mesh = make_mesh(**sizes)
    taken.clear()
    model, _ = jaxllm.load(folder, mesh=mesh)
    matrices = sum(x.nbytes for x in taken if x.ndim == 2)
    whole = sum(x.nbytes for x in parameters(model).values() if x.ndim == 2)
    # Only an axis that spans both processes spares a process something.
    assert matrices == (whole if sizes == dict(tensor=2) else whole // 2), (sizes, matrices, whole)
    # Quantizing needs whole rows, of which o and down have others in each process.
    for name in "int8", "int4":
        taken.clear()
        quantized, _ = jaxllm.load(folder, mesh=mesh, quantize=name)
        rows = {n: x.sharding.shard_shape(x.shape)[0] for n, x in parameters(model).items()}
        halved = [n for n in rows if n.endswith((".o.weight", ".down.weight"))]
        spared = sum(parameters(model)[n].nbytes // 2 for n in halved if "fsdp" in sizes)
        matrices = sum(x.nbytes for x in taken if x.ndim == 2)
        assert matrices == whole - spared, (sizes, name, matrices, whole, spared)
        alone = parameters(jaxllm.load(folder, quantize=name)[0])
        for path, x in parameters(quantized).items():
            for shard in x.addressable_shards:
                np.testing.assert_array_equal(shard.data, alone[path][shard.index], path)
    jaxllm.save_hf(out / "saved", model, overwrite=True)
    if int(index) == 0:
        with SafetensorsFile(folder / "model.safetensors") as a:
            with SafetensorsFile(out / "saved" / "model.safetensors") as b:
                assert set(a.names()) == set(b.names())
                for name in a.names():
                    assert a.read(name).tobytes() == b.read(name).tobytes()

# What goes wrong in one process is known to both.
blocked = out / "blocked"
if int(index) == 0:
    blocked.write_text("")
try:
    jaxllm.save_hf(blocked, model)
except CheckpointError as error:
    print(str(error).replace(str(out), "OUT"))
missing = folder if int(index) == 0 else out / "nowhere"
try:
    jaxllm.load(missing, mesh=mesh)
except Exception as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_load_and_save_in_two_processes(tmp_path):
    first, second = on_processes(TWO_PROCESSES, DATA, tmp_path)
    assert first == "OUT/blocked: is not a folder; name another one\nCheckpointError"
    assert re.fullmatch("it failed in process 0\n[A-Za-z]*Error", second)
