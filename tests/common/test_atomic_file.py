"""Files that are there as a whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.common.atomic_file import replacing, write_whole


def write_half(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_bytes(b"half of the n")
        raise OSError("the disk is full")


def test_a_failure_leaves_what_was_there_and_nothing_beside_it(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, b"old")
    with pytest.raises(OSError, match="full"):
        write_half(path)
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_writer_left_is_no_hindrance(tmp_path):
    path = tmp_path / "report.json"
    (tmp_path / ".report.json.partial").write_bytes(b"more than the new one, but only half")
    write_whole(path, b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]
