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
from jaxllm.cli.process import open_missing_streams
open_missing_streams()
pipe = os.pipe()
print("out")
print("err", file=sys.stderr)
sys.exit(sys.stdin.read() != "" or min(pipe) < 3)
"""


@pytest.mark.by_default("2>&--out\\n-")
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


def test_characters_that_the_encoding_of_stdout_lacks_are_escaped():
    """The text of an answer, in a program that begins as all commands do."""
    program = "import sys\nfrom jaxllm.cli import main\n"
    program += "main.main = lambda: sys.stdout.write('caf\u00e9 \U0001f600\\n') * 0\nmain.script()"
    for encoding, out in (
        ("ascii", b"caf\\xe9 \\U0001f600\n"),
        ("latin-1", b"caf\xe9 \\U0001f600\n"),
        ("utf-8", "caf\u00e9 \U0001f600\n".encode()),
    ):
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        ended = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True)
        assert (ended.returncode, ended.stdout) == (0, out), ended.stderr


@pytest.mark.ci
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
