"""Command line options for several devices and processes."""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import jax
import pytest
from devices import environment, free_port, without_greetings
from paths import ROOT

from jaxllm.cli.devices import (
    add_mesh_flag,
    add_process_flags,
    join_processes,
    local_mesh,
    mesh_from_arguments,
    mesh_sizes,
)
from jaxllm.common.errors import InputError

LLAMA = ROOT / "tests" / "data" / "conformance" / "models" / "s_llama_tok"


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_process_flags(parser)
    add_mesh_flag(parser)
    return parser.parse_args(flags)


def test_defaults():
    arguments = parsed()
    join_processes(arguments)
    assert mesh_from_arguments(arguments) is None
    assert (local_mesh(arguments) is None) == (jax.local_device_count() == 1)


@pytest.mark.parametrize(
    "text", ["", "data", "data=x", "model=2", "data=1,data=2", "data=1;fsdp=2"]
)
def test_invalid_mesh_sizes(text):
    with pytest.raises(argparse.ArgumentTypeError, match="expected"):
        mesh_sizes(text)


def test_mesh_sizes():
    assert mesh_sizes("data=2, tensor=-1") == {"data": 2, "tensor": -1}
    count = jax.device_count()
    assert mesh_from_arguments(parsed("--mesh", "data=-1")).shape["data"] == count
    for make in (mesh_from_arguments, local_mesh):
        with pytest.raises(InputError, match="tensor=1000"):
            make(parsed("--mesh", "tensor=1000"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--coordinator", "a:1"], "are used together; --num-processes is missing"),
        (["--num-processes", "2", "--process-id", "0"], "--coordinator is missing"),
        (
            ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id: expected 0 to 1, found 2",
        ),
        (
            ["--coordinator", "a:1", "--num-processes", "0", "--process-id", "0"],
            "--num-processes: expected 1 or more, found 0",
        ),
        (["--coordinator", "a", "--num-processes", "2", "--process-id", "0"], "HOST:PORT"),
        (["--coordinator", "a:b", "--num-processes", "2", "--process-id", "0"], "HOST:PORT"),
        (["--coordinator", "a:70000", "--num-processes", "2", "--process-id", "0"], "HOST:PORT"),
        (["--distributed", "--process-id", "0"], "cannot be combined with --coordinator"),
    ],
)
def test_invalid_process_options(flags, message):
    with pytest.raises(InputError, match=message):
        join_processes(parsed(*flags))


def test_a_port_that_is_taken():
    with socket.create_server(("", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        flags = ["--coordinator", address, "--num-processes", "2", "--process-id", "0"]
        with pytest.raises(InputError, match=r"port \d+ of this host cannot be used"):
            join_processes(parsed(*flags))


UNREACHABLE = """
import sys
from jaxllm.cli import devices
from jaxllm.cli.train import main
devices.NOTICE_SECONDS, devices.CONNECT_SECONDS = 0.5, 1
sys.exit(main(sys.argv[1:], "train.py"))
"""


@pytest.mark.ci
@pytest.mark.parametrize("index", [0, 1])
def test_processes_that_do_not_come(index: int):
    address = f"127.0.0.1:{free_port()}"
    flags = ["--coordinator", address, "--num-processes", "2", "--process-id", str(index)]
    recipe = str(ROOT / "configs" / "gpt2_bytes.yaml")
    done = subprocess.run(
        [sys.executable, "-c", UNREACHABLE, recipe, *flags],
        env=environment(1),
        capture_output=True,
        text=True,
    )
    what = f"{address} (process {index} of 2)"
    waiting, error = done.stderr.splitlines()
    assert done.returncode == 2
    assert waiting == f"train.py: waiting for the other processes at {what}, at most 1 s"
    assert f"{what}: not all processes connected within 1 s" in error


def command(*flags: object) -> list[str]:
    fixed = ["--model", LLAMA, "--max-new-tokens", 12, "--no-compile-cache", "--do-sample"]
    return [sys.executable, str(ROOT / "generate.py"), *map(str, [*fixed, *flags]), "a b c"]


@pytest.mark.slow
def test_two_processes_print_the_same_text_once():
    """Shared weights, one text; nobody but the first process says anything."""
    single = subprocess.run(
        command("--seed", 7), env=environment(1), capture_output=True, text=True, check=True
    )
    flags = ["--seed", 7, "--mesh", "data=2,tensor=2", "--num-processes", 2]
    flags += ["--coordinator", f"127.0.0.1:{free_port()}"]
    running = [
        subprocess.Popen(
            command(*flags, "--process-id", index),
            env=environment(2),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    (out, err), (other, silent) = (process.communicate(timeout=300) for process in running)
    assert [process.returncode for process in running] == [0, 0], err + silent

    assert without_greetings(out) == single.stdout.strip() != ""
    assert without_greetings(other) == ""
    assert "tokens" in err
    assert "tokens" not in silent
    assert "loading" not in silent


CRASH = """
import argparse, sys, time
from pathlib import Path
from jaxllm.cli.devices import add_process_flags, join_processes
parser = argparse.ArgumentParser()
add_process_flags(parser)
arguments = parser.parse_args(sys.argv[2:])
join_processes(arguments)
if arguments.process_id == 1:
    raise ValueError("a bug")
while not Path(sys.argv[1]).exists():
    time.sleep(0.1)
"""


@pytest.mark.slow
def test_crashed_process_exits_at_once(tmp_path):
    address = f"127.0.0.1:{free_port()}"
    running = [
        subprocess.Popen(
            [
                *(sys.executable, "-c", CRASH, str(tmp_path / "go on"), "--coordinator", address),
                *("--num-processes", "2", "--process-id", str(index)),
            ],
            env=environment(1),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    _, err = running[1].communicate(timeout=120)
    assert running[0].poll() is None
    assert (running[1].returncode, err.count("ValueError: a bug")) == (1, 1)
    (tmp_path / "go on").touch()
    running[0].communicate(timeout=300)
