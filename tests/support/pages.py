"""Runs the code of a Markdown page as it stands."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from paths import ROOT


def run_python(page: Path, **names: Any) -> tuple[dict[str, Any], str]:
    """Runs the Python blocks of a page in order, in one namespace that begins with `names`.

    Returns:
        The namespace, and what was printed.
    """
    text, printed = page.read_text(encoding="utf-8"), io.StringIO()
    namespace: dict[str, Any] = {"__name__": page.stem.lower(), **names}
    with contextlib.redirect_stdout(printed):
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(page), "exec")  # tracebacks name the line
            exec(code, namespace)
    return namespace, printed.getvalue()


def shell_blocks(page: Path) -> list[str]:
    """The ``bash`` blocks of a page."""
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def start_shell(block: str, folder: Path) -> subprocess.Popen[str]:
    """Starts a block in a folder, as a user with an activated environment would."""
    environment = os.environ | {
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "JAXLLM_CACHE_DIR": str(folder / "cache"),
    }
    return subprocess.Popen(
        ["bash", "-e", "-c", block],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_shell(block: str, folder: Path) -> str:
    """Runs a block in a folder; returns what it printed to stdout."""
    process = start_shell(block, folder)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    return out
