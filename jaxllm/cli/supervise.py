"""``jaxllm supervise --processes 2 -- COMMAND ...``: keeps the processes of a command going.

A process that was lost takes with it what the others wait for; so all are ended and started again,
with ``--resume``, which goes on from what is on the disk.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jaxllm.cli.exits import BROKEN_PIPE, INTERRUPTED, USAGE_ERROR, Parser, guard
from jaxllm.common.errors import InputError

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FINAL = (USAGE_ERROR, INTERRUPTED, BROKEN_PIPE, 128 + signal.SIGTERM)
"""Codes of processes that somebody has to mend, or has stopped: to start again would not help."""
JOINING = ("--coordinator", "--num-processes", "--process-id")
POLL_SECONDS = 0.1


def main(argv: Sequence[str] | None = None, program: str = "jaxllm supervise") -> int:
    """Entry point; returns the command's exit code."""
    return guard(lambda arguments: run(arguments, program), program, argv)


def parser(program: str) -> Parser:
    made = Parser(
        prog=program,
        usage=f"{program} [options] -- COMMAND ...",
        description="Starts a command's processes on this host; if one is lost, all start again.",
        epilog=(
            f"example:\n  {program} --processes 2 -- python generate.py --input rows.jsonl "
            "--output out.jsonl"
        ),
    )
    made.add_argument("--processes", type=int, default=1, metavar="N", help="how many (default: 1)")
    made.add_argument(
        "--restarts", type=int, default=3, metavar="K", help="most times to start again (3)"
    )
    return made


def run(argv: list[str], program: str) -> int:
    """The command proper; raises JaxLLMError for what the user can mend."""
    own, command = split(argv)
    options = parser(program).parse_args(own)
    if options.processes < 1:
        raise InputError(f"--processes: expected 1 or more, found {options.processes}")
    if options.restarts < 0:
        raise InputError(f"--restarts: expected 0 or more, found {options.restarts}")
    if not command:
        raise InputError(f"no command: {program} [options] -- COMMAND ...")
    given = [word for word in command if word.partition("=")[0] in JOINING]
    if options.processes > 1 and given:
        raise InputError(f"{given[0]}: --processes gives this to the command by itself")
    with passing_on() as received:
        return supervise(command, options.processes, options.restarts, received, program)


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words before and after the first ``--``.

    >>> split(["--processes", "2", "--", "train.py", "a.yaml"])
    (['--processes', '2'], ['train.py', 'a.yaml'])
    """
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at + 1 :]


@contextmanager
def passing_on() -> Iterator[list[int]]:
    """Signals are collected in a list rather than acted on."""
    received: list[int] = []
    before = {each: signal.signal(each, lambda n, _: received.append(n)) for each in PASSED_ON}
    try:
        yield received
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def supervise(
    command: list[str], count: int, restarts: int, received: list[int], program: str
) -> int:
    """Starts the command until it has ended well, or too often; returns its code.

    Args:
        received: signals as they come. They are passed on, and nothing starts again after one.
    """
    restarted = 0
    while True:
        processes = start(command, count)
        codes = watch(processes, received)
        lost = [(i, code) for i, code in enumerate(codes) if code and code not in FINAL]
        code = lost[0][1] if lost else next(filter(None, codes), 0)
        code = 128 - code if code < 0 else code
        if not lost or received:
            return code
        who = f"process {lost[0][0]}" if count > 1 else "the process"
        how = f"{who} {said(lost[0][1])}"
        if restarted == restarts:
            print(f"{program}: {how}; it was started {restarts + 1} times", file=sys.stderr)
            return code
        restarted += 1
        print(f"{program}: {how}; restart {restarted} of {restarts}", file=sys.stderr, flush=True)
        command = command if "--resume" in command else [*command, "--resume"]


def start(command: Sequence[str], count: int) -> list[subprocess.Popen]:
    """The processes, which find each other through a free port of this host.

    Each has a session of its own: Ctrl-C comes from here, once, and not from the terminal, too.

    Raises:
        InputError: there is no such command.
    """
    address = f"127.0.0.1:{free_port()}"
    processes: list[subprocess.Popen] = []
    try:
        for index in range(count):
            values = (address, str(count), str(index))
            joining = [word for pair in zip(JOINING, values, strict=True) for word in pair]
            words = [*command, *(joining if count > 1 else [])]
            processes.append(
                subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
            )
    except OSError as failure:
        end(processes)
        raise InputError(f"{command[0]}: cannot be started ({failure.strerror})") from failure
    return processes


def watch(processes: Sequence[subprocess.Popen], received: list[int]) -> list[int | None]:
    """Waits for the end of all, or for a bad end of one, after which the others are ended.

    Returns:
        Their codes; None of those that were ended here.
    """
    passed = 0
    while True:
        for number in received[passed:]:
            for process in processes:
                process.send_signal(number)
            passed += 1
        codes = [process.poll() for process in processes]
        if None not in codes:
            return codes
        # After a signal each ends by itself, as it does without a supervisor.
        if any(codes) and not received:
            end(processes)
            return codes
        time.sleep(POLL_SECONDS)


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kills what still runs, with its children. What is on the disk is whole at any moment."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()


def said(code: int) -> str:
    """How a process ended.

    >>> said(-9), said(1)
    ('was killed by SIGKILL', 'ended with code 1')
    """
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with code {code}"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
