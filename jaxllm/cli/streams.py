"""Standard streams that the caller has closed (``jaxllm ... <&-``, or a service without them)."""

from __future__ import annotations

import io
import os
import sys


def open_missing_streams() -> None:
    """Opens the null device for each standard stream that is closed: empty input, or no output.

    Python has None for such a stream, and a file that is opened later would get its number, so
    that messages were written into it. Must run before any other file is opened.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            # Gets the lowest free number, which is this one. Child processes inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            stream = os.fdopen(descriptor, mode, encoding="utf-8", errors="replace", closefd=False)
            setattr(sys, name, stream)


def escape_on_stdout() -> None:
    """Has stdout write characters that its encoding lacks as escapes, as stderr does.

    An answer may hold any character, and the encoding of a console or a service may be ASCII.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
