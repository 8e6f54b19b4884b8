"""Copies of tensors that loading hands to JAX."""

from typing import Any

import jax
import numpy as np
import pytest
from paths import DATA

import jaxllm
from jaxllm.checkpoint import load_parameters
from jaxllm.checkpoint.load_parameters import map_ahead, on_host
from jaxllm.common import hardware
from jaxllm.errors import InputError
from jaxllm.models.weights import parameters


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_jax_takes_over_the_copy(dtype: type):
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    copy = on_host(values, np.dtype(dtype))
    np.testing.assert_array_equal(copy, values.astype(dtype))
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, values)
    on_cpu = jax.device_put(copy, jax.devices("cpu")[0])
    assert on_cpu.unsafe_buffer_pointer() == copy.ctypes.data


def test_an_empty_copy():
    assert on_host(np.zeros((0, 3), np.float32), np.dtype(np.float16)).shape == (0, 3)


def test_map_ahead_keeps_the_order_and_raises_in_turn():
    results = map_ahead(lambda x: 6 // x, [6, 3, 2, 1, 0, 5], [10] * 6)
    assert [next(results) for _ in range(4)] == [1, 2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_map_ahead_holds_few_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_parameters, "READ_THREADS", 8)
    monkeypatch.setattr(load_parameters, "READ_AHEAD", 100)
    begun: list[int] = []
    results = map_ahead(lambda x: begun.append(x) or x, range(9), [10] * 4 + [60] * 5)
    assert next(results) == 0
    assert max(begun) <= 5  # four of 10 bytes and one of 60, and one in place of the first
    assert list(results) == list(range(1, 9))


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_blocks_of_rows_are_quantized_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device never holds more of a float matrix than one block."""
    folder = DATA / "reference" / "tiny-gpt2"
    whole = parameters(jaxllm.load(folder, quantize=name)[0])
    monkeypatch.setattr(load_parameters, "QUANTIZED_BLOCK", 1000)
    sizes: list[int] = []
    quantize: Any = load_parameters.quantize_rows
    monkeypatch.setattr(
        *(load_parameters, "quantize_rows"),
        lambda rows, name: sizes.append(rows.size) or quantize(rows, name),
    )
    blocks = parameters(jaxllm.load(folder, quantize=name)[0])
    assert 0 < max(sizes) <= 500, sizes
    assert blocks.keys() == whole.keys()
    for path, x in whole.items():
        np.testing.assert_array_equal(blocks[path], x, err_msg=path)


@pytest.mark.parametrize("options", [{}, {"quantize": "int4"}, {"mesh": {"tensor": 1}}], ids=str)
def test_more_weights_than_memory(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Named before any are read, which would end with the process killed by the system."""
    mesh = {"mesh": jaxllm.make_mesh(**options["mesh"])} if "mesh" in options else {}
    monkeypatch.setattr(hardware, "host_memory", lambda: 2000)
    monkeypatch.setattr(load_parameters, "Tensor", None)
    with pytest.raises(InputError, match=r"weights take .* kB, and there are 2.0 kB of memory"):
        jaxllm.load(DATA / "reference" / "tiny-gpt2", **{**options, **mesh})
