"""Renders Jinja templates in a child process with CPU and memory limits.

In the calling process a template could not be stopped, neither in a nested loop nor in
``10**10**8``, a single step of the interpreter. The child starts at the first use (0.1 s) and is
kept, so that rendering takes about a millisecond. It is restarted after a crash.

Only the child is handled here; which text is rendered is decided in ``templates.py``.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxllm.common.errors import TemplateError
from jaxllm.common.messages import shortened

MAX_TEMPLATE_BYTES = 64 * 2**10
MAX_OUTPUT_CHARACTERS = 2**20
CPU_SECONDS = 2.0
MEMORY_BYTES = 2**30
_WORKER = Path(__file__).with_name("template_worker.py")


class _Worker:
    """Child process and its pipes. Only the process that started it may use it."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C in a terminal is for this process alone
            )
        except OSError as failure:
            raise TemplateError(
                f"chat templates are rendered in a child process, which did not start: {failure}"
            ) from failure
        self.owner = os.getpid()
        settings = {
            "path": [os.path.abspath(entry) for entry in sys.path],
            "memory_bytes": MEMORY_BYTES,
            "cpu_seconds": CPU_SECONDS,
            "output_characters": MAX_OUTPUT_CHARACTERS,
        }
        self._send(settings)

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any] | None:
        """Sends a request; returns the answer, or None if the child died."""
        assert self._process.stdout is not None
        try:
            self._send(request)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> int:
        """Ends the child; returns its exit status, or minus the signal's number."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # the child may have exited
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


_lock = threading.Lock()
_worker: _Worker | None = None


def render_in_sandbox(template: str, variables: Mapping[str, Any], now: float) -> str:
    """Renders a template.

    Args:
        template: Jinja source, at most 64 KiB.
        variables: JSON values.
        now: time for ``strftime_now``, in seconds since 1970.

    Raises:
        TemplateError: the template is too large, malformed, too expensive, or raised an error.
    """
    global _worker
    size = len(template.encode("utf-8", "surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(
            f"the chat template has {size} bytes, but at most {MAX_TEMPLATE_BYTES} are taken"
        )
    request = {"template": template, "variables": variables, "now": now}
    with _lock:
        if _worker is None or _worker.owner != os.getpid():
            _worker = _Worker()
        answer = _worker.ask(request)
        if answer is None:
            status = _worker.close()
            _worker = None
            raise TemplateError(f"the chat template {_explain(status)}")
    if "error" in answer:
        raise TemplateError(f"the chat template failed: {shortened(answer['error'], 300)}")
    return answer["text"]


def _explain(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"took more than {CPU_SECONDS:g} seconds: it loops too long for a chat"
    return f"ended the process that rendered it (exit status {status})"


@atexit.register
def _close_worker() -> None:
    if _worker is not None and _worker.owner == os.getpid():
        _worker.close()
