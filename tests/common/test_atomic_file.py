"""Atomic file writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.common.files import replacing, write_whole


def fail_halfway(path: Path) -> None:
    with replacing(path) as partial:
        partial.write_bytes(b"half of the n")
        raise OSError("the disk is full")


def test_failed_write_keeps_old_file_and_leaves_no_temporary(tmp_path):
    path = tmp_path / "report.json"
    write_whole(path, b"old")
    with pytest.raises(OSError, match="full"):
        fail_halfway(path)
    assert path.read_bytes() == b"old"
    write_whole(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_leftover_of_killed_writer_is_replaced(tmp_path):
    path = tmp_path / "report.json"
    (tmp_path / ".report.json.partial").write_bytes(b"more than the new one, but only half")
    write_whole(path, b"new")
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"new"]
