"""Identity of a job: all that its results depend on, by which a resumed job notices a change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.gguf.split import part_paths
from jaxllm.checkpoint.hub import MODULES
from jaxllm.checkpoint.load import gguf_in
from jaxllm.checkpoint.weight_files import format_of, t5x_folders, t5x_in, weight_files
from jaxllm.common.errors import CheckpointError, RunError, naming_file, quoted
from jaxllm.common.files import is_there
from jaxllm.tokenizers.loading import ids_version
from jaxllm.tokenizers.settings import FILE_NAMES, OTHER_IDS, TEMPLATES_FOLDER, TOKEN_IDS

ENVIRONMENT = "environment"
"""The part of an identity that has versions and devices, where the caller gives them."""
OUTPUT_DIGEST = "output"
"""The digest of the output, beside the identity of a job whose rows can be tried again."""
LIMITS = frozenset({"--max-new-tokens", "--max-length", "--context"})
"""Parts of an identity that may also change when rows with errors are tried again."""
ERRORS_DIGEST = "errors file"
"""The digest of the file of errors, which may change when rows are tried again."""
DIGESTS = frozenset({OUTPUT_DIGEST, ERRORS_DIGEST})
NOT_COMPARED = frozenset({"--model", ENVIRONMENT, *DIGESTS})
"""Parts of an identity that may change: the model's files are compared, not their path."""
HEAD_BYTES = {".gguf": 64 << 20}
"""Bytes at the start of a weight file that are always hashed, by its suffix: the largest header, of
a GGUF file with the vocabulary."""
DEFAULT_HEAD_BYTES = 16 << 20
STRIDE_BYTES = 1 << 20
"""Distance of the samples in the rest of a weight file."""
SAMPLE_BYTES = 4096
T5X_FILES = ("checkpoint", "target.*/*", "state/**/*")
"""Files of the parameters in the folder of a T5X checkpoint."""
FILES = {
    "model config": ("config.json", "*.safetensors.index.json", "adapter_config.json"),
    "tokenizer": (*FILE_NAMES, f"{TEMPLATES_FOLDER}/*.jinja"),
    "generation config": ("generation_config.json",),
    "embedding files": (MODULES, "*sentence_*.json"),
}


def check_identity(
    before: Mapping[str, Any], identity: Mapping[str, Any], *, retry: bool = False
) -> None:
    """Checks that a job is the one that was begun; with `retry`, `LIMITS` may differ.

    Raises:
        RunError: it is not; names the first part that differs.
    """
    now = json.loads(json.dumps(identity))  # as read from a file
    if ENVIRONMENT in now and ENVIRONMENT not in before:
        raise RunError(
            "an earlier version of jaxllm began this job, and its dtype and settings of JAX are "
            "unknown; finish it with that version, or begin another output"
        )
    for name in dict.fromkeys((TOKEN_IDS, *before, *now)):
        old, new = before.get(name), now.get(name)
        if name == TOKEN_IDS and old != new:
            raise RunError(f"{name}: {OTHER_IDS}")
        if old != new and name not in NOT_COMPARED and not (retry and name in LIMITS):
            change = f"was {quoted(old)} when this job began, and is {quoted(new)} now"
            if name == "input":  # a digest
                change = "has other rows than when this job began"
            raise RunError(f"{name}: {change}; resume with what it was, or begin another output")


def job_id(identity: Mapping[str, Any]) -> str:
    """Digest of an identity."""
    compared = {name: value for name, value in identity.items() if name not in NOT_COMPARED}
    return hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:16]


def checkpoint_digests(path: Path, *, whole: bool = False) -> dict[str, str | None]:
    """SHA-256 digests of a checkpoint: weights, config, tokenizer, generation config.

    The digest of weights covers names and sizes of the files, their headers, and samples in every
    mebibyte, so that it takes less than a second for many gigabytes: a changed tensor of a mebibyte
    or more changes it.

    Args:
        path: a folder with weights or with one .gguf file, or a weight file.
        whole: hash all bytes of the weights.

    Returns:
        A digest of 16 hexadecimal digits by part; None for a part without files. `TOKEN_IDS` has
        the tokenizer's `ids_version`.

    Raises:
        CheckpointError: a file cannot be read, or is a device or a pipe.
        MissingFileError: a folder of several GGUF files.
    """
    path = gguf_in(path) or path
    if path.suffix.lower() == ".gguf" and path.is_file():
        parts = [part for part in part_paths(path) if part.exists()]
        return {"model weights": _digest(parts, whole=whole), TOKEN_IDS: "2"}
    folder = path.parent if path.is_file() else path
    weights = weight_files(path)
    if (found := t5x_in(path)) is not None:
        step, folder = t5x_folders(found)
        files = (file for pattern in T5X_FILES for file in step.glob(pattern))
        weights = sorted(file for file in files if file.is_file()) or [found]
    elif path.is_dir() and (not weights or format_of(weights[0]) == "safetensors"):
        # `FILES` has the index. An adapter has weight files of its own.
        weights = sorted([*folder.glob("*.safetensors"), *folder.glob("adapter_model.bin")])
    digests = {"model weights": _digest(weights, whole=whole)}
    modules = folder / MODULES
    named = modules.read_text("utf-8", "replace") if modules.is_file() else ""
    for part, patterns in FILES.items():
        files = {file for pattern in patterns for file in folder.glob(pattern)}
        if part == "embedding files":  # those in the folders that modules.json names
            files |= {file for file in folder.glob("*/*.*") if f'"{file.parent.name}"' in named}
        digests[part] = _digest(sorted(files), whole=True)
    if (version := ids_version(folder)) > 1:
        digests[TOKEN_IDS] = str(version)
    return digests


def _digest(files: Sequence[Path], *, whole: bool) -> str | None:
    """Digest of files with their names and sizes."""
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        is_there(path, CheckpointError)  # an error for a device or a pipe, which has no end
        with naming_file(path, CheckpointError, "read"), path.open("rb") as file:
            size = path.stat().st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            head = size if whole else HEAD_BYTES.get(path.suffix.lower(), DEFAULT_HEAD_BYTES)
            _update(digest, file, min(size, head))
            if not whole:
                for offset in range(head, size, STRIDE_BYTES):
                    file.seek(offset)
                    digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _update(digest: Any, file: Any, count: int) -> None:
    """Hashes the next `count` bytes."""
    while count > 0 and (block := file.read(min(count, 1 << 20))):
        digest.update(block)
        count -= len(block)
