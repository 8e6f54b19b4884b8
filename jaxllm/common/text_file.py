"""Reads text files of people, within limits."""

from __future__ import annotations

from pathlib import Path

from jaxllm.common.errors import JaxLLMError, naming_file


def read_text(path: Path, *, max_bytes: int, error: type[JaxLLMError]) -> str:
    """The text of a UTF-8 file, or of a pipe.

    Raises:
        error: it cannot be read, is not UTF-8, or has more than `max_bytes`.
    """
    with naming_file(path, error, "read"), path.open("rb") as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise error(f"{path}: more than {max_bytes} bytes, and no more are read; shorten it")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise error(f"{path}: not UTF-8 (byte {failure.start}); save it as UTF-8") from None
