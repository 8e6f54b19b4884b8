"""Code that runs on virtual CPU devices, in a child process: a process counts its devices once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from paths import SUPPORT


def environment(devices: int) -> dict[str, str]:
    """Environment variables of a child process with this many devices and the tests' helpers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    folders = [str(SUPPORT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        # XLA has a thread for each core. With more devices than cores, and programs in flight that
        # wait for each other, a collective may not get one for each device, and XLA aborts.
        "PJRT_NPROC": str(4 * max(devices, os.cpu_count() or 1)),
    }


def free_port() -> int:
    """A free TCP port of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def on_devices(code: str, *arguments: object, devices: int = 8) -> str:
    """Runs the code in a child process and returns its output; fails where the code fails."""
    command = [sys.executable, "-W", "error", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment(devices), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def on_processes(
    code: str, *arguments: object, processes: int = 2, devices: int = 2, timeout: float = 300
) -> list[str]:
    """Runs the code in several processes and returns the output of each.

    The first two arguments of a process are `127.0.0.1:PORT` and its number.
    """
    address = f"127.0.0.1:{free_port()}"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code, address, str(index), *map(str, arguments)],
            env=environment(devices),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in running]
    finally:  # one that waits for another which has failed
        for process in running:
            process.kill()
    for process, (stdout, stderr) in zip(running, outputs, strict=True):
        assert process.returncode == 0, stdout + stderr
    return [without_greetings(out) for out, _ in outputs]


def without_greetings(out: str) -> str:
    """The output of a process without the lines of Gloo, the library of its collectives."""
    lines = [x for x in out.splitlines() if "[Gloo]" not in x and "peer ranks" not in x]
    return "\n".join(lines).strip()
