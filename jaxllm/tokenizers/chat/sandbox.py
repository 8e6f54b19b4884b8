"""Renders Jinja templates in a child process that the operating system limits.

Why a process: inside one, a template can be stopped neither in a nested loop nor in ``10**10**8``,
which is a single step of the interpreter. The child is started at the first use (a tenth of a
second) and kept, so that rendering costs about a millisecond; it is started again after a
template has made it die.
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

MAX_TEMPLATE_BYTES = 64 * 2**10
MAX_OUTPUT_CHARACTERS = 4 * 2**20
CPU_SECONDS = 2.0
MEMORY_BYTES = 2**30
_WORKER = Path(__file__).with_name("template_worker.py")


class _Worker:
    """The child, and the pipes to it. Belongs to the process that started it."""

    def __init__(self) -> None:
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
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
        """The answer; None when the child died over the request."""
        assert self._process.stdout is not None
        try:
            self._send(request)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            return None
        return json.loads(line) if line.endswith("\n") else None

    def close(self) -> int:
        """End the child; returns its exit status, minus the signal's number if one ended it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it may be gone already
            self._process.stdin.close()
        self._process.stdout.close()
        try:
            return self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


_lock = threading.Lock()
_worker: _Worker | None = None


def render(template: str, variables: Mapping[str, Any], now: float) -> str:
    """The text that ``template`` gives for ``variables``.

    Args:
        template: Jinja, at most 64 KiB.
        variables: Values that JSON can express.
        now: The time that ``strftime_now`` shows, in seconds since 1970.

    Raises:
        TemplateError: The template is too large, malformed, too expensive, or raised an error.
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
        raise TemplateError(f"the chat template failed: {answer['error']}")
    return answer["text"]


def _explain(status: int) -> str:
    if status == -signal.SIGPROF:
        return f"took more than {CPU_SECONDS:g} seconds: it loops too long for a chat"
    return f"ended the process that rendered it (exit status {status})"


@atexit.register
def _close_worker() -> None:
    if _worker is not None and _worker.owner == os.getpid():
        _worker.close()
