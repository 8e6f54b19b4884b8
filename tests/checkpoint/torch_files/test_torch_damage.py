"""Damaged and hostile files of torch load or raise an error that names them, in bounded memory.

Each file is read in a child process with 4 GiB and 10 seconds. ``JAXLLM_FUZZ_N`` sets their number.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import fuzz_seeds
import numpy as np
import pytest
import torch_bytes as tb
from fuzzing import Outcome, fuzz_count, mutate, run_batch

VALUES = np.arange(12, dtype=np.float32)
KINDS = ["torch_zip", "torch_legacy"]
OPERATIONS = b"\x80(N\x88\x89KMJ\x8aGXqrhj)\x85\x86\x87t]ae}sucQRb.oi0P\x81\x93\x95"
CLAIMS = (0, 1, 3, 11, 13, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -1, -(2**31))


def check(target: str, files: list[Path]) -> list[Outcome]:
    outcomes = run_batch(f"fuzz_targets:{target}", files)
    assert [outcome for outcome in outcomes if not outcome.harmless] == []
    greedy = [o for o in outcomes if o.grown_mib > 2 * o.path.stat().st_size / 2**20 + 512]
    assert greedy == []
    for outcome in outcomes:
        if outcome.status == "refused":
            assert str(outcome.path) in outcome.detail
    return outcomes


def refused(outcomes: list[Outcome]) -> int:
    return sum(outcome.status == "refused" for outcome in outcomes)


def written(folder: Path, contents: list[bytes]) -> list[Path]:
    paths = [folder / f"{number}.bin" for number in range(len(contents))]
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    return paths


def packed(target: str, pickle: bytes, storages: dict[str, bytes]) -> bytes:
    return (tb.legacy_file if target == "torch_legacy" else tb.zip_file)(pickle, storages)


def described(data: bytes) -> list[tuple[int, int]]:
    """Ranges of a file's bytes that are no numbers of tensors: headers, pickles, directory."""
    if data.startswith(tb.MAGIC):
        return [(0, data.rindex(b"e.") + 10)]
    start = data.index(b"data/0") if b"data/0" in data else len(data) // 2
    return [(0, start), (data.index(b"PK\1\2"), len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    """A changed bit or byte outside the tensors' numbers."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        begin, end = rng.choice(described(data))
        position = rng.randrange(begin, end)
        changed[position] = rng.choice(
            [changed[position] ^ (1 << rng.randrange(8)), rng.randrange(256)]
        )
    return bytes(changed)


def with_claims(target: str, rng: random.Random) -> bytes:
    """Offsets, sizes, strides and counts that are wrong or huge."""
    numbers = {
        "offset": rng.choice((0, rng.choice(CLAIMS))),
        "shape": tuple(rng.choice(CLAIMS) for _ in range(2)),
        "strides": tuple(rng.choice(CLAIMS) for _ in range(2)),
        "count": rng.choice((12, rng.choice(CLAIMS))),
    }
    part = tb.Part("0", **numbers, dtype=rng.choice(["float32", "bool", "ComplexFloatStorage"]))
    parts = {"a.weight": tb.whole("0", VALUES), "b.weight": part}
    pickle = tb.state_pickle(parts, is_legacy=target == "torch_legacy")
    return packed(target, pickle, {"0": VALUES.tobytes()})


def with_operations(target: str, rng: random.Random) -> bytes:
    """Operations that are drawn, some of them unknown, within a state dict."""
    names = ("collections.Counter", "torch.FloatStorage", "a.b", "torch._utils.x")
    drawn = [bytes([rng.choice(OPERATIONS)]) for _ in range(rng.randint(1, 30))]
    pieces = [tb.text("w"), tb.number(rng.choice(CLAIMS)), tb.name(rng.choice(names)), tb.ORDERED]
    rng.shuffle(values := [*drawn, *pieces])
    inner = tb.DICT + tb.text("a.weight") + b"".join(values) + tb.SETITEM
    return packed(target, tb.pickled(inner), {"0": VALUES.tobytes()})


def nested(target: str, rng: random.Random) -> bytes:
    depth = rng.choice((2, 100, 50_000, 400_000))
    value = rng.choice(
        (
            tb.LIST * depth + b"a" * (depth - 1),
            tb.EMPTY + b"\x85" * depth,
            tb.MARK * depth + tb.TUPLE * depth,
            (tb.DICT + tb.text("model")) * depth + tb.NONE + tb.SETITEM * depth,
            b"]q\0" + b"h\0h\0\x86q\0" * depth,
        )
    )
    key = rng.choice(("model", "a.weight"))
    return packed(target, tb.pickled(tb.DICT + tb.text(key) + value + tb.SETITEM), {})


@pytest.mark.ci
@pytest.mark.parametrize("target", KINDS)
def test_damaged_files(target, tmp_path):
    originals = fuzz_seeds.seeds(target, tmp_path)
    whole = check(target, written(tmp_path, originals))
    assert {outcome.status for outcome in whole} == {"ok"}
    count = fuzz_count(300) // 6
    rng = random.Random(target)
    cut = [data[: rng.randrange(len(data))] for data in originals * (count // 2)]
    assert refused(check(target, written(tmp_path, cut))) == len(cut)
    bits = [flipped(rng.choice(originals), rng) for _ in range(count)]
    assert refused(check(target, written(tmp_path, bits))) > len(bits) / 3
    edited = [mutate(rng.choice(originals), rng) for _ in range(count)]
    assert refused(check(target, written(tmp_path, edited))) > len(edited) / 3
    for make in (with_claims, with_operations, nested):
        outcomes = check(target, written(tmp_path, [make(target, rng) for _ in range(count)]))
        assert refused(outcomes) > 0.9 * len(outcomes)
        named = [o for o in outcomes if re.search(r"'(a\.weight|b\.weight|w|model|0)'", o.detail)]
        assert len(named) > 0.3 * len(outcomes), [o.detail for o in outcomes]


def many_views(target: str, count: int) -> bytes:
    """A state dict of this many tensors, all one view with as many axes as NumPy has."""
    first = tb.Part("0", (1,) * 64, (1,) * 64, 12).pickle(is_legacy=target == "torch_legacy")
    sizes = tb.numbers([1] * 64)
    first = first.replace(b"v2\n", b"v2\nq\2").replace(b"tQ", b"tQq\3")
    first = first.replace(sizes, sizes + b"q\1").replace(tb.ORDERED, tb.ORDERED + b"q\4")
    other = b"X\5\0\0\0%05xh\2(h\3K\0h\1h\1\x89h\4tR"
    items = tb.text("a") + first + b"".join(other % i for i in range(count - 1))
    return tb.pickled(tb.ORDERED + tb.MARK + items + tb.SETITEMS)


@pytest.mark.ci
@pytest.mark.parametrize("target", KINDS)
def test_the_largest_pickles(target, tmp_path):
    """As many operations as are read, of the kinds that take most memory or time."""
    count = 1_999_000
    values = {
        "dicts": tb.LIST + (b"}K\0K\0sa") * (count // 5),
        "marks": tb.MARK * (count // 2) + tb.TUPLE * (count // 2),
        "memo": b"".join(b"]r" + i.to_bytes(4, "little") + b"a" for i in range(count // 3)),
        "floats": tb.LIST + (b"G\0\1\2\3\4\5\6\7a") * (count // 2),
        "wide": tb.text("a" * (2**24 - 100) + "😀"),
        "texts": tb.LIST + b"".join(b"X\4\0\0\0%04xa" % (i % 65536) for i in range(count // 2)),
    }
    values["memo"] = tb.LIST + values["memo"]
    files = []
    for name, value in values.items():
        pickle = tb.pickled(tb.DICT + tb.text("a.weight") + value + tb.SETITEM)
        files.append(tmp_path / name)
        files[-1].write_bytes(packed(target, pickle, {}))
    assert refused(check(target, files)) == len(files)
    views = tmp_path / "views"
    views.write_bytes(packed(target, many_views(target, 180_000), {"0": VALUES.tobytes()}))
    (outcome,) = run_batch(f"fuzz_targets:{target}", [views], seconds=60)
    assert outcome.status == "ok", outcome
    assert outcome.grown_mib < 512
