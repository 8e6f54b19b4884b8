"""Safetensors writer: the bytes of the safetensors package, for any strides; atomic writes."""

from __future__ import annotations

import errno
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from weight_files import assert_same, every_dtype

from jaxllm.checkpoint import safetensors as jaxllm_safetensors
from jaxllm.checkpoint.safetensors import PT_METADATA, SafetensorsFile, write_safetensors
from jaxllm.common.errors import CheckpointError, JaxLLMError, MissingFileError


class TestWriting:
    def test_bytes_equal_those_of_the_safetensors_package(self, tmp_path):
        tensors = every_dtype()
        write_safetensors(tmp_path / "ours", tensors)
        safetensors.numpy.save_file(tensors, tmp_path / "theirs", metadata=PT_METADATA)
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()

    def test_the_order_of_the_tensors_does_not_matter(self, tmp_path):
        tensors = every_dtype()
        write_safetensors(tmp_path / "a", tensors)
        write_safetensors(tmp_path / "b", dict(reversed(tensors.items())))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_strided_arrays(self, tmp_path):
        """The reference writes other data for these, in silence (huggingface/safetensors#825)."""
        base = np.arange(24, dtype=np.float32).reshape(4, 6)
        tensors = {
            "transposed": base.T,
            "sliced": base[::2, 1:4],
            "reversed": base[:, ::-1],
            "broadcast": np.broadcast_to(base[0], (3, 6)),
        }
        write_safetensors(tmp_path / "a.safetensors", tensors)
        loaded = safetensors.numpy.load_file(tmp_path / "a.safetensors")
        for name, expected in tensors.items():
            np.testing.assert_array_equal(loaded[name], expected)

    def test_jax_arrays(self, tmp_path):
        array = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
        write_safetensors(tmp_path / "a.safetensors", {"w": array})
        assert_same(SafetensorsFile(tmp_path / "a.safetensors").read("w"), np.asarray(array))

    def test_metadata(self, tmp_path):
        for metadata in ({"b": "2", "a": "1"}, {}):
            write_safetensors(tmp_path / "a.safetensors", {"w": np.zeros(1)}, metadata)
            assert SafetensorsFile(tmp_path / "a.safetensors").metadata == metadata

    @pytest.mark.parametrize(
        ("tensors", "message"),
        [
            ({"__metadata__": np.zeros(1)}, "cannot be the name"),
            ({1: np.zeros(1)}, "1 cannot be the name"),
            ([np.zeros(1)], r"tensors: expected a dict of arrays by name, found .* \(list\)"),
            ({"w": np.zeros(1, np.complex64)}, "cannot hold complex64"),
            ({"w": np.zeros(1, ">f4")}, "cannot hold >f4"),
            ({"w": np.array(["a"])}, "cannot hold"),
            ({"w": jax.random.key(0)}, "cannot hold key<fry>"),
            ({"w": [1.0]}, "tensor 'w': expected an array, found \\[1.0\\]"),
            ({"a": np.zeros(1), "w": None}, "tensor 'w': expected an array, found None"),
        ],
    )
    def test_invalid_names_and_dtypes(self, tensors, message, tmp_path):
        with pytest.raises(JaxLLMError, match=message):
            write_safetensors(tmp_path / "a.safetensors", tensors)
        assert not list(tmp_path.iterdir())

    def test_the_folder_must_exist(self, tmp_path):
        with pytest.raises(MissingFileError, match="no such folder"):
            write_safetensors(tmp_path / "none" / "a.safetensors", {"w": np.zeros(1)})

    def test_file_that_differs_when_read_back_is_deleted(self, tmp_path, monkeypatch):
        path = tmp_path / "a.safetensors"
        write_safetensors(path, {"w": np.zeros(4)})
        before = path.read_bytes()
        compare = jaxllm_safetensors._compare

        def rot_and_compare(temporary, *others):
            data = bytearray(temporary.read_bytes())
            data[-1] ^= 1
            temporary.write_bytes(data)
            compare(temporary, *others)

        monkeypatch.setattr(jaxllm_safetensors, "_compare", rot_and_compare)
        with pytest.raises(CheckpointError, match="'w' differs when read back"):
            write_safetensors(path, {"w": np.ones(4)})
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_full_disk_leaves_the_old_file(self, tmp_path, monkeypatch):
        path = tmp_path / "a.safetensors"
        write_safetensors(path, {"w": np.zeros(4)})
        before = path.read_bytes()

        def full(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            write_safetensors(path, {"w": np.ones(4)})
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]
