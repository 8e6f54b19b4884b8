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
from gguf.constants import GGMLQuantizationType as Q
from test_gguf_names import convert
from weight_files import random_blocks, write_gguf

import jaxllm
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
