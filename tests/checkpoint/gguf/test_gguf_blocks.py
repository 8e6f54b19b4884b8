"""Quantized GGUF files loaded without dequantizing them."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from devices import on_devices
from gguf.constants import GGMLQuantizationType as Q
from test_gguf_names import convert
from weight_files import random_blocks, write_gguf

import jaxllm
from jaxllm.checkpoint.gguf import reader
from jaxllm.checkpoint.load import load_model, open_checkpoint
from jaxllm.checkpoint.load_parameters import block_matrix
from jaxllm.common.errors import NonFiniteError, UnsupportedError
from jaxllm.models.lora import module_at
from jaxllm.models.quantize import BLOCK_FORMATS, formats_of
from jaxllm.models.weights import parameters
from jaxllm.nn.platform.products import sum_of_blocks

close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


@pytest.mark.ci
@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_values_and_products(name, tmp_path):
    kind = Q[name]
    data = random_blocks(kind, 6, 512)
    expected = gguf.quants.dequantize(data, kind)
    with write_gguf(tmp_path / "a.gguf", {"w": (data, kind)}) as file:
        blocks = file.blocks("w")
        assert blocks is not None
        matrix = block_matrix(blocks)
    assert (matrix.format, matrix.shape) == (name, (6, 512))
    np.testing.assert_array_equal(matrix.dequantized(), expected)
    np.testing.assert_array_equal(
        matrix.rows(jnp.array([[4, 0]]), jnp.float32)[0], expected[[4, 0]]
    )
    x = np.random.default_rng(0).normal(size=(3, 512)).astype(np.float32)
    product = x @ expected.T
    close(matrix.times(jnp.asarray(x)), product, atol=1e-5 * np.abs(product).max())
    offsets = None if matrix.offsets is None else matrix.offsets[...]
    sums = sum_of_blocks(jnp.asarray(x), matrix.groups[...], matrix.scales[...], offsets)
    close(sums, product, atol=1e-5 * np.abs(product).max())


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_only_the_blocks_of_a_slice_are_unpacked(name, tmp_path, monkeypatch):
    kind, size = Q[name], BLOCK_FORMATS[name].size
    seen = []
    parts = reader._PARTS[kind.name]
    monkeypatch.setitem(
        reader._PARTS, kind.name, lambda data: seen.append(len(data)) or parts(data)
    )
    data = random_blocks(kind, 6, 1024)
    with write_gguf(tmp_path / "a.gguf", {"w": (data, kind)}) as file:
        whole = file.blocks("w")
        assert whole is not None
        # A group is less than a block of the K types.
        for rows, first, last in (slice(2, 4), 0, 512), (slice(0, 6), 512 + size, 768):
            part = file.blocks("w", (rows, slice(first, last)))
            assert part is not None
            expected = whole.map(lambda x, r=rows, g=slice(first // size, last // size): x[r, g])
            np.testing.assert_array_equal(part.values, expected.values)
            np.testing.assert_array_equal(part.scales, expected.scales)
            assert (part.offsets is None) == (whole.offsets is None)
            if part.offsets is not None:
                np.testing.assert_array_equal(part.offsets, expected.offsets)
    assert seen[1] == seen[0] // 6
    assert seen[2] <= seen[0] // 4


ON_A_MESH = """
import sys
import jax, numpy as np
from jaxllm.checkpoint.load import load_model, open_checkpoint
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import make_mesh, parameter_sharding
from pathlib import Path
for path in map(Path, sys.argv[1:]):
    plain = parameters(load_model(open_checkpoint(path), quantize="keep"))
    for mesh in make_mesh(fsdp=2, tensor=2), make_mesh(fsdp=8):
        model = load_model(open_checkpoint(path), quantize="keep", mesh=mesh)
        for name, x in parameters(model).items():
            assert x.sharding == parameter_sharding(name, x.shape, mesh), name
            np.testing.assert_array_equal(x, plain[name], name)
print("done")
"""


@pytest.mark.ci
def test_blocks_on_a_mesh(tmp_path):
    kinds = {"llama": Q.Q4_1, "gpt2": Q.Q4_0, "mixtral": Q.Q8_0}
    paths = [written(family, kind, tmp_path / family) for family, kind in kinds.items()]
    assert on_devices(ON_A_MESH, *paths) == "done\n"


SIZES: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 64, "head_dim": 8},
    "mixtral": {"intermediate_size": 64, "head_dim": 8, "sliding_window": None},
    "gpt2": {},
    "t5": {"d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "decoder_start_token_id": 0},
}


def written(family: str, kind: Q, tmp_path: Path) -> Path:
    """A tiny model, quantized by the gguf package."""
    jaxllm.save_hf(tmp_path / "hf", tiny.make(family, vocab_size=64, **SIZES[family]))
    convert(tmp_path / "hf", tmp_path / "model.gguf", kind)
    return tmp_path / "model.gguf"


@pytest.mark.ci
@pytest.mark.parametrize(
    ("family", "kind"),
    [("llama", Q.Q4_1), ("gpt2", Q.Q4_0), ("mixtral", Q.Q8_0)],
    ids=lambda x: str(x),
)
def test_models(family, kind, tmp_path):
    path = written(family, kind, tmp_path)
    plain = load_model(open_checkpoint(path))
    model = load_model(open_checkpoint(path), quantize="keep")
    formats = formats_of(model)
    assert set(formats.values()) == {kind.name}
    expected = parameters(plain)
    for layer in formats:
        values = tiny.values(module_at(model, layer))
        np.testing.assert_array_equal(values, expected[f"{layer}.weight"], layer)
    left = {path for path in expected if path.endswith(".weight") and path[:-7] not in formats}
    assert all(re.search("norm|positions|router", path) for path in left)
    std = tiny.logits(plain).std()
    assert std >= 1
    close(tiny.logits(model), tiny.logits(plain), atol=1e-4 * std)
    jaxllm.save_orbax(tmp_path / "saved", model)
    again, _ = jaxllm.load_orbax(tmp_path / "saved")
    assert formats_of(again) == formats
    for name, x in parameters(again).items():
        np.testing.assert_array_equal(x, parameters(model)[name], err_msg=name)


@pytest.mark.ci
def test_what_cannot_be_kept(tmp_path):
    jaxllm.save_hf(tmp_path, tiny.make("llama"))
    with pytest.raises(UnsupportedError, match="quantize='keep' keeps the blocks of a quantized"):
        jaxllm.load(tmp_path, quantize="keep")
    floats = written("llama", Q.F32, tmp_path / "f")
    with pytest.raises(UnsupportedError, match="no weight that may stay quantized has one"):
        load_model(open_checkpoint(floats), quantize="keep")
    path = written("llama", Q.Q8_0, tmp_path / "q")
    data = bytearray(path.read_bytes())
    blocks = gguf.GGUFReader(path)
    tensor = next(t for t in blocks.tensors if t.name == "blk.0.ffn_up.weight")
    data[tensor.data_offset : tensor.data_offset + 2] = np.float16("nan").tobytes()
    path.write_bytes(data)
    with pytest.raises(NonFiniteError, match=r"scales of .*up_proj"):
        load_model(open_checkpoint(path), quantize="keep")
