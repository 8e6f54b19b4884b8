"""Copies of tensors that loading hands to JAX."""

import jax
import numpy as np
import pytest

from jaxllm.checkpoint.load_parameters import host_copy, map_ahead


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_jax_takes_over_the_copy(dtype: type):
    values = np.arange(6, dtype=np.float32).reshape(2, 3).T
    copy = host_copy(values, np.dtype(dtype))
    np.testing.assert_array_equal(copy, values.astype(dtype))
    assert copy.flags.c_contiguous
    assert not np.shares_memory(copy, values)
    on_cpu = jax.device_put(copy, jax.devices("cpu")[0])
    assert on_cpu.unsafe_buffer_pointer() == copy.ctypes.data


def test_an_empty_copy():
    assert host_copy(np.zeros((0, 3), np.float32), np.dtype(np.float16)).shape == (0, 3)


def test_map_ahead_keeps_the_order_and_raises_in_turn():
    results = map_ahead(lambda x: 6 // x, [6, 3, 2, 1, 0, 5])
    assert [next(results) for _ in range(4)] == [1, 2, 3, 6]
    with pytest.raises(ZeroDivisionError):
        next(results)
