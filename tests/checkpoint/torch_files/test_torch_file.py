"""The reader of torch's files: layouts, dtypes, wrappers, and errors that name what is wrong."""

from __future__ import annotations

import ast
import gc
import json
import struct
import subprocess
import sys
import zipfile
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch_bytes as tb
from paths import DATA, ROOT

import jaxllm
from jaxllm.checkpoint.pickle_subset import MAX_OPERATIONS, MAX_PICKLE_BYTES
from jaxllm.checkpoint.torch_file import ROOM, TorchFile
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.cli.main import main
from jaxllm.common.errors import CheckpointError, UnsupportedError

VALUES = np.arange(12, dtype=np.float32).reshape(3, 4)
W = tb.whole("0", VALUES)
STORED = {"0": VALUES.tobytes()}


def written(tmp_path, data: bytes):
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(data)
    return path


def zipped(tmp_path, tensors, storages=STORED, **options):
    return written(tmp_path, tb.zip_file(tb.state_pickle(tensors), storages, **options))


def refused(path, match, error=CheckpointError):
    with pytest.raises(error, match=match) as found:
        TorchFile(path)
    assert str(path) in str(found.value)
    assert len(str(found.value)) <= 500


class TestLayouts:
    @pytest.mark.parametrize("is_legacy", [False, True])
    def test_views_of_one_storage(self, tmp_path, is_legacy):
        path = written(tmp_path, tb.example(is_legacy=is_legacy))
        with TorchFile(path) as file:
            assert file.names() == ["embed.weight", "head.weight", "turned", "row", "bias"]
            np.testing.assert_array_equal(file.read("embed.weight"), VALUES)
            np.testing.assert_array_equal(file.read("head.weight"), VALUES)
            np.testing.assert_array_equal(file.read("turned"), VALUES.T)
            np.testing.assert_array_equal(file.read("row"), VALUES[1])
            part = file.read("turned", (slice(1, 3), slice(2)))
            np.testing.assert_array_equal(part, VALUES.T[1:3, :2])
            assert not part.flags.writeable
            info = file.info("turned")
            assert (info.shape, info.dtype, info.nbytes) == ((4, 3), np.float32, 48)
            for name in file.names():
                file.release_pages(name)
            np.testing.assert_array_equal(file.read("turned"), VALUES.T)
            kept = file.read("row")
        np.testing.assert_array_equal(kept, VALUES[1])
        with pytest.raises(CheckpointError, match=r"read after close"):
            file.read("row")

    def test_slices_overlaps_and_repeats(self, tmp_path):
        parts = {
            "sliced": tb.Part("0", (3, 3), (4, 1), 12, offset=1),
            "overlapping": tb.Part("0", (3, 4), (2, 1), 12),
            "repeated": tb.Part("0", (1000, 4), (0, 1), 12),
            "scalar": tb.Part("0", (), (), 12, offset=5),
            "empty": tb.Part("0", (0, 7), (7, 1), 12, offset=12),
            "odd strides": tb.Part("0", (1, 2), (2**40, 1), 12),
        }
        with TorchFile(zipped(tmp_path, parts)) as file:
            np.testing.assert_array_equal(file.read("sliced"), VALUES[:, 1:])
            flat = VALUES.reshape(-1)
            np.testing.assert_array_equal(
                file.read("overlapping"), [flat[2 * i : 2 * i + 4] for i in range(3)]
            )
            np.testing.assert_array_equal(file.read("repeated"), np.tile(VALUES[0], (1000, 1)))
            assert file.read("scalar") == 5
            assert file.read("empty").shape == (0, 7)
            np.testing.assert_array_equal(file.read("odd strides"), VALUES[:1, :2])

    @pytest.mark.parametrize("order", ["little", "big"])
    @pytest.mark.parametrize("dtype", [*tb.STORAGES])
    def test_dtypes_in_both_byte_orders(self, tmp_path, dtype, order):
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        values = np.array([[0, 1, 1], [1, 0, 1]]).astype(kind)
        data = values.view(f"u{kind.itemsize}")
        data = data.byteswap() if order == "big" else data
        parts = {
            "w": tb.whole("0", values),
            "turned": replace(tb.whole("0", values), shape=(3, 2), strides=(1, 3)),
        }
        path = zipped(tmp_path, parts, {"0": data.tobytes()}, byteorder=order)
        with TorchFile(path) as file:
            assert file.info("w").dtype == kind == file.read("w").dtype
            np.testing.assert_array_equal(file.read("w"), values)
            np.testing.assert_array_equal(file.read("turned"), values.T)
            np.testing.assert_array_equal(file.read("turned", (slice(1, 2),)), values.T[1:2])

    def test_a_slice_is_a_view_of_the_file(self, tmp_path):
        path = zipped(tmp_path, {"w": W})
        with TorchFile(path) as file:
            rows = file.read("w", (slice(1, 2),))
            assert np.shares_memory(rows, file.read("w"))

    def test_a_bool_is_zero_or_one(self, tmp_path):
        path = zipped(tmp_path, {"w": tb.Part("0", (3,), (1,), 3, "bool")}, {"0": b"\0\1\2"})
        with (
            TorchFile(path) as file,
            pytest.raises(CheckpointError, match="'w': a bool is neither"),
        ):
            file.read("w")

    def test_zip64(self, tmp_path):
        """Sizes and offsets in the records of zip64, as in files of more than 4 GiB."""
        path = written(tmp_path, as_zip64(tb.example(is_legacy=False)))
        with TorchFile(path) as file:
            np.testing.assert_array_equal(file.read("turned"), VALUES.T)
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None

    def test_aligned_and_misaligned_files_give_the_same_model(self, tmp_path):
        """transformers' own file, and one that was zipped again, so that no tensor is aligned."""
        source = DATA / "torch_files" / "gpt2_hub"
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        with (
            zipfile.ZipFile(source / "pytorch_model.bin") as old,
            zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as new,
        ):
            for member in old.namelist():
                new.writestr(member.replace("archive", "x"), old.read(member))
        with open_weights(source) as a, open_weights(tmp_path) as b:
            assert any(not b.read(name).flags.aligned for name in b.names())
            for name in a.names():
                np.testing.assert_array_equal(a.read(name), b.read(name))
        jaxllm.load(tmp_path)


def as_zip64(data: bytes) -> bytes:
    """The zip file with all numbers of its directory in zip64's records."""
    count, _, start = struct.unpack_from("<HII", data, len(data) - 12)
    directory, position = b"", start
    for _ in range(count):
        entry = bytearray(data[position : position + 46])
        stored, whole, length = struct.unpack_from("<IIH", entry, 20)
        (offset,) = struct.unpack_from("<I", entry, 42)
        extra = struct.pack("<HHQQQ", 1, 24, whole, stored, offset)
        struct.pack_into("<II", entry, 20, 2**32 - 1, 2**32 - 1)
        struct.pack_into("<H", entry, 30, len(extra))
        struct.pack_into("<I", entry, 42, 2**32 - 1)
        directory += entry + data[position + 46 : position + 46 + length] + extra
        position += 46 + length
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, len(directory), start
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, start + len(directory), 1)
    last = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0xFFFF, 0xFFFF, 2**32 - 1, 2**32 - 1, 0)
    return data[:start] + directory + end + locator + last


class TestWrappers:
    def test_state_dict_and_module(self, tmp_path):
        inner = tb.state_pickle({"module.w": W})[2:-1]
        for key in ("state_dict", "model"):
            value = tb.DICT + tb.text("epoch") + tb.number(3) + tb.SETITEM
            value += tb.text(key) + inner + tb.SETITEM + tb.text("rng") + W.pickle() + tb.SETITEM
            path = written(tmp_path, tb.zip_file(tb.pickled(value), STORED))
            with pytest.warns(UserWarning, match=f"under '{key}'.*'epoch', 'rng' beside") as said:
                assert TorchFile(path).names() == ["w"]
            assert len(said) == 1

    def test_metadata_of_a_module_is_dropped(self, tmp_path):
        state = tb.DICT + tb.text("_metadata") + tb.ORDERED + tb.SETITEM
        pickle = tb.pickled(tb.state_pickle({"w": W})[2:-1] + state + tb.BUILD)
        assert TorchFile(written(tmp_path, tb.zip_file(pickle, STORED))).names() == ["w"]

    def test_what_is_no_state_dict(self, tmp_path):
        for value, match in {
            tb.LIST: "a value of type list, not a state dict",
            tb.DICT + tb.text("step") + tb.number(1) + tb.SETITEM: "'step' is a value of type int",
            tb.DICT + tb.text("model") + tb.number(1) + tb.SETITEM: "'model' is a value of",
            tb.DICT + tb.text("a") + tb.DICT + tb.SETITEM: "'a' is a value of type dict",
            tb.DICT + tb.text("model") + tb.DICT + tb.SETITEM + tb.text("state_dict") + tb.DICT
            + tb.SETITEM: "both state_dict and model",
        }.items():  # fmt: skip
            refused(written(tmp_path, tb.zip_file(tb.pickled(value), {})), match)

    def test_an_empty_state_dict(self, tmp_path):
        assert TorchFile(written(tmp_path, tb.zip_file(tb.pickled(tb.ORDERED), {}))).names() == []


PICKLES = {
    "another name": (
        tb.DICT + tb.text("w") + tb.name("collections.Counter") + tb.EMPTY + tb.REDUCE + tb.SETITEM,
        r"'w' cannot be .*'collections\.Counter'",
    ),
    "an unknown name": (tb.DICT + tb.text("a.b") + tb.name("no_such.name"), r"'a\.b' .*no_such"),
    "a dotted name": (tb.DICT + tb.text("w") + b"ctorch._utils\nx.y\n", r"'torch\._utils\.x\.y'"),
    "a name without end": (b"c" + b"a" * 500, "no end within 255 bytes"),
    "an operation of protocol 4": (b"\x95" + bytes(8), "0x95 does not occur"),
    "an object": (tb.name("collections.OrderedDict") + tb.EMPTY + b"\x81", "0x81 does not occur"),
    "an empty stack": (tb.REDUCE, "a value is missing"),
    "no mark": (tb.TUPLE, "a mark is missing"),
    "an open mark": (tb.DICT + tb.MARK, "before its value is complete"),
    "no memo": (b"h\1", "the memo has no value 1"),
    "a large index": (tb.DICT + b"r" + b"\xff" * 4, "too large an index"),
    "a long text": (b"X\xff\xff\xff\x7fabc", "2147483647 bytes are needed"),
    "a large number": (b"\x8a\xff" + bytes(255), "a number has 255 bytes"),
    "no UTF-8": (b"X\1\0\0\0\xff", "not UTF-8"),
    "a name twice": (
        tb.DICT + (tb.text("w") + tb.NONE + tb.SETITEM) * 2,
        "'w' is set twice",
    ),
    "a key that is a list": (tb.DICT + tb.LIST + tb.NONE + tb.SETITEM, "of type list, not a text"),
    "an item of a text": (tb.text("a") + tb.NONE + b"a", "something else than a list"),
    "a state of a list": (tb.LIST + tb.DICT + tb.BUILD, "something else than a dict"),
    "arguments": (
        tb.DICT + tb.text("w") + tb.name("torch._utils._rebuild_tensor_v2") + tb.EMPTY + tb.REDUCE,
        "'w' cannot .* the arguments of torch._utils._rebuild_tensor_v2",
    ),
    "a call of a text": (tb.text("print") + tb.EMPTY + tb.REDUCE, "a call is not as torch writes"),
    "no storage": (tb.DICT + tb.text("w") + tb.numbers([1]) + b"Q", "'w' .*reference to a storage"),
    "a negative size": (
        tb.DICT + tb.text("w") + replace(W, shape=(-3, 4)).pickle() + tb.SETITEM,
        "'w' .*shape or strides",
    ),
    "sizes without strides": (
        tb.DICT + tb.text("w") + replace(W, strides=(1,)).pickle() + tb.SETITEM,
        "'w' .*shape or strides",
    ),
    "too many dimensions": (
        tb.DICT + tb.text("w") + replace(W, shape=(1,) * 65, strides=(1,) * 65).pickle(),
        "'w' .*shape or strides",
    ),
    "two dtypes of a storage": (
        tb.DICT + tb.text("w") + W.pickle() + tb.SETITEM + tb.text("b")
        + replace(W, dtype="float16").pickle() + tb.SETITEM,
        "'b' .*the storage '0' has two dtypes",
    ),
}  # fmt: skip


class TestPickles:
    @pytest.mark.parametrize("name", PICKLES)
    def test_others_are_refused_by_name(self, tmp_path, name):
        value, match = PICKLES[name]
        path = written(tmp_path, tb.zip_file(tb.pickled(value), STORED))
        refused(path, match, (CheckpointError, UnsupportedError))

    def test_protocol_4(self, tmp_path):
        path = written(tmp_path, tb.zip_file(b"\x80\4}.", {}))
        refused(path, "the pickle protocol 4", UnsupportedError)

    def test_number_of_operations(self, tmp_path):
        value = tb.LIST + (tb.NONE + b"a") * (MAX_OPERATIONS // 2)
        path = written(tmp_path, tb.zip_file(tb.pickled(value), {}))
        refused(path, "more than 2,000,000 operations")

    def test_bytes_of_the_pickle(self, tmp_path):
        value = tb.DICT + tb.text("a" * MAX_PICKLE_BYTES) + tb.NONE + tb.SETITEM
        path = written(tmp_path, tb.zip_file(tb.pickled(value), {}))
        refused(path, f"{MAX_PICKLE_BYTES} bytes are needed")

    def test_deep_nesting(self, tmp_path):
        """Neither the reader nor the end of the process recurses."""
        count = MAX_OPERATIONS // 4
        for value in (tb.LIST * count + b"a" * (count - 1), tb.EMPTY + b"\x85" * count):
            refused(written(tmp_path, tb.zip_file(tb.pickled(value), {})), "not a state dict")
        gc.collect()

    def test_a_value_within_itself(self, tmp_path):
        value = tb.DICT + b"q\0" + tb.text("model") + b"h\0" + tb.SETITEM
        refused(written(tmp_path, tb.zip_file(tb.pickled(value), {})), "'model' is a value of type")


class TestTensors:
    @pytest.mark.parametrize(
        ("part", "match"),
        [
            (replace(W, shape=(4, 4)), "does not lie within its storage of 12 elements"),
            (replace(W, offset=1), "offset 1, shape .3, 4. .* does not lie within"),
            (replace(W, strides=(5, 1)), r"strides \[5, 1\] does not lie"),
            (replace(W, shape=(0, 4), offset=13), "does not lie within"),
            (replace(W, shape=(2**62, 2**62), strides=(0, 0)), "is too large"),
            (replace(W, count=11), "the storage '0' has 48 bytes, which are not 11 elements"),
            (replace(W, key="7"), "the storage '7' is missing"),
        ],
    )
    def test_views_beyond_the_storage(self, tmp_path, part, match):
        refused(zipped(tmp_path, {"w": part}), match)

    def test_the_bytes_of_all_views_are_bounded(self, tmp_path):
        rows = ROOM // 16
        large = tb.Part("0", (rows, 4), (0, 1), 12)
        with TorchFile(zipped(tmp_path, {"a": large, "b": large})) as file:  # the same view
            assert file.info("b").nbytes == ROOM
        more = replace(large, shape=(rows + 1000, 4))
        refused(zipped(tmp_path, {"a": more}), "tensors have .* bytes together")
        refused(zipped(tmp_path, {"a": large, "b": replace(large, offset=1)}), "bytes together")

    @pytest.mark.parametrize("in_shards", [False, True])
    def test_the_parameters_of_a_small_file_are_bounded(self, tmp_path, in_shards):
        """One view may be many parameters, and each shard may have 512 MiB of views."""
        config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
        config |= {"vocab_size": ROOM // 64 // 4 * 3, "tie_word_embeddings": False}
        (tmp_path / "config.json").write_text(json.dumps(config))
        large = tb.Part("0", (config["vocab_size"], 16), (0, 1), 128)
        shapes = {"wpe.weight": (8, 16), "h.0.attn.c_attn.weight": (16, 48)}
        shapes |= {"h.0.attn.c_attn.bias": (48,), "h.0.attn.c_proj.weight": (16, 16)}
        shapes |= {"h.0.mlp.c_fc.weight": (16, 64), "h.0.mlp.c_fc.bias": (64,)}
        shapes["h.0.mlp.c_proj.weight"] = (64, 16)
        norms = ("h.0.ln_1", "h.0.ln_2", "ln_f")
        vectors = [f"{norm}.{part}" for norm in norms for part in ("weight", "bias")]
        vectors += ["h.0.attn.c_proj.bias", "h.0.mlp.c_proj.bias"]
        small = {
            f"transformer.{name}": replace(large, shape=shape, strides=(0, 1)[-len(shape) :])
            for name, shape in (shapes | dict.fromkeys(vectors, (16,))).items()
        }
        first, second = small | {"transformer.wte.weight": large}, {"lm_head.weight": large}
        files = {"1.bin": first, "2.bin": second} if in_shards else {"1.bin": first | second}
        for name, tensors in files.items():
            data = tb.zip_file(tb.state_pickle(tensors), {"0": bytes(512)})
            (tmp_path / name).write_bytes(data)
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        index = tmp_path / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=r"1\.bin: .*805\d+ bytes.* have \d{4} bytes"):
            jaxllm.load(index)
        assert main(["export", str(index), str(tmp_path / "out")]) == 2
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("dtype", ["ComplexFloatStorage", "ComplexDoubleStorage"])
    def test_complex_numbers(self, tmp_path, dtype):
        size = 8 if "Float" in dtype else 16
        path = zipped(tmp_path, {"w": replace(W, dtype=dtype)}, {"0": bytes(12 * size)})
        refused(
            path, f"'w' has dtype complex{8 * size}, which jaxllm does not read", UnsupportedError
        )

    @pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "uint32"])
    def test_dtypes_without_a_storage(self, tmp_path, dtype):
        size = {"uint16": 2, "uint32": 4}.get(dtype, 1)
        storage = tb.together(
            *(tb.text("storage"), tb.name("torch.storage.UntypedStorage"), tb.text("0")),
            *(tb.text("cpu"), tb.number(3 * size)),
        )
        arguments = tb.together(
            *(storage + b"Q", tb.number(0), tb.numbers([3]), tb.numbers([1]), b"\x89", tb.ORDERED),
            tb.name(f"torch.{dtype}"),
        )
        tensor = tb.name("torch._utils._rebuild_tensor_v3") + arguments + tb.REDUCE
        pickle = tb.pickled(tb.DICT + tb.text("w") + tensor + tb.SETITEM)
        data = np.arange(3, dtype=f"<u{size}")
        path = written(tmp_path, tb.zip_file(pickle, {"0": data.tobytes()}))
        if dtype.startswith("float8"):
            return refused(path, f"'w' has dtype {dtype}", UnsupportedError)
        np.testing.assert_array_equal(TorchFile(path).read("w"), data)

    def test_float64_is_refused_by_the_model(self, tmp_path):
        source = DATA / "torch_files" / "gpt2_hub"
        (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
        with open_weights(source) as old:
            tensors = {name: np.array(old.read(name), np.float64) for name in old.names()}
        parts = {name: tb.whole(name, x) for name, x in tensors.items()}
        zipped(tmp_path, parts, {name: x.tobytes() for name, x in tensors.items()})
        with pytest.raises(UnsupportedError, match=r"pytorch_model\.bin: wte\.weight is float64"):
            jaxllm.load(tmp_path)


class TestZipFiles:
    @pytest.mark.parametrize("member", ["archive/data.pkl", "archive/data/0", "archive/byteorder"])
    def test_compressed_members(self, tmp_path, member):
        path = zipped(tmp_path, {"w": W})
        with zipfile.ZipFile(path) as old:
            members = {name: old.read(name) for name in old.namelist()}
        with zipfile.ZipFile(path, "w") as new:
            for name, data in members.items():
                kind = zipfile.ZIP_DEFLATED if name == member else zipfile.ZIP_STORED
                new.writestr(name, data, kind)
        refused(path, f"'{member}' of the zip file is compressed", UnsupportedError)

    def test_encrypted_members(self, tmp_path):
        data = bytearray(tb.example(is_legacy=False))
        data[data.rindex(b"PK\1\2") + 8] |= 1
        refused(written(tmp_path, data), "is encrypted", UnsupportedError)

    def test_a_name_twice(self, tmp_path):
        path = zipped(tmp_path, {"w": W})
        with (
            pytest.warns(UserWarning, match="Duplicate name"),
            zipfile.ZipFile(path, "a") as archive,
        ):
            archive.writestr("archive/data/0", VALUES.tobytes())
        refused(path, "'archive/data/0' .*two members have this name")

    def test_overlapping_members(self, tmp_path):
        data = bytearray(zipped(tmp_path, {"w": W}).read_bytes())
        first = data.index(b"PK\1\2")  # the directory says that the first member is longer
        size = struct.unpack_from("<I", data, first + 20)[0] + 40
        struct.pack_into("<II", data, first + 20, size, size)
        struct.pack_into("<II", data, 18, size, size)
        refused(written(tmp_path, data), "'archive/data.pkl' and 'archive/version' .*overlap")

    @pytest.mark.parametrize(("offset", "what"), [(6, "flags"), (18, "size"), (30, "name")])
    def test_headers_that_contradict_the_directory(self, tmp_path, offset, what):
        data = bytearray(zipped(tmp_path, {"w": W}).read_bytes())
        data[offset] ^= 2
        refused(written(tmp_path, data), "'archive/data.pkl' .*another header than the directory")

    def test_other_ends(self, tmp_path):
        data = tb.example(is_legacy=False)
        end = "does not end with its directory"
        refused(written(tmp_path, data[:-1]), end)
        refused(written(tmp_path, data[: len(data) // 2]), end)
        refused(written(tmp_path, data + b"\0"), end)
        changed = bytearray(data)
        changed[-12] += 1  # the number of entries
        refused(written(tmp_path, changed), "not where its end says")
        changed = bytearray(data)
        changed[-12] -= 1
        changed[-14] -= 1
        refused(written(tmp_path, changed), "the zip file's directory has more than 4 entries")

    def test_no_pickle_or_two(self, tmp_path):
        refused(
            written(tmp_path, tb.zip_file(b"", {}, **{"b/data.pkl": b""})), "2 members data.pkl"
        )
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            archive.writestr("a/b", b"")
        refused(tmp_path / "pytorch_model.bin", "0 members data.pkl")

    def test_torchscript_and_other_files(self, tmp_path):
        pickle = tb.state_pickle({"w": W})
        path = written(tmp_path, tb.zip_file(pickle, STORED, **{"constants.pkl": b""}))
        refused(path, "a TorchScript program", UnsupportedError)
        path = written(tmp_path, tb.zip_file(pickle, STORED, **{"code/__torch__.py": b""}))
        refused(path, "a TorchScript program", UnsupportedError)
        refused(
            written(tmp_path, bytes(257) + b"ustar" + bytes(250)), "a tar file", UnsupportedError
        )
        refused(written(tmp_path, b"\x80\2}."), "not a file that torch.save wrote")
        refused(written(tmp_path, b""), "the file is empty")

    def test_byteorder(self, tmp_path):
        refused(zipped(tmp_path, {"w": W}, byteorder="middle"), "byteorder is ")
        assert TorchFile(zipped(tmp_path, {"w": W}, byteorder=None)).names() == ["w"]

    def test_bytes_after_the_pickle(self, tmp_path):
        path = written(tmp_path, tb.zip_file(tb.state_pickle({"w": W}) + b"x", STORED))
        refused(path, "1 bytes follow the pickle")


class TestLegacyFiles:
    def file(self, tmp_path, **options):
        pickle = tb.state_pickle({"w": W}, is_legacy=True)
        return written(tmp_path, tb.legacy_file(pickle, options.pop("storages", STORED), **options))

    def test_counts_and_ends(self, tmp_path):
        refused(
            self.file(tmp_path, counts={"0": 11}), "'0' has 11 elements, and its tensors say 12"
        )
        refused(
            self.file(tmp_path, storages={"0": bytes(40)}), "ends at byte .* incomplete download"
        )
        refused(self.file(tmp_path, storages={"0": bytes(52)}, counts={"0": 12}), "4 bytes follow")
        refused(self.file(tmp_path, storages={**STORED, "1": b""}), "other keys .* use: 1")
        refused(self.file(tmp_path, storages={"1": bytes(48)}), "other keys .* use: 0, 1")

    def test_the_order_is_that_of_the_list(self, tmp_path):
        parts = {f"w{key}": tb.Part(key, (2,), (1,), 2) for key in ("9", "10", "100")}
        values = {
            key: np.array([i, i + 1], np.float32)
            for i, key in enumerate(sorted(["9", "10", "100"]))
        }
        data = tb.legacy_file(
            tb.state_pickle(parts, is_legacy=True), {key: x.tobytes() for key, x in values.items()}
        )
        with TorchFile(written(tmp_path, data)) as file:
            assert file.names() == ["w9", "w10", "w100"]
            for key, expected in values.items():
                np.testing.assert_array_equal(file.read(f"w{key}"), expected)

    def test_another_version(self, tmp_path):
        data = bytearray(tb.example(is_legacy=True))
        data[len(tb.MAGIC) + 3] += 1
        refused(written(tmp_path, data), "not version 1001")


AUDIT = """
import sys, warnings
warnings.simplefilter("ignore")
from pathlib import Path
import numpy as np
from jaxllm.checkpoint.weight_files import open_weights
from jaxllm.checkpoint import torch_file
from jaxllm.common.errors import JaxLLMError
folder, *others = map(Path, sys.argv[1:])
seen = []
sys.addaudithook(lambda event, args: seen.append((event, str(args[:1]))))
for path in [folder, *others]:
    try:
        with open_weights(path) as source:
            for name in source.names():
                source.read(name)
    except JaxLLMError:
        pass
found, seen = seen, []
allowed = {"open", "mmap.__new__", "sys._getframe"}  # the last one by the warning of a wrapper
for event, args in found:
    inside = event != "open" or any(str(path) in args for path in [folder, *others])
    if event not in allowed or not inside:
        print(event, args)
print("events", len(found), "opened", sum(event == "open" for event, _ in found))
"""


@pytest.mark.parametrize("name", ["gpt2_hub", "t5_hub", "opt_shards", "llama_in_training"])
def test_reading_imports_calls_and_opens_nothing_else(tmp_path, name):
    other = tmp_path / "a.bin"
    value = tb.DICT + tb.text("w") + tb.name("collections.Counter") + tb.EMPTY + tb.REDUCE
    other.write_bytes(tb.zip_file(tb.pickled(value), {}))
    run = [sys.executable, "-c", AUDIT, str(DATA / "torch_files" / name), str(other)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[:-1] == [], done.stdout
    assert int(lines[-1].split()[-1]) >= 2


def test_no_module_of_checkpoint_can_unpickle():
    forbidden = {"pickle", "_pickle", "copyreg", "importlib", "marshal", "shelve"}
    paths = sorted((ROOT / "jaxllm" / "checkpoint").rglob("*.py"))
    assert "torch_file.py" in {path.name for path in paths}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not forbidden & {name.partition(".")[0] for name in names}, path
            assert not (isinstance(node, ast.Name) and node.id in ("eval", "exec", "__import__"))
