"""The strict JSON reader."""

import pytest

from jaxllm.common.errors import CheckpointError, ConfigError, MissingFileError
from jaxllm.common.files import parse_json, read_json


def test_reads_standard_json(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"a": [1, 2.5, true, null, "é\\u00e9\\ud83d\\ude00"], "b": {}}')
    assert read_json(path, max_bytes=1000) == {"a": [1, 2.5, True, None, "éé😀"], "b": {}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"{} x", "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' appears twice"),
        (b"[NaN]", "NaN is not finite"),
        (b"[-Infinity]", "-Infinity is not finite"),
        (b"[1e999]", "1e999 is not finite"),
        (b"[" + b"1" * 5000 + b"]", "digits"),
        (b'"\xff"', r"not UTF-8 \(byte 1\)"),
        (b'["\\ud800"]', "unpaired surrogate"),
        (b'{"\\udc00x": 1}', "unpaired surrogate"),
        (b"[" * 65 + b"]" * 65, "deeper than 64"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "deeper than 64"),
        (b"[" + b"1," * 600 + b"1]", "1203 bytes, but at most 1000"),
    ],
)
def test_malformed_json_is_refused_by_file_name(tmp_path, content, message):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    limit = 1000 if content.startswith(b"[1,") else 10**6
    with pytest.raises(ConfigError, match=rf"x\.json: .*{message}"):
        read_json(path, max_bytes=limit)
    with pytest.raises(CheckpointError):
        read_json(path, max_bytes=limit, error=CheckpointError)


def test_nesting_depth_is_counted_from_one():
    assert parse_json(b"[" * 64 + b"]" * 64, source="x")
    assert parse_json(b"[[]]", source="x", max_depth=2) == [[]]
    with pytest.raises(ConfigError, match="deeper than 1 levels"):
        parse_json(b"[[]]", source="x", max_depth=1)


def test_missing_file(tmp_path):
    for path, message in ((tmp_path / "none.json", "no such file"), (tmp_path, "no regular file")):
        with pytest.raises(MissingFileError, match=message):
            read_json(path, max_bytes=10)
