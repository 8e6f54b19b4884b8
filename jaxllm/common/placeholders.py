"""Recognises small text files that stand where a checkpoint's file should be."""

from __future__ import annotations

import re
from pathlib import Path

from jaxllm.common.errors import JaxLLMError

_GIT_LFS = b"version https://git-lfs.github.com/spec/"
# The target of a link in a Hugging Face cache, copied as text: "../../blobs/<hash>".
_CACHE_LINK = re.compile(rb"(\.\.[/\\]){1,4}blobs[/\\][0-9a-f]{40,64}\s*")
_MAX_BYTES = 1024


def check_not_placeholder(path: Path, data: bytes, error: type[JaxLLMError]) -> None:
    """Raises `error` if a file's content is a git-lfs pointer or the text of a cache's link."""
    if len(data) > _MAX_BYTES:
        return
    if data.startswith(_GIT_LFS):
        raise error(
            f"{path}: a git-lfs pointer, not the file itself; run `git lfs pull` in its "
            "repository, or download the file"
        )
    if _CACHE_LINK.fullmatch(data):
        raise error(
            f"{path}: the text of a link into a Hugging Face cache, not the file itself; copy the "
            "cache with its links followed (cp -rL), or download the model again"
        )
