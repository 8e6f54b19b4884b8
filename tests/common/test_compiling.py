"""The folder of compiled programs, set from Python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import jaxllm
from jaxllm.errors import RunError

SCRIPT = """
import contextlib, os, sys
import jax, jax.numpy as jnp
import jaxllm
from jaxllm.common.compiling import CompileClock

jax.jit(lambda x: x + 1)(jnp.arange(3))  # JAX has compiled: it must look for the folder again
assert str(jaxllm.enable_compile_cache(sys.argv[1])) == sys.argv[1]
assert str(jaxllm.enable_compile_cache()) == sys.argv[1]
with contextlib.closing(CompileClock()) as clock:
    jax.jit(lambda x: x * 5 - 7)(jnp.arange(7)).block_until_ready()
print(clock.programs - clock.cached, len(os.listdir(sys.argv[1])) > 0)
"""


@pytest.mark.ci
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    def start() -> list[str]:
        command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()

    compiled, kept = start()
    assert int(compiled) > 0
    assert kept == "True"
    assert start() == ["0", "True"]


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"file/cache cannot be written .*not kept"):
        jaxllm.enable_compile_cache(tmp_path / "file" / "cache")
