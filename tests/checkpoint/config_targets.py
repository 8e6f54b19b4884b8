"""Targets of the fuzz tests: read a file of settings, or the rows of a batch."""

from __future__ import annotations

import functools
from pathlib import Path

import tiny

from jaxllm.batch.job.inputs import read_source
from jaxllm.batch.rows import RowReader
from jaxllm.checkpoint.load import MAX_JSON_BYTES
from jaxllm.checkpoint.peft.config import read_peft_config
from jaxllm.common.strict_json import read_json
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.models.registry import model_spec
from jaxllm.training.run.recipe_file import read_recipe


@functools.cache
def reader() -> RowReader:
    return RowReader(tiny.make("llama"), None, {}, 0)


def batch_rows(path: Path) -> None:
    source = read_source(path)
    for index in range(len(source)):
        reader().read(source.row(index))


def settings(path: Path) -> None:
    """A file that its suffix names."""
    match path.suffix:
        case ".config":
            model_spec(read_json(path, max_bytes=MAX_JSON_BYTES) or {})
        case ".generation":
            GenerationConfig.from_file(path)
        case ".adapter":
            read_peft_config(path)
        case ".recipe":
            read_recipe(path)
        case ".rows":
            batch_rows(path)
