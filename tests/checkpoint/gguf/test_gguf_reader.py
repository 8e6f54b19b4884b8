"""GGUF files: valid files give the right arrays, malformed ones a message."""

from __future__ import annotations

import struct
import time

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from weight_files import (
    MALFORMED_GGUF,
    VALID,
    Q,
    gguf_bytes,
    gguf_field,
    gguf_string,
    gguf_tensor,
    random_blocks,
    with_tensors,
    write_gguf,
    written,
)

from jaxllm.batch.job.identity import checkpoint_digests
from jaxllm.checkpoint.gguf import reader
from jaxllm.checkpoint.gguf.reader import MAX_HEADER_BYTES, GGUFFile
from jaxllm.common.errors import CheckpointError, JaxLLMError, MissingFileError, UnsupportedError


def nibbles(data: bytes) -> list[int]:
    """The low halves of the bytes, then the high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q8_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack_from("<e", block)
    return [scale * value for value in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack_from("<e", block)
    return [scale * (value - 8) for value in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    scale, minimum = struct.unpack_from("<2e", block)
    return [scale * value + minimum for value in nibbles(block[4:])]


def q4_k(block: bytes) -> list[float]:
    """ggml's block_q4_K: 8 sub-blocks of 32, whose 6-bit scales and minima share 12 bytes."""
    scale, scale_of_minima = struct.unpack_from("<2e", block)
    packed, quants = block[4:16], block[16:]
    values = []
    for sub in range(8):
        if sub < 4:
            d, m = packed[sub] & 63, packed[sub + 4] & 63
        else:
            d = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4
            m = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4
        for byte in quants[sub // 2 * 32 : sub // 2 * 32 + 32]:
            quant = byte >> 4 if sub % 2 else byte & 15
            values.append(scale * d * quant - scale_of_minima * m)
    return values


def q6_k(block: bytes) -> list[float]:
    """ggml's block_q6_K: 4 low bits, 2 high bits, an 8-bit scale for each 16 values."""
    low, high = block[:128], block[128:192]
    scales = struct.unpack_from("<16b", block, 192)
    (scale,) = struct.unpack_from("<e", block, 208)
    values = []
    for i in range(256):
        half, quarter, lane = i // 128, i % 128 // 32, i % 32
        byte = low[64 * half + 32 * (quarter % 2) + lane]
        four = byte >> 4 if quarter >= 2 else byte & 15
        two = high[32 * half + lane] >> 2 * quarter & 3
        values.append(scale * scales[i // 16] * ((two << 4 | four) - 32))
    return values


LOOPS = {Q.Q8_0: q8_0, Q.Q4_0: q4_0, Q.Q4_1: q4_1, Q.Q4_K: q4_k, Q.Q6_K: q6_k}


class TestTypes:
    @pytest.mark.parametrize("kind", LOOPS, ids=lambda kind: kind.name)
    def test_quantized_types(self, kind, tmp_path):
        blocks = random_blocks(kind, 5, 512)
        with write_gguf(tmp_path / "a.gguf", {"w": (blocks, kind)}) as file:
            assert file.info("w").shape == (5, 512)
            assert file.info("w").dtype == np.float32
            assert file.info("w").nbytes == blocks.size
            assert file.quantization("w") == kind.name
            actual = file.read("w")
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, gguf.quants.dequantize(blocks, kind))
        size = GGML_QUANT_SIZES[kind][1]
        full = blocks.reshape(-1, size)
        by_loop = np.array([LOOPS[kind](block.tobytes()) for block in full]).reshape(5, 512)
        np.testing.assert_allclose(actual, by_loop, rtol=1e-6, atol=1e-6 * np.abs(by_loop).max())

    def test_large_tensors_are_dequantized_in_parts(self, tmp_path):
        blocks = random_blocks(Q.Q4_0, 300, 1024)  # more values than go through at once
        file = write_gguf(tmp_path / "a.gguf", {"w": (blocks, Q.Q4_0)})
        expected = gguf.quants.dequantize(blocks, Q.Q4_0)
        np.testing.assert_array_equal(file.read("w"), expected)

    def test_plain_types_are_not_copied(self, tmp_path):
        values = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
        bf16 = values.astype(ml_dtypes.bfloat16)
        file = write_gguf(
            tmp_path / "a.gguf",
            {
                "f32": (values, None),
                "f16": (values.astype(np.float16), None),
                "bf16": (bf16.view(np.uint8), Q.BF16),
            },
        )
        for name, expected in ("f32", values), ("f16", values.astype(np.float16)), ("bf16", bf16):
            array = file.read(name)
            assert array.dtype == file.info(name).dtype == expected.dtype
            assert array.tobytes() == expected.tobytes()
            assert array.shape == (3, 4)
            assert not array.flags.writeable
            assert np.shares_memory(array, file.read(name))
        file.close()
        assert array.tobytes() == bf16.tobytes()
        with pytest.raises(CheckpointError, match="after close"):
            file.read("f32")

    def test_nan_scales_give_nan_without_a_warning(self, tmp_path):
        blocks = random_blocks(Q.Q8_0, 1, 64)
        blocks[0, :2] = np.array([np.inf], np.float16).view(np.uint8)
        blocks[0, 2] = 0
        file = write_gguf(tmp_path / "a.gguf", {"w": (blocks, Q.Q8_0)})
        assert np.isnan(file.read("w")[0, 0])

    @pytest.mark.parametrize("name", reader._OTHER_TYPES)
    def test_types_that_the_gguf_package_reads(self, name, tmp_path, monkeypatch):
        kind = Q[name]
        monkeypatch.setattr(reader, "_CHUNK_VALUES", 3 * GGML_QUANT_SIZES[kind][0])
        data = np.random.default_rng(0).integers(
            0, 256, (5, 1024 // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]), np.uint8
        )
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(data, kind)
        file = write_gguf(tmp_path / "a.gguf", {"w": (data, kind)})
        assert file.info("w").shape == (5, 1024)
        np.testing.assert_array_equal(file.read("w"), expected)
        part = file.read("w", (slice(1, 4), slice(5, 700)))
        np.testing.assert_array_equal(part, expected[1:4, 5:700])
        assert file.blocks("w") is None

    @pytest.mark.ci
    def test_types_of_the_gguf_package_are_read_in_large_parts(self):
        """16 blocks at a time, as the package reads many rows, take five times as long."""
        data = np.zeros(22 << 16, np.uint8)
        seconds = []
        for many_rows in (False, True):
            start = time.process_time()
            if many_rows:
                gguf.quants.dequantize(data.reshape(-1, 22), Q.Q5_0)
            else:
                reader._dequantize(data, (1 << 16, 32), Q.Q5_0)
            seconds.append(time.process_time() - start)
        assert seconds[0] < seconds[1] / 2

    def test_every_type_that_the_gguf_package_reads(self):
        known = {kind.name for kind in gguf.quants._type_traits}
        assert known == {"BF16", *reader.BLOCK_FORMATS, *reader._OTHER_TYPES}

    @pytest.mark.parametrize("kind", [Q.Q8_1, Q.Q8_K, Q.I32], ids=lambda k: k.name)
    def test_other_types_are_unsupported(self, kind, tmp_path):
        size, block_bytes = GGML_QUANT_SIZES[kind]
        data = gguf_bytes([], [gguf_tensor("w", [size], kind, 0)], b"\0" * block_bytes)
        file = GGUFFile(written(tmp_path / "a.gguf", data))
        with pytest.raises(UnsupportedError, match=f"'w' has the type {kind.name}"):
            file.read("w")

    def test_four_dimensions(self, tmp_path):
        values = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
        file = write_gguf(tmp_path / "a.gguf", {"w": (values, None)})
        np.testing.assert_array_equal(file.read("w"), values)


class TestMetadata:
    def test_every_type(self, tmp_path):
        file = write_gguf(
            tmp_path / "a.gguf",
            {},
            uint8=("u8", 255),
            int8=("i8", -128),
            uint16=("u16", 65535),
            int16=("i16", -32768),
            uint32=("u32", 2**32 - 1),
            int32=("i32", -(2**31)),
            uint64=("u64", 2**64 - 1),
            int64=("i64", -(2**63)),
            float32=("f32", 0.5),
            float64=("f64", 0.1),
            bool=("yes", True),
            string=("text", "Ġ見"),
        )
        expected = {
            "general.architecture": "llama",
            "u8": 255,
            "i8": -128,
            "u16": 65535,
            "i16": -32768,
            "u32": 2**32 - 1,
            "i32": -(2**31),
            "u64": 2**64 - 1,
            "i64": -(2**63),
            "f32": 0.5,
            "f64": 0.1,
            "yes": True,
            "text": "Ġ見",
        }
        assert file.metadata == expected
        assert [type(v) for v in file.metadata.values()] == [type(v) for v in expected.values()]

    @pytest.mark.parametrize("version", [2, 3])
    def test_arrays(self, version, tmp_path):
        fields = [
            gguf_field("strings", ["a", "", "b"]),
            gguf_field("none", []),
            gguf_field("ints", struct.pack("<IIQ3i", 9, 5, 3, 1, -2, 3)),
            gguf_field("floats", struct.pack("<IIQ2f", 9, 6, 2, 0.5, -1)),
            gguf_field("bools", struct.pack("<IIQ2?", 9, 7, 2, True, False)),
        ]
        file = GGUFFile(written(tmp_path / "a.gguf", gguf_bytes(fields, [], version=version)))
        assert file.metadata["strings"] == ["a", "", "b"]
        assert file.metadata["none"] == []
        for key, dtype, expected in (
            ("ints", np.int32, [1, -2, 3]),
            ("floats", np.float32, [0.5, -1]),
            ("bools", np.bool_, [True, False]),
        ):
            assert file.metadata[key].dtype == dtype
            assert file.metadata[key].tolist() == expected

    def test_alignment(self, tmp_path):
        fields = [gguf_field("general.alignment", 128)]
        tensors = [gguf_tensor("a", [1], 0, 0), gguf_tensor("b", [1], 0, 128)]
        data = struct.pack("<f124xf", 1, 2)
        contents = gguf_bytes(fields, tensors, data, alignment=128)
        file = GGUFFile(written(tmp_path / "a.gguf", contents))
        assert [file.read(name).tolist() for name in file.names()] == [[1], [2]]


class TestMalformed:
    @pytest.mark.parametrize("case", MALFORMED_GGUF)
    def test_header(self, case, tmp_path):
        data, message = MALFORMED_GGUF[case]
        path = written(tmp_path / "a.gguf", data)
        start = time.process_time()
        with pytest.raises(CheckpointError, match=message) as error:
            GGUFFile(path)
        assert time.process_time() - start < 1
        assert str(path) in str(error.value)

    def test_the_file_that_hangs_ggufs_own_reader_has_49_bytes(self):
        assert len(MALFORMED_GGUF["a key of 2**63 bytes (49 bytes)"][0]) == 49

    def test_every_truncation_is_noticed(self, tmp_path):
        fields = [gguf_field("general.name", "tiny"), gguf_field("tokens", ["a", "b"])]
        data = gguf_bytes(fields, [VALID], b"\0" * 16)
        GGUFFile(written(tmp_path / "a.gguf", data))
        for size in range(len(data)):
            with pytest.raises(CheckpointError):
                GGUFFile(written(tmp_path / "a.gguf", data[:size]))

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (gguf_bytes([], [], version=1), "version 1"),
            (gguf_bytes([], [], version=4), "version 4"),
            (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        ],
    )
    def test_other_versions_are_unsupported(self, data, message, tmp_path):
        with pytest.raises(UnsupportedError, match=message):
            GGUFFile(written(tmp_path / "a.gguf", data))

    def test_no_file(self, tmp_path):
        with pytest.raises(MissingFileError):
            GGUFFile(tmp_path / "none.gguf")
        with pytest.raises(CheckpointError, match="empty"):
            GGUFFile(written(tmp_path / "a.gguf", b""))

    def test_an_unknown_name_is_named(self, tmp_path):
        file = GGUFFile(written(tmp_path / "a.gguf", with_tensors(VALID)))
        for call in (file.read, file.info, file.quantization):
            with pytest.raises(CheckpointError, match="no tensor is named 'v'"):
                call("v")

    def test_the_header_has_a_limit(self, tmp_path):
        """A sparse file whose tensor list would lie beyond the part that is parsed."""
        strings = 7
        field = gguf_string("k") + struct.pack("<IIQ", 9, 8, strings)
        head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field
        path = tmp_path / "a.gguf"
        size = 1 << 24
        with path.open("wb") as file:
            file.write(head)
            for _ in range(strings):
                file.write(struct.pack("<Q", size))
                file.seek(size, 1)
            file.truncate()
        assert path.stat().st_size > MAX_HEADER_BYTES
        with pytest.raises(CheckpointError, match="ends within an element of 'k'"):
            GGUFFile(path)


class TestSmolLM2:
    def test_opens_in_half_a_second(self, smollm2_gguf):
        seconds = []
        for _ in range(3):
            start = time.process_time()
            file = GGUFFile(smollm2_gguf)
            seconds.append(time.process_time() - start)
        assert min(seconds) < 0.5
        assert len(file.names()) == 272
        assert len(file.metadata["tokenizer.ggml.tokens"]) == 49152
        assert file.metadata["llama.rope.freq_base"] == 100000.0

    def test_truncated(self, smollm2_gguf, tmp_path):
        with smollm2_gguf.open("rb") as file:
            head = file.read(3_000_000)
        for size in (100_000, 1_000_000, 3_000_000):
            with pytest.raises(JaxLLMError, match="ends"):
                GGUFFile(written(tmp_path / "a.gguf", head[:size]))


def test_digests_of_a_folder_are_those_of_its_file(tmp_path):
    digests_of = {}
    for value in (5, 6):
        written(tmp_path / "a.gguf", gguf_bytes([gguf_field("k", value)], []))
        digests = checkpoint_digests(tmp_path)
        assert digests == checkpoint_digests(tmp_path / "a.gguf")
        assert digests.keys() == {"model weights", "token ids"}
        digests_of[value] = digests
    assert digests_of[5] != digests_of[6]
