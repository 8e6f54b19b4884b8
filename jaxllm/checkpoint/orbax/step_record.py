"""What a step says of itself in one checked file: the caller's meta, and a digest of each array."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.checkpoint.orbax.leaves import Leaf
from jaxllm.common.atomic_file import write_whole
from jaxllm.common.errors import CheckpointError
from jaxllm.common.strict_json import parse_json, read_json

RECORD_FILE = Path("record") / "metadata"  # the name that Orbax gives to a JSON item
FORMAT = 1
MAX_BYTES = 2**30


@dataclasses.dataclass(frozen=True)
class Record:
    """Everything in a step beside the arrays. `metric` is what the best step is chosen by."""

    step: int
    meta: Any
    metric: float | None
    leaves: Mapping[str, Leaf]


def seal(record: Record) -> dict[str, str]:
    """The record as text, and the text's SHA-256.

    Raises:
        CheckpointError: The meta is not JSON, or would be read back as something else.
    """
    content = {
        "format": FORMAT,
        "step": record.step,
        "metric": record.metric,
        "meta": record.meta,
        "leaves": {n: [x.dtype, list(x.shape), x.digest] for n, x in record.leaves.items()},
    }
    try:
        text = json.dumps(content, allow_nan=False)
    except (TypeError, ValueError) as failure:
        raise CheckpointError(f"meta: not JSON ({failure})") from failure
    if parse_json(text.encode(), source="meta", error=CheckpointError)["meta"] != record.meta:
        raise CheckpointError(
            "meta: JSON would change it (tuples become lists, and keys become text); pass dicts "
            "with text keys, lists, text, numbers, booleans and None only"
        )
    return {"sha256": checksum(text), "record": text}


def read_record(folder: Path) -> Record:
    """The record of a step's folder.

    Raises:
        CheckpointError, MissingFileError: It is not there, or not what was written.
    """
    path = folder / RECORD_FILE
    sealed = read_json(path, max_bytes=MAX_BYTES, error=CheckpointError)
    if not isinstance(sealed, dict) or sealed.keys() != {"sha256", "record"}:
        raise CheckpointError(f"{path}: not the record of a checkpoint")
    text = sealed["record"]
    if not isinstance(text, str) or sealed["sha256"] != checksum(text):
        raise CheckpointError(f"{path}: the text and its checksum differ")
    content = parse_json(text.encode(), source=str(path), error=CheckpointError)
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path}: format {content['format']}, expected {FORMAT}")
    if str(content["step"]) != folder.name:
        raise CheckpointError(f"{path}: of step {content['step']}, not of step {folder.name}")
    leaves = {
        name: Leaf(dtype, tuple(shape), digest)
        for name, (dtype, shape, digest) in content["leaves"].items()
    }
    return Record(content["step"], content["meta"], content["metric"], leaves)


def replace_record(folder: Path, record: Record) -> None:
    """Another record for the arrays of a step's folder; a kill leaves the old or the new one.

    Raises:
        CheckpointError: It cannot be written.
    """
    path = folder / RECORD_FILE
    try:
        write_whole(path, json.dumps(seal(record)).encode())
    except OSError as failure:
        raise CheckpointError(f"{path}: cannot be written ({failure.strerror})") from failure


def checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
