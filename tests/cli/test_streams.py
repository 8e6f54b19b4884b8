"""Commands whose standard streams are closed, and JAX without the device that it is told to use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from paths import ROOT

MODEL = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"
USE_STREAMS = """
import os, sys
from jaxllm.cli.streams import open_missing_streams
open_missing_streams()
pipe = os.pipe()
print("out")
print("err", file=sys.stderr)
sys.exit(sys.stdin.read() != "" or min(pipe) < 3)
"""


@pytest.mark.parametrize(
    ("closed", "out", "err"),
    [
        ("<&-", "out\n", "err\n"),
        (">&-", "", "err\n"),
        ("2>&-", "out\n", ""),
        ("<&- >&- 2>&-", "", ""),
    ],
)
def test_a_closed_stream_is_the_null_device(closed: str, out: str, err: str):
    command = ["bash", "-c", f'exec "$@" {closed}', "_", sys.executable, "-c", USE_STREAMS]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, out, err)


def test_a_platform_without_devices_is_one_line():
    arguments = ["generate", "--model", str(MODEL), "--quiet", "hi"]
    ended = subprocess.run(
        ["bash", "-c", 'exec "$@" <&- >&-', "_", sys.executable, "-m", "jaxllm", *arguments],
        env={**os.environ, "JAX_PLATFORMS": "nosuch"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("jaxllm generate: error: JAX_PLATFORMS=nosuch: JAX has no device")
