"""Digests change with every bit, and depend on the bits only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxllm.checkpoint.orbax.leaves import GOLDEN, digests
from jaxllm.common.errors import CheckpointError

DTYPES = ["float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint16", "float8_e4m3fn"]


def digest(x) -> str:
    return digests({"x": jnp.asarray(x)})["x"]


def by_numpy(x: np.ndarray) -> str:
    """The digest's definition, written out with Python's integers for each element."""
    words = x.reshape(-1).view(f"u{x.itemsize}").tolist()

    def murmur(word: int, first: int, second: int) -> int:
        word = (word ^ word >> 16) * first % 2**32
        word = (word ^ word >> 13) * second % 2**32
        return word ^ word >> 16

    strides = [int(np.prod(x.shape[d + 1 :])) for d in range(x.ndim)]
    high = low = 0
    for flat, word in enumerate(words):
        index = np.unravel_index(flat, x.shape) if x.ndim else ()
        far = sum(int(i) * (s * GOLDEN % 2**64 >> 32) for i, s in zip(index, strides, strict=True))
        high += murmur(word ^ flat * GOLDEN % 2**32, 0x85EBCA6B, 0xC2B2AE35)
        low += murmur((word + far) % 2**32, 0xCC9E2D51, 0x1B873593)
    return f"{high % 2**32:08x}{low % 2**32:08x}"


@pytest.mark.in_ci("shape1-bfloat16", "shape2-int32", "shape3-bfloat16", "shape3-uint16")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (5, 6), (2, 3, 4)])
def test_definition(dtype, shape):
    raw = np.random.default_rng(0).integers(0, 256, (*shape, 8), np.uint8)
    x = raw.view(jnp.dtype(dtype))[..., 0]
    assert digest(x) == by_numpy(np.ascontiguousarray(x))


def test_booleans():
    x = np.array([True, False, True])
    assert digest(x) == by_numpy(x.view(np.uint8))


def test_eight_bytes():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 5))
        assert digest(x) == digest(x.view(np.uint32).reshape(3, 5, 2))


def test_every_bit_changes_the_digest():
    x = np.random.default_rng(0).standard_normal(16, dtype=np.float32)
    actual = {digest(x)}
    for bit in range(16 * 32):
        flipped = x.view(np.uint32).copy()
        flipped[bit // 32] ^= np.uint32(1) << np.uint32(bit % 32)
        actual.add(digest(flipped.view(np.float32)))
    assert len(actual) == 1 + 16 * 32


def test_order_changes_the_digest():
    x = np.random.default_rng(0).standard_normal((12, 16), dtype=np.float32)
    changed = [x, x.T.reshape(12, 16), x[::-1], x[:, ::-1], np.roll(x, 1), np.roll(x, 16)]
    for i, j in [(0, 1), (3, 70), (100, 101)]:
        swapped = x.reshape(-1).copy()
        swapped[[i, j]] = swapped[[j, i]]
        changed.append(swapped.reshape(12, 16))
    zeros = x.copy()
    zeros[4:8] = 0
    moved = np.zeros_like(x)
    moved[0, 0] = 1
    other = np.zeros_like(x)
    other[0, 1] = 1
    changed += [zeros, moved, other, np.zeros_like(x)]
    assert len({digest(x) for x in changed}) == len(changed)


def test_zeros_and_nans_have_different_digests():
    quiet, other = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert digest(np.float32(0.0)) != digest(np.float32(-0.0))
    assert digest(quiet) != digest(other)


def test_unsupported_dtypes_are_refused():
    for x in (jnp.zeros(2, jnp.complex64), np.zeros(2, ml_dtypes.int4)):
        with pytest.raises(CheckpointError, match="cannot be saved"):
            digest(x)
