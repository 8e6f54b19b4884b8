"""Malicious weight files load or raise a JaxLLMError, quickly and in bounded memory.

Each file is read in a child process with 4 GiB and 10 seconds. ``JAXLLM_FUZZ_N`` sets the number of
mutated files for each format.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
import tarfile
from collections import Counter
from pathlib import Path

import fuzz_seeds
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from flax_bytes import MALFORMED as MALFORMED_MSGPACK
from flax_bytes import packed
from fuzzing import fuzz_count, mutate, run_batch
from paths import DATA
from small_gguf import EXTREMES, gguf_file
from weight_files import (
    MALFORMED_GGUF,
    MALFORMED_SAFETENSORS,
    every_dtype,
    gguf_bytes,
    gguf_field,
    gguf_string,
    gguf_tensor,
    safetensors_bytes,
    written,
)

from jaxllm.checkpoint.gguf.reader import MAX_HEADER_BYTES as MAX_GGUF_HEADER
from jaxllm.checkpoint.msgpack import MAX_KEY_BYTES, MAX_VALUES
from jaxllm.checkpoint.safetensors import DTYPES, MAX_HEADER_BYTES, write_safetensors

COUNTS = [
    pytest.param(fuzz_count(500), id="some"),
    pytest.param(fuzz_count(10_000), id="many", marks=pytest.mark.slow),
]


def check(target: str, files: list[Path]) -> Counter[str]:
    """Assert that every file is harmless; how many did what."""
    outcomes = run_batch(f"fuzz_targets:{target}", files)
    assert [outcome for outcome in outcomes if not outcome.harmless] == []
    greedy = [o for o in outcomes if o.grown_mib > 2 * o.path.stat().st_size / 2**20 + 512]
    assert greedy == []
    return Counter(outcome.status for outcome in outcomes)


def mutants(original: bytes, count: int, folder: Path, suffix: str, head: int = 0) -> list[Path]:
    """Seeded mutations; most of them within the first ``head`` bytes, where it is given."""
    rng = random.Random(f"{suffix} {count}")
    files = []
    for i in range(count):
        if head and rng.random() < 0.8:
            data = mutate(original[:head], rng) + original[head:]
        else:
            data = mutate(original, rng)
        files.append(written(folder / f"{i}{suffix}", data))
    return files


def safetensors_file(original: bytes, rng: random.Random) -> bytes:
    """The file with one to three numbers, dtypes or names of its header changed."""
    end = 8 + int.from_bytes(original[:8], "little")
    header = json.loads(original[8:end])
    entries = [entry for name, entry in header.items() if name != "__metadata__"]
    for _ in range(rng.randint(1, 3)):
        entry, other = rng.choice(entries), rng.choice(entries)
        match rng.randrange(5):
            case 0:
                entry["shape"] = [rng.choice(EXTREMES) for _ in range(rng.randint(0, 3))]
            case 1:
                entry["data_offsets"][rng.randrange(2)] = rng.choice([*EXTREMES, -1, 1.5, None])
            case 2:
                entry["dtype"] = rng.choice([*DTYPES, "F8_E4M3", "", 1])
            case 3:
                entry.update(json.loads(json.dumps(other)))
            case 4:
                entry["shape"] = [*entry["shape"], 1]
    return safetensors_bytes(header, original[end:])


class TestMutations:
    @pytest.mark.ci
    @pytest.mark.parametrize("count", COUNTS)
    def test_safetensors(self, count, tmp_path):
        write_safetensors(tmp_path / "a.safetensors", every_dtype())
        original = (tmp_path / "a.safetensors").read_bytes()
        head = 8 + int.from_bytes(original[:8], "little")
        files = mutants(original, count // 2, tmp_path, ".safetensors", head)
        rng = random.Random(count)
        for i in range(count // 2):
            data = safetensors_file(original, rng)
            files.append(written(tmp_path / f"numbers-{i}.safetensors", data))
        statuses = check("safetensors", files)
        assert statuses["refused"] > count / 2
        assert statuses["ok"] > 0

    @pytest.mark.ci
    @pytest.mark.parametrize("count", COUNTS)
    def test_index(self, count, tmp_path):
        original = fuzz_seeds.with_shards(tmp_path)
        files = mutants(original, count, tmp_path, ".json")
        files.append(written(tmp_path / "whole.json", original))
        statuses = check("safetensors_index", files)
        assert statuses["refused"] > count / 2
        assert statuses["ok"] > 0

    @pytest.mark.ci
    @pytest.mark.parametrize("count", COUNTS)
    def test_flax_msgpack(self, count, tmp_path):
        original = fuzz_seeds.flax_msgpack()
        files = mutants(original, count, tmp_path, ".msgpack")
        files.append(written(tmp_path / "whole.msgpack", original))
        statuses = check("flax_msgpack", files)
        assert statuses["refused"] > count / 2
        assert statuses["ok"] > 0

    @pytest.mark.ci
    @pytest.mark.parametrize("count", COUNTS)
    def test_gguf(self, count, tmp_path):
        original = gguf_file()
        assert check("gguf", [written(tmp_path / "whole.gguf", original)]) == {"ok": 1}
        head = original.index(b"blk.0.ffn_gate") + 64
        files = mutants(original, count // 2, tmp_path, ".gguf", head)
        rng = random.Random(count)
        for i in range(count // 2):
            files.append(written(tmp_path / f"numbers-{i}.gguf", gguf_file(rng)))
        statuses = check("gguf", files)
        assert statuses["refused"] > count / 2
        assert statuses["ok"] > 0


class TestDirected:
    @pytest.mark.ci
    def test_the_malformed_safetensors(self, tmp_path):
        contents = [safetensors_bytes(h, b"\0" * n) for h, n, _ in MALFORMED_SAFETENSORS.values()]
        files = [written(tmp_path / f"{i}.safetensors", c) for i, c in enumerate(contents)]
        assert check("safetensors", files) == {"refused": len(files)}

    @pytest.mark.ci
    def test_the_malformed_gguf(self, tmp_path):
        contents = [data for data, _ in MALFORMED_GGUF.values()]
        files = [written(tmp_path / f"{i}.gguf", c) for i, c in enumerate(contents)]
        assert check("gguf", files) == {"refused": len(files)}

    @pytest.mark.ci
    def test_the_malformed_msgpack(self, tmp_path):
        contents = [data for data, _ in MALFORMED_MSGPACK.values()]
        files = [written(tmp_path / f"{i}.msgpack", c) for i, c in enumerate(contents)]
        assert check("flax_msgpack", files) == {"refused": len(files)}

    @pytest.mark.ci
    def test_msgpack_with_the_most_values_and_names(self, tmp_path):
        scalar = packed(np.ones((), np.float32))
        names = [b"\xa6%06d" % i for i in range(MAX_VALUES + 10)]
        count = MAX_VALUES - 10
        contents = [
            b"\xdf" + struct.pack(">I", count) + b"".join(name + scalar for name in names[:count]),
            b"\xdf" + struct.pack(">I", len(names)) + b"".join(name + b"\x80" for name in names),
            packed({"k": None})[:-1] + b"\xdd" + struct.pack(">I", count) + b"\xc0" * count,
        ]
        long, leaves = packed("k" * MAX_KEY_BYTES), 10_000
        nested = b"".join(name + scalar for name in names[:leaves])
        contents.append((b"\x81" + long) * 30 + b"\xde" + struct.pack(">H", leaves) + nested)
        files = [written(tmp_path / f"{i}.msgpack", c) for i, c in enumerate(contents)]
        assert check("flax_msgpack", files) == {"ok": 1, "refused": 3}

    @pytest.mark.ci
    def test_many_tensors(self, tmp_path):
        entry = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        header = json.dumps({f"{i}": entry for i in range(50_000)}).encode()
        files = [written(tmp_path / "many.safetensors", safetensors_bytes(header))]
        assert check("safetensors", files) == {"ok": 1}

    @pytest.mark.slow
    def test_the_largest_safetensors_headers(self, tmp_path):
        room = MAX_HEADER_BYTES - 20
        headers = [
            b'{"w":[' + item * (room // len(item)) + b"0]}"
            for item in (b"[],", b"{},", b'"",', b"0,", b"1e9,", b'{"":0},')
        ]
        headers.append(b'{"' + b"w" * room + b'":1}')
        headers.append(b'{"w":' + b"9" * room + b"}")
        headers.append(b'{"w":' * (room // 6) + b"1" + b"}" * (room // 6))
        assert all(len(header) <= MAX_HEADER_BYTES for header in headers)
        files = [
            written(tmp_path / f"{i}.safetensors", safetensors_bytes(header))
            for i, header in enumerate(headers)
        ]
        assert check("safetensors", files) == {"refused": len(files)}

    @pytest.mark.slow
    def test_the_largest_gguf_headers(self, tmp_path):
        room = MAX_GGUF_HEADER - 100
        arrays = [
            struct.pack("<IIQ", 9, 8, room // 8) + b"\0" * (room // 8 * 8),
            struct.pack("<IIQ", 9, 8, room // 11) + gguf_string("見") * (room // 11),
            struct.pack("<IIQ", 9, 0, 2**24) + b"\1" * 2**24,
        ]
        contents = [gguf_bytes([gguf_field("k", array)], []) for array in arrays]
        contents.append(gguf_bytes([gguf_field(str(i), i) for i in range(500_000)], []))
        many = [gguf_tensor(str(i), [1], 0, 32 * i) for i in range(500_000)]
        contents.append(gguf_bytes([], many))
        files = [written(tmp_path / f"{i}.gguf", c) for i, c in enumerate(contents)]
        assert check("gguf", files) == {"refused": len(files)}


@pytest.mark.parametrize("count", COUNTS)
def test_fuzz_t5x_msgpack(count: int, tmp_path: Path) -> None:
    for name in ("t5_1_1_inline", "umt5_scanned"):
        with tarfile.open(DATA / "t5x" / f"{name}.tar.gz") as archive:
            archive.extractall(tmp_path, filter="data")
        step = tmp_path / name / "checkpoint_7"  # the arrays lie beside the files
        original = (step / "checkpoint").read_bytes()
        found = check("t5x", mutants(original, count // 2, step, ".t5x", head=4096))
        assert found.keys() >= {"ok", "refused"}


def test_fuzz_t5x_arrays(tmp_path: Path) -> None:
    """Headers of arrays, each in a checkpoint of its own with this array alone."""
    with tarfile.open(DATA / "t5x" / "umt5_scanned.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    array = "target.decoder.logits_dense.kernel"
    original = tmp_path / "umt5_scanned" / "checkpoint_7" / array
    spec = {"kvstore": {"path": f"{array}/"}, "driver": "zarr", "dtype": "float32"}
    spec["metadata"] = {"shape": [8, 256]}
    tree = {"target": {"decoder": {"logits_dense": {"kernel": spec}}}}
    rng, files = random.Random(0), []
    for number in range(fuzz_count(200)):
        step = tmp_path / str(number)
        shutil.copytree(original, step / array)
        (step / "checkpoint").write_bytes(msgpack_serialize(tree))
        header = json.loads((original / ".zarray").read_text())
        field = rng.choice(sorted(header))
        sizes = [rng.choice(EXTREMES) for _ in range(rng.randint(0, 3))]
        header[field] = rng.choice([sizes, {"id": "blosc"}, None, "|O", "<f8", -1, "F"])
        data = json.dumps(header).encode()
        data = data if rng.random() < 0.7 else mutate(data, rng)
        files.append(written(step / array / ".zarray", data))
    found = check("t5x", files)
    assert found["refused"] > len(files) // 2
