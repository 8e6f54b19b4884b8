"""A training run dies at file operations: it goes on as if it had never stopped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import killed_run
import pytest
from devices import environment


@pytest.mark.slow
def test_thirty_kills_at_file_operations(tmp_path: Path) -> None:
    command = [sys.executable, killed_run.__file__, str(tmp_path), "30"]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 100
