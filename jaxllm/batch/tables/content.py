"""Reads the bytes of an input, within limits."""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from typing import BinaryIO

from jaxllm.common.errors import DataError, MissingFileError, naming_file
from jaxllm.common.files import expanded

MAX_INPUT_BYTES = 2**30
"""Largest input, after decompression."""
MAX_ROW_BYTES = 2**24
"""Longest row of a file of lines."""
MAX_ROWS = 2**22
"""Most rows of an input."""
STDIN = "-"
DATASET_PREFIX = "datasets:"
GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
_CHUNK = 2**20


def read_content(name: str) -> bytes:
    """The bytes of a file, or of stdin if it is called "-", decompressed.

    Raises:
        MissingFileError: there is no such file.
        DataError: the file cannot be read, its name does not say whether it is compressed, its gzip
            data is damaged, or there are more than `MAX_INPUT_BYTES`.
    """
    path = expanded(name)
    if name == STDIN:
        return _decompressed("stdin", _limited("stdin", sys.stdin.buffer), says_gzip=None)
    try:
        with naming_file(path, DataError, "read"), path.open("rb") as file:
            data = _limited(str(path), file)
    except DataError as failure:
        if isinstance(failure.__cause__, FileNotFoundError):
            raise MissingFileError(
                f"{path}: no such file (a data set of the Hub is {DATASET_PREFIX}NAME)"
            ) from None
        raise
    return _decompressed(name, data, says_gzip=path.suffix.lower() == ".gz")


def _limited(name: str, file: BinaryIO | gzip.GzipFile) -> bytes:
    """All bytes of a file; it may be a pipe or a device, which has no size."""
    content = io.BytesIO()
    while chunk := file.read(_CHUNK):
        content.write(chunk)
        if content.tell() > MAX_INPUT_BYTES:
            raise _too_large(f"{name}: has")
    return content.getvalue()


def _decompressed(name: str, data: bytes, *, says_gzip: bool | None) -> bytes:
    """
    Args:
        says_gzip: whether the name says that the data is compressed; None: the name says nothing.
    """
    if not data.startswith(GZIP):
        if says_gzip and data:
            raise DataError(f"{name}: its name says gzip, but it is not compressed; rename it")
        return data
    if says_gzip is False:
        raise DataError(f"{name}: is compressed by gzip; rename it to {name}.gz")
    try:
        # A few kilobytes can become many gigabytes, so they are counted before they are kept.
        size = 0
        with gzip.open(io.BytesIO(data)) as file:
            while chunk := file.read(_CHUNK):
                size += len(chunk)
                if size > MAX_INPUT_BYTES:
                    raise _too_large(f"{name}: decompresses to")
        with gzip.open(io.BytesIO(data)) as file:
            return _limited(name, file)
    except (EOFError, OSError, zlib.error) as failure:
        raise DataError(f"{name}: damaged gzip data ({failure}); fetch it again") from None


def _too_large(found: str) -> DataError:
    return DataError(
        f"{found} more than {MAX_INPUT_BYTES} bytes; split it into several files, a job for each"
    )


def check_row_count(name: str, count: int) -> None:
    """Raises DataError if an input has more rows than `MAX_ROWS`."""
    if count > MAX_ROWS:
        raise DataError(f"{name}: has more than {MAX_ROWS} rows; split it, a job for each part")
