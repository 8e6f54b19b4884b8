"""300 damaged msgpack files: each error names the file and, where it is known, the tensor."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

import pytest
from flax_bytes import extension, packed
from paths import DATA
from weight_files import written

from jaxllm.checkpoint.flax_file import FlaxFile, FlaxView
from jaxllm.errors import CheckpointError

FILES = [
    DATA / "flax_files" / folder / "flax_model.msgpack"
    for folder in ("gpt2_chunks", "t5", "bart_bf16")
]
ORIGINALS = [path.read_bytes() for path in FILES]
CLAIMS = (b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff")
CLAIMS += (b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01")


def starts(data: bytes) -> list[int]:
    """First bytes of the arrays' extensions: those of three sizes of lengths."""
    pattern = rb"\xc7.\x01\x93|\xc8..\x01\x93|\xc9....\x01\x93"
    return [match.start() for match in re.finditer(pattern, data, re.DOTALL)]


def structure(data: bytes) -> list[int]:
    """Positions of all bytes that are not an array's numbers."""
    with FlaxFile(FILES[ORIGINALS.index(data)]) as file:
        pieces = [piece for entry in file.tensors.values() for piece in entry.pieces]
    numbers = {i for begin, end in pieces for i in range(begin, end)}
    return [i for i in range(len(data)) if i not in numbers]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(1, len(data))]


def flipped(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    result[rng.choice(structure(data))] ^= 1 << rng.randrange(8)
    return bytes(result)


def wrong_count(data: bytes, rng: random.Random) -> bytes:
    """The map at the top, or the length of an array's extension, has another count."""
    at = rng.choice([0, *(start + 1 for start in starts(data))])
    return data[:at] + bytes([(data[at] + rng.choice((-1, 1, 7))) % 256]) + data[at + 1 :]


def huge_claim(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice(starts(data))
    return data[:at] + rng.choice(CLAIMS) + data[at + 4 :]


def other_extension(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice(starts(data))
    return data[:at] + extension(rng.choice((0, 2, 3, 4, 127, -1)), b"\x92\x00\x00") + data[at:]


def nested(data: bytes, rng: random.Random) -> bytes:
    at = rng.choice(starts(data))
    return data[:at] + packed({"x": None})[:-1] * rng.choice((40, 5000)) + data[at:]


DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    *(cut, flipped, wrong_count, huge_claim, other_extension, nested)
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_damaged_files(tmp_path, damage):
    rng = random.Random(damage.__name__)
    messages: list[str] = []
    for number in range(50):
        path = written(tmp_path / f"{number}.msgpack", damage(ORIGINALS[number % 3], rng))
        try:
            with FlaxView(FlaxFile(path)) as view:
                for name in view.names():  # a flipped letter of a name leaves a sound file
                    view.read(name)
        except CheckpointError as error:
            messages.append(str(error).replace(str(path), "FILE"))
    assert len(messages) >= (15 if damage is flipped else 50)
    where = re.compile(r"FILE: (tensor )?('[^']+'|the outermost value|\d+ bytes follow)")
    assert [message for message in messages if not where.match(message)] == []
