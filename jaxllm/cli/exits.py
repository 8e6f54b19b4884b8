"""Exit codes and error messages: an error gives exit code 2 and one line on stderr."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

from jaxllm.cli import signals
from jaxllm.common.errors import JaxLLMError

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to a full disk, or beyond a quota or limit."""
_NAMED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a file name that is too long, or of missing permissions."""


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors and without abbreviated options.

    The meaning of an abbreviation could change when an option is added.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        message = str(JaxLLMError(one_line(message)))  # of at most 500 characters
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def run_command(
    command: Callable[[list[str]], int], program: str, argv: Sequence[str] | None = None
) -> int:
    """Runs a command on its arguments and returns the exit code.

    A :class:`~jaxllm.JaxLLMError` prints one line (with ``--debug`` also the traceback) and gives
    2, and so do a full disk, a name that is too long, missing permissions and a platform of
    JAX_PLATFORMS that is not there. Any other exception is a bug and keeps its traceback. A closed
    pipe (``| head``) gives 141, without a message.
    SIGINT, SIGTERM and SIGHUP give 130, 143 and 129 (see `signals`).
    """
    with signals.handled(program):
        code = _exit_code(command, program, list(sys.argv[1:] if argv is None else argv))
        number = signals.received()
    return code if number is None else 128 + number


def _exit_code(command: Callable[[list[str]], int], program: str, arguments: list[str]) -> int:
    try:
        with warnings.catch_warnings(), signals.giving_way():
            warnings.showwarning = _warn(program)
            code = command(arguments)
        sys.stdout.flush()
        return code
    except JaxLLMError as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print_error(program, str(error))
        if not signals.leave():  # JAX would wait for minutes for the other processes
            sys.stdout.flush()
            os._exit(USAGE_ERROR)
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        close_stdout()
        return BROKEN_PIPE
    except (RuntimeError, AssertionError):
        message = backend_failure()
        if message is None:
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        print_error(program, message)
        return USAGE_ERROR
    except OSError as failure:
        if failure.errno in _NAMED and failure.filename is not None:
            print_error(program, f"{failure.filename}: {failure.strerror}")
            return USAGE_ERROR
        if is_folder_gone():
            print_error(program, "the current folder has been removed; change to another one")
            return USAGE_ERROR
        if failure.errno not in FULL:
            raise
        close_stdout()
        where = f"{failure.filename}: " if failure.filename else ""
        print_error(program, f"{where}nothing more can be written ({failure.strerror})")
        return USAGE_ERROR


def is_folder_gone() -> bool:
    """True if the current folder, to which paths are relative, has been removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return True
    return False


def backend_failure() -> str | None:
    """Why JAX has no devices, such as JAX_PLATFORMS=tpu without a TPU; None if it has some."""
    jax: Any = sys.modules.get("jax")
    if jax is None:
        return None
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as failure:  # the latter for "cuda" without a GPU
        reason = str(failure) or "there is none of this platform"
        return f"JAX_PLATFORMS={jax.config.jax_platforms or ''}: JAX has no device: {reason}"
    return None


def print_error(program: str, message: str) -> None:
    """Prints a message on one line of stderr, unless that is closed or full, too."""
    with contextlib.suppress(OSError):
        print(f"{program}: error: {one_line(message)}", file=sys.stderr, flush=True)


def close_stdout() -> None:
    """Drops what could not be written to stdout; Python would write it again as it exits."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def one_line(message: str) -> str:
    r"""Puts a message on one line and escapes control characters, which may come from a file.

    >>> one_line("a.gguf: bad name\n'\x1b[2J'")
    "a.gguf: bad name '\\x1b[2J'"
    """
    line = " ".join(message.split("\n"))
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _warn(program: str) -> Callable[..., None]:
    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        print(f"{program}: warning: {one_line(str(message))}", file=sys.stderr)

    return show
