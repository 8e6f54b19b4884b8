"""``jaxllm supervise --processes 2 -- COMMAND ...``: restarts a command's processes after a crash.

If one process dies, the others would wait for it forever. So all are killed and restarted with
``--resume``, which continues from the files on disk.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from jaxllm.cli import signals
from jaxllm.cli.exits import BROKEN_PIPE, USAGE_ERROR, Parser, run_command
from jaxllm.common.errors import InputError

FINAL = (USAGE_ERROR, BROKEN_PIPE, *(128 + number for number in signals.STOP_SIGNALS))
"""Exit codes that are not restarted: user errors and interrupts."""
PROCESS_FLAGS = ("--coordinator", "--num-processes", "--process-id")
POLL_SECONDS = 0.1


def main(argv: Sequence[str] | None = None, program: str = "jaxllm supervise") -> int:
    """Entry point; returns the command's exit code."""
    return run_command(lambda arguments: _run(arguments, program), program, argv)


def _parser(program: str) -> Parser:
    result = Parser(
        prog=program,
        usage=f"{program} [options] -- COMMAND ...",
        description="Starts a command's processes on this host; if one dies, all are restarted.",
        epilog=(
            f"example:\n  {program} --processes 2 -- python generate.py --input rows.jsonl "
            "--output out.jsonl"
        ),
    )
    result.add_argument(
        "--processes", type=int, default=1, metavar="N", help="how many (default: 1)"
    )
    result.add_argument(
        "--restarts", type=int, default=3, metavar="K", help="maximum number of restarts (3)"
    )
    return result


def _run(argv: list[str], program: str) -> int:
    """Runs the command; user errors are JaxLLMErrors."""
    own, command = split_at_separator(argv)
    options = _parser(program).parse_args(own)
    if options.processes < 1:
        raise InputError(f"--processes: expected 1 or more, found {options.processes}")
    if options.restarts < 0:
        raise InputError(f"--restarts: expected 0 or more, found {options.restarts}")
    if not command:
        raise InputError(f"no command: {program} [options] -- COMMAND ...")
    reserved = [word for word in command if word.partition("=")[0] in PROCESS_FLAGS]
    if options.processes > 1 and reserved:
        raise InputError(f"{reserved[0]}: --processes gives the command this option")
    received: list[int] = []
    with signals.passed_to(received.append):
        return supervise(command, options.processes, options.restarts, received, program)


def split_at_separator(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Splits arguments at the first ``--``.

    >>> split_at_separator(["--processes", "2", "--", "train.py", "a.yaml"])
    (['--processes', '2'], ['train.py', 'a.yaml'])
    """
    words = list(argv)
    separator = words.index("--") if "--" in words else len(words)
    return words[:separator], words[separator + 1 :]


def supervise(
    command: list[str], count: int, restarts: int, received: list[int], program: str
) -> int:
    """Runs the command, restarting it until success or the last restart; returns its exit code.

    Args:
        received: signals so far. They are forwarded; after a signal nothing is restarted.
    """
    restarted = 0
    while True:
        processes = start(command, count)
        codes = watch(processes, received)
        failed = [(i, code) for i, code in enumerate(codes) if code and code not in FINAL]
        code = failed[0][1] if failed else next(filter(None, codes), 0)
        code = 128 - code if code < 0 else code
        if not failed or received:
            return code
        who = f"process {failed[0][0]}" if count > 1 else "the process"
        how = f"{who} {describe_exit(failed[0][1])}"
        if restarted == restarts:
            print(f"{program}: {how}; it was started {restarts + 1} times", file=sys.stderr)
            return code
        restarted += 1
        print(f"{program}: {how}; restart {restarted} of {restarts}", file=sys.stderr, flush=True)
        command = command if "--resume" in command else [*command, "--resume"]


def start(command: Sequence[str], count: int) -> list[subprocess.Popen[bytes]]:
    """Starts the processes, with the coordinator on a free port of this host.

    Each has its own session, so that it gets Ctrl-C only once, forwarded from here.

    Raises:
        InputError: the command cannot be started.
    """
    address = f"127.0.0.1:{free_port()}"
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(count):
            values = (address, str(count), str(index))
            process_flags = [
                word for pair in zip(PROCESS_FLAGS, values, strict=True) for word in pair
            ]
            words = [*command, *(process_flags if count > 1 else [])]
            processes.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            )
    except OSError as failure:
        kill(processes)
        raise InputError(f"{command[0]}: cannot be started ({failure.strerror})") from failure
    return processes


def watch(processes: Sequence[subprocess.Popen[bytes]], received: list[int]) -> list[int | None]:
    """Waits until all processes have exited; if one fails, kills the others.

    Returns:
        Exit codes; None for processes killed here.
    """
    forwarded = 0
    while True:
        for number in received[forwarded:]:
            for process in processes:
                process.send_signal(number)
            forwarded += 1
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        # After a signal each process exits by itself, as without a supervisor.
        if any(codes) and not received:
            kill(processes)
            return codes
        time.sleep(POLL_SECONDS)


def kill(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Kills running processes and their children; safe, since files are written atomically."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def describe_exit(code: int) -> str:
    """Describes an exit code.

    >>> describe_exit(-9), describe_exit(1)
    ('was killed by SIGKILL', 'ended with code 1')
    """
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def free_port() -> int:
    """Finds a free TCP port on this host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
