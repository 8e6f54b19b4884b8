"""How a command ends: one line on stderr and exit code 2 for an error, quietly when interrupted."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from jaxllm.common.errors import JaxLLMError

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE


class Parser(argparse.ArgumentParser):
    """An argparse parser whose errors take one line, and which takes no abbreviated options.

    Abbreviations would change their meaning whenever an option is added.
    """

    def __init__(self, **kwargs) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {one_line(message)} (see --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def guard(
    command: Callable[[list[str]], int], program: str, argv: Sequence[str] | None = None
) -> int:
    """Run a command on its arguments; the exit code of the process.

    An error of :class:`~jaxllm.JaxLLMError` is the user's to mend: one line, exit code 2,
    or the traceback with ``--debug``. Any other exception is a bug, and keeps its traceback.
    Ctrl-C exits with 130 and a reader that went away (``| head``) with 141, both in silence.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn(program)
            code = command(arguments)
        sys.stdout.flush()
        return code
    except JaxLLMError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(f"{program}: error: {one_line(str(error))}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more when it exits, and would complain then.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def one_line(message: str) -> str:
    r"""A message on one line; control characters, which a file may have put there, are escaped.

    >>> one_line("a.gguf: bad name\n'\x1b[2J'")
    "a.gguf: bad name '\\x1b[2J'"
    """
    line = " ".join(message.split("\n"))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _warn(program: str) -> Callable[..., None]:
    def show(message, category, filename, lineno, file=None, line=None) -> None:
        print(f"{program}: warning: {one_line(str(message))}", file=sys.stderr)

    return show
