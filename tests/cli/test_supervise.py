"""jaxllm supervise: restarts, signals and exit codes of small commands."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxllm.cli.supervise import main

# Writes its own words to a file of its own; then ends as the file "ends" says: one code for each
# start, a signal if negative, "sleep" to stay.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path
folder, words = Path(sys.argv[1]), sys.argv[2:]
me = words[words.index("--process-id") + 1] if "--process-id" in words else "0"
starts = len(list(folder.glob(f"started-{me}-*")))
(folder / f"new-{me}").write_text(json.dumps([os.getpid(), *words]))
(folder / f"new-{me}").rename(folder / f"started-{me}-{starts}")
ends = json.loads((folder / "ends").read_text())
while not all((folder / f"started-{other}-{starts}").exists() for other in ends):
    time.sleep(0.01)
how = ends[me]
how = how[min(starts, len(how) - 1)]
if how == "sleep":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / f"ready-{me}").touch()
    time.sleep(600)
if how < 0:
    os.kill(os.getpid(), -how)
sys.exit(how)
"""


def command(folder: Path, ends: dict[str, list[int | str]], *flags: str) -> list[str]:
    (folder / "ends").write_text(json.dumps(ends))
    return [*flags, "--", sys.executable, "-c", CHILD, str(folder)]


def started(folder: Path, process: int) -> list[list[str]]:
    """The words that each start of a process got."""
    paths = sorted(folder.glob(f"started-{process}-*"))
    return [json.loads(path.read_text())[1:] for path in paths]


def running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_successful_command_runs_once(tmp_path):
    assert main(command(tmp_path, {"0": [0], "1": [0]}, "--processes", "2")) == 0
    (first,), (second,) = started(tmp_path, 0), started(tmp_path, 1)
    assert first[0] == "--coordinator"
    assert first[1].startswith("127.0.0.1:")
    assert first[2:] == ["--num-processes", "2", "--process-id", "0"]
    assert second == [*first[:-1], "1"]


def test_one_process_needs_no_coordinator(tmp_path):
    assert main([*command(tmp_path, {"0": [0]}), "--field", "5"]) == 0
    assert started(tmp_path, 0) == [["--field", "5"]]


def test_all_processes_restart_when_one_dies(tmp_path, capsys):
    """By a signal, then by a crash; the process that stays is ended each time."""
    ends = {"0": ["sleep", "sleep", 0], "1": [-9, 1, 0]}
    assert main(command(tmp_path, ends, "--processes", "2")) == 0
    for process in (0, 1):
        words = started(tmp_path, process)
        assert [word[:1] == ["--resume"] for word in words] == [False, True, True]
    for path in tmp_path.glob("started-0-*"):
        assert not running(json.loads(path.read_text())[0])
    err = capsys.readouterr().err
    assert "process 1 was killed by SIGKILL; restart 1 of 3" in err
    assert "process 1 ended with code 1; restart 2 of 3" in err


def test_maximum_number_of_restarts(tmp_path, capsys):
    assert main(command(tmp_path, {"0": [-9]}, "--restarts", "1")) == 137
    assert len(started(tmp_path, 0)) == 2
    assert "the process was killed by SIGKILL; it was started 2 times" in capsys.readouterr().err


@pytest.mark.parametrize("code", [2, 130, 143])
def test_user_errors_are_not_restarted(tmp_path, code):
    ends: dict[str, list[int | str]] = {"0": ["sleep"], "1": [code]}
    assert main(command(tmp_path, ends, "--processes", "2")) == code
    assert len(started(tmp_path, 1)) == 1


def test_signals_are_forwarded(tmp_path):
    flags = command(tmp_path, {"0": ["sleep"], "1": ["sleep"]}, "--processes", "2")
    code = "import sys; from jaxllm.cli.supervise import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen([sys.executable, "-c", code, *flags])
    while not all((tmp_path / f"ready-{i}").exists() for i in (0, 1)):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 143
    for path in tmp_path.glob("started-*"):
        assert not running(json.loads(path.read_text())[0])


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "no command"),
        (["--processes", "0", "--", "true"], "--processes: expected 1 or more"),
        (["--restarts", "-1", "--", "true"], "--restarts: expected 0 or more"),
        (["--processes", "2", "--", "a", "--process-id=1"], "--process-id=1: --processes gives"),
        (["--processes", "2", "--", "./no-such-command"], "./no-such-command: cannot be started"),
    ],
)
def test_invalid_options(arguments, why, capsys):
    assert main(arguments) == 2
    assert why in capsys.readouterr().err
