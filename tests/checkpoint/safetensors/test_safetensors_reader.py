"""Safetensors reader: agrees with the safetensors package, and refuses malformed files."""

from __future__ import annotations

import json
import os

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from huggingface_hub import split_state_dict_into_shards_factory
from weight_files import (
    BF16,
    MALFORMED_SAFETENSORS,
    assert_same,
    every_dtype,
    safetensors_bytes,
    st_entry,
    written,
)

from jaxllm.checkpoint.safetensors import (
    MAX_HEADER_BYTES,
    SafetensorsFile,
    write_safetensors,
    write_sharded,
)
from jaxllm.checkpoint.source import find_nonfinite
from jaxllm.checkpoint.weight_files import ShardedWeights, open_weights
from jaxllm.common.errors import CheckpointError, JaxLLMError, MissingFileError, UnsupportedError


class TestReading:
    def test_reads_what_the_reference_writes(self, tmp_path):
        tensors = every_dtype()
        safetensors.numpy.save_file(tensors, tmp_path / "a.safetensors", metadata={"k": "v"})
        with SafetensorsFile(tmp_path / "a.safetensors") as file:
            assert set(file.names()) == set(tensors)
            assert file.metadata == {"k": "v"}
            for name, expected in tensors.items():
                assert_same(file.read(name), expected)
                info = file.info(name)
                assert info.shape == expected.shape
                assert info.dtype == expected.dtype
                assert info.nbytes == expected.nbytes
                assert info.file == tmp_path / "a.safetensors"

    def test_tensors_are_read_only_views_that_outlive_the_file(self, tmp_path):
        write_safetensors(tmp_path / "a.safetensors", {"w": np.arange(8.0, dtype=np.float32)})
        file = SafetensorsFile(tmp_path / "a.safetensors")
        array = file.read("w")
        assert not array.flags.writeable
        assert np.shares_memory(array, file.read("w"))
        file.close()
        assert array.sum() == 28
        with pytest.raises(CheckpointError, match=r"after close"):
            file.read("w")

    def test_unaligned_data_are_read(self, tmp_path):
        header = b'{"w":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}}'
        assert (8 + len(header)) % 8
        data = np.array([1.5, -2.0])
        path = written(tmp_path / "a.safetensors", safetensors_bytes(header, data.tobytes()))
        assert_same(SafetensorsFile(path).read("w"), data)

    def test_unknown_tensor_name(self, tmp_path):
        write_safetensors(tmp_path / "a.safetensors", {"w": np.zeros(1)})
        for call in ("read", "info"):
            with pytest.raises(CheckpointError, match=r"no tensor is named 'v'"):
                getattr(SafetensorsFile(tmp_path / "a.safetensors"), call)("v")


class TestMalformed:
    @pytest.mark.parametrize("case", MALFORMED_SAFETENSORS)
    def test_header(self, case, tmp_path):
        header, size, message = MALFORMED_SAFETENSORS[case]
        path = written(tmp_path / "a.safetensors", safetensors_bytes(header, b"\0" * size))
        with pytest.raises(CheckpointError, match=message) as error:
            SafetensorsFile(path)
        assert str(path) in str(error.value)
        assert len(str(error.value)) < len(str(path)) + 400

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (b"", "empty"),
            (b"1234567", "too few"),
            (b"\xff" * 8 + b"{}", "not a safetensors file"),
            ((MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}", "at most"),
            ((3).to_bytes(8, "little") + b"{}", "ends within its header"),
        ],
    )
    def test_length(self, data, message, tmp_path):
        with pytest.raises(CheckpointError, match=message):
            SafetensorsFile(written(tmp_path / "a.safetensors", data))

    @pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "C64"])
    def test_other_dtypes_of_the_format_are_unsupported(self, dtype, tmp_path):
        data = safetensors_bytes({"w": st_entry(dtype=dtype)}, b"\0" * 8)
        with pytest.raises(UnsupportedError, match=rf"'w' has dtype {dtype}"):
            SafetensorsFile(written(tmp_path / "a.safetensors", data))

    def test_booleans_are_zero_or_one(self, tmp_path):
        data = safetensors_bytes({"w": st_entry((2,), (0, 2), "BOOL")}, b"\x01\x02")
        file = SafetensorsFile(written(tmp_path / "a.safetensors", data))
        with pytest.raises(CheckpointError, match="neither 0 nor 1"):
            file.read("w")

    def test_missing_file(self, tmp_path):
        with pytest.raises(MissingFileError, match="none: no such file"):
            SafetensorsFile(tmp_path / "none")
        with pytest.raises(MissingFileError, match="is no regular file"):
            SafetensorsFile(tmp_path)


def shards_of(folder) -> dict[str, str]:
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


class TestShards:
    # One tensor larger than a shard, and sums that just fit and just do not.
    SIZES = (("a", 60), ("b", 40), ("c", 1), ("big", 150), ("d", 99))
    TENSORS = {name: np.full(size, i, np.uint8) for i, (name, size) in enumerate(SIZES)}  # noqa: RUF012

    def test_split_as_huggingface_hub_does(self, tmp_path):
        paths = write_sharded(tmp_path, self.TENSORS, max_shard_bytes=100)
        expected = split_state_dict_into_shards_factory(
            self.TENSORS,
            get_storage_size=lambda array: array.nbytes,
            filename_pattern="model{suffix}.safetensors",
            get_storage_id=lambda array: id(array),
            max_shard_size=100,
        )
        assert shards_of(tmp_path) == expected.tensor_to_filename
        assert [p.name for p in paths] == list(expected.filename_to_tensors)
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 350}
        with open_weights(tmp_path) as source:
            assert isinstance(source, ShardedWeights)
            assert set(source.names()) == set(self.TENSORS)
            for name, expected_array in self.TENSORS.items():
                assert_same(source.read(name), expected_array)
                assert source.info(name).file.name == shards_of(tmp_path)[name]

    def test_one_shard_needs_no_index(self, tmp_path):
        assert write_sharded(tmp_path, self.TENSORS) == [tmp_path / "model.safetensors"]
        assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]

    def test_files_of_an_earlier_save_are_removed(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        for limit in (1000, 100, 200, 1000):
            tensors = {name: array + np.uint8(limit % 7) for name, array in self.TENSORS.items()}
            paths = write_sharded(tmp_path, tensors, max_shard_bytes=limit)
            expected = {"config.json", *(path.name for path in paths)}
            if len(paths) > 1:
                expected.add("model.safetensors.index.json")
            assert {path.name for path in tmp_path.iterdir()} == expected
            with open_weights(tmp_path) as source:
                for name, array in tensors.items():
                    assert_same(source.read(name), array)

    @pytest.mark.parametrize(
        "shard",
        [
            "../evil.safetensors",
            "/etc/evil.safetensors",
            "sub/evil.safetensors",
            "..\\evil.safetensors",
            "C:evil.safetensors",
            "~evil.safetensors",
            ".safetensors",
            "evil.bin",
            "evil.safetensors/",
            "evil\n.safetensors",
            "",
            ["a.safetensors"],
            None,
        ],
    )
    def test_shards_are_plain_file_names(self, shard, tmp_path):
        (tmp_path / "sub").mkdir()
        write_safetensors(tmp_path / "sub" / "evil.safetensors", {"w": np.zeros(1)})
        write_safetensors(tmp_path / "evil.safetensors", {"w": np.zeros(1)})
        index = tmp_path / "sub" / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": shard}}))
        with pytest.raises(CheckpointError, match=r"weight_map\['w'\] is .*, not the plain name"):
            open_weights(tmp_path / "sub")

    def test_symbolic_links_are_followed(self, tmp_path):
        """The files of a snapshot in the Hugging Face cache are links to files elsewhere."""
        (tmp_path / "blobs").mkdir()
        (tmp_path / "snapshot").mkdir()
        write_sharded(tmp_path / "blobs", self.TENSORS, max_shard_bytes=100)
        for i, file in enumerate(sorted((tmp_path / "blobs").iterdir())):
            blob = file.rename(file.with_name(f"{i:064x}"))
            (tmp_path / "snapshot" / file.name).symlink_to(blob)
        with open_weights(tmp_path / "snapshot") as source:
            assert set(source.names()) == set(self.TENSORS)

    @pytest.mark.parametrize(
        ("weight_map", "message"),
        [
            ({"a": "1.safetensors", "b": "2.safetensors"}, "'shared' is in 1.* and in 2"),
            (dict.fromkeys(["a", "shared", "b"], "1.safetensors"), "'b' is listed in 1"),
            ({"a": "1.safetensors"}, "'shared' is listed in no shard and held by 1"),
            ({"a": "3.safetensors"}, "missing: 3.safetensors"),
            ({}, "must map"),
            (["a"], "must map"),
        ],
    )
    def test_index_and_shards_must_agree(self, weight_map, message, tmp_path):
        one = np.ones(1)
        write_safetensors(tmp_path / "1.safetensors", {"a": one, "shared": one})
        write_safetensors(tmp_path / "2.safetensors", {"b": one, "shared": one})
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(JaxLLMError, match=message):
            open_weights(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "1", '{"weight_map": 1}', '{"a": 1, "a": 2}'])
    def test_malformed_index(self, text, tmp_path):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
            open_weights(tmp_path)


class TestOtherFormats:
    @pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.pkl", "a.ckpt", "rng_state.pth"])
    def test_pickles_are_never_opened(self, name, tmp_path):
        os.mkfifo(tmp_path / name)  # opening it would wait for a writer
        with pytest.raises(UnsupportedError, match=r"safe_serialization=True") as error:
            open_weights(tmp_path)
        assert name in str(error.value)
        with pytest.raises(UnsupportedError, match=r"safe_serialization=True"):
            open_weights(tmp_path / name)
        write_safetensors(tmp_path / "model.safetensors", {"w": np.zeros(1)})
        with open_weights(tmp_path) as source:
            assert source.names() == ["w"]

    @pytest.mark.parametrize("name", ["tf_model.h5", "rust_model.ot"])
    def test_other_formats_are_named(self, name, tmp_path):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(UnsupportedError, match=f"holds only {name}: .*safe_serialization=True"):
            open_weights(tmp_path)
        with pytest.raises(UnsupportedError, match=f"{name} is not a weight file"):
            open_weights(tmp_path / name)


def test_folder_without_weights(tmp_path):
    with pytest.raises(MissingFileError, match=r"neither model\.safetensors nor"):
        open_weights(tmp_path)
    write_safetensors(tmp_path / "adapter.safetensors", {"w": np.zeros(1)})
    with pytest.raises(MissingFileError, match=r"only adapter\.safetensors"):
        open_weights(tmp_path)
    with open_weights(tmp_path / "adapter.safetensors") as source:
        assert source.names() == ["w"]
    with pytest.raises(MissingFileError, match="no such file or folder"):
        open_weights(tmp_path / "none")


class TestFindNonfinite:
    @pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32, np.float64])
    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_every_float_type(self, dtype, value):
        array = np.zeros((3, 5), dtype)
        array[0, 0] = ml_dtypes.finfo(dtype).max
        array[1, 1] = ml_dtypes.finfo(dtype).smallest_subnormal
        assert find_nonfinite("w", array) is None
        array[2, 3] = value
        message = find_nonfinite("w", array)
        assert message == f"w: 1 of 15 values are NaN or infinite, the first is {value}"
        assert find_nonfinite("w", array.T) == message

    def test_in_a_later_chunk(self):
        array = np.zeros((1 << 20) + 7, np.float32)
        array[-1] = np.nan
        assert find_nonfinite("w", array) is not None

    def test_integers_are_finite(self):
        assert find_nonfinite("w", np.full(4, -1)) is None
        assert find_nonfinite("w", np.ones(4, bool)) is None
