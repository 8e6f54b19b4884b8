"""Copies of GGUF files with other fields or tensors, written by the gguf package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np


def edited(
    source: Path,
    target: Path,
    *,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, tuple[np.ndarray, Any]] | None = None,
) -> None:
    """Writes a copy of a GGUF file.

    Args:
        fields: fields to add or to replace.
        tensors: raw data and types of all tensors; None: those of the file.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "")
    writer.kv_data[0].clear()  # the architecture, which a later part of a split file lacks
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in (fields or {}):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)
    for key, value in (fields or {}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
            add[type(value)](key, value)
    if tensors is None:
        tensors = {t.name: (np.asarray(t.data), t.tensor_type) for t in reader.tensors}
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
