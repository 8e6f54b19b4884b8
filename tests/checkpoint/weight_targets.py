"""Targets of the fuzz tests: read a weight file completely, in a child process."""

from __future__ import annotations

from pathlib import Path

from jaxllm.checkpoint.gguf.names import HFView
from jaxllm.checkpoint.gguf.reader import GGUFFile
from jaxllm.checkpoint.safetensors.reader import SafetensorsFile, ShardedSafetensors
from jaxllm.checkpoint.source import WeightSource, find_nonfinite
from jaxllm.common.errors import UnsupportedError


def read_all(source: WeightSource) -> None:
    for name in source.names():
        info = source.info(name)
        try:
            array = source.read(name)
        except UnsupportedError:
            continue
        assert array.shape == info.shape
        assert array.dtype == info.dtype
        find_nonfinite(name, array)


def read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        read_all(file)


def read_index(path: Path) -> None:
    with ShardedSafetensors(path) as source:
        read_all(source)


def read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        read_all(file)
        read_all(HFView(file))
