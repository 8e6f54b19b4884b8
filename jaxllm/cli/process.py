"""The process of a command: its standard streams, signals, errors and exit code.

An error gives exit code 2 and one line on stderr. SIGINT, SIGTERM and SIGHUP end a command at once,
or after the step or row it is at.

Imports nothing heavy: commands handle signals before they import JAX.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import errno
import functools
import io
import itertools
import os
import shlex
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.common.spelling import closest

USAGE_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE
STOP_SIGNALS = tuple(
    signal.Signals[name] for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals that end a command; Windows has no SIGHUP."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to a full disk, or beyond a quota or limit."""
_NAMED = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EROFS)
"""Errors of a file name that is too long, or of missing permissions."""
Flags = Mapping[str, str | Mapping[str, Any]]
TYPES = {"N": int, "TOKENS": int, "BYTES": int, "S": float, "PRICE": float}
"""Types of options by the name of their value; others are texts."""
_SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"
"""Clears the line of a progress bar, which hides the cursor of a terminal."""


class Parser(argparse.ArgumentParser):
    """An argparse parser with one-line errors and without abbreviated options.

    The meaning of an abbreviation could change when an option is added.

    Args:
        program: name of the command.
        arguments: its arguments in the first line of the help, which then lists no options.
    """

    def __init__(self, program: str, arguments: str | None = None, **kwargs: Any) -> None:
        super().__init__(
            program,
            usage=None if arguments is None else f"{program} [options] {arguments}",
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            **kwargs,
        )
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses arguments; the error for an unknown one says what was probably meant.

        An option that takes one value may be given once, and a switch in one of its two forms.
        """
        self._check_repeats(words)
        parsed, unknown = self.parse_known_args(words)
        for flag in (word.partition("=")[0] for word in unknown if word.startswith("-")):
            shown = [action for action in self._actions if action.help != argparse.SUPPRESS]
            flags = [flag for action in shown for flag in action.option_strings]
            close = closest(flag, flags)
            self.error(f"unknown option {flag}" + (f"; did you mean {close}?" if close else ""))
        if unknown:
            usage = " ".join(self.format_usage().split())
            self.error(f"unexpected argument {unknown[0]!r}; {usage}")
        return parsed

    def _check_repeats(self, words: Sequence[str]) -> None:
        given: dict[argparse.Action, str] = {}
        for word in itertools.takewhile(lambda word: word != "--", words):
            flag = word.partition("=")[0]
            action = self._option_string_actions.get(flag)
            if action is None or isinstance(action, argparse._AppendAction):  # pyright: ignore[reportPrivateUsage]
                continue
            if action in given and given[action] != flag:
                self.error(f"{given[action]} and {flag} contradict each other; give one of them")
            if action in given and action.nargs != 0:
                self.error(f"{flag}: given twice, but it takes one value; give it once")
            given[action] = flag

    def flags(self, *, take_values: bool) -> set[str]:
        """Options that take a value, or else those that take none."""
        actions = [action for action in self._actions if (action.nargs != 0) == take_values]
        return {flag for action in actions for flag in action.option_strings}

    def error(self, message: str) -> NoReturn:
        message = str(JaxLLMError(one_line(message)))  # of at most 500 characters
        print(f"{self.prog}: error: {message} (see --help)", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def add_flags(
    parser: argparse._ActionsContainer,  # pyright: ignore[reportPrivateUsage]
    flags: Flags,
) -> None:
    """Adds options to a parser, or to a group of one.

    Args:
        flags: options as the help shows them, such as ``--split NAME``, with their help, or with
            arguments of `add_argument`. An option without a value is a switch. Those with N,
            TOKENS or BYTES take an integer, those with S or PRICE a number, others a text.
    """
    for flag, given in flags.items():
        name, _, metavar = flag.partition(" ")
        options: dict[str, Any] = {"help": given} if isinstance(given, str) else dict(given)
        if metavar:
            options = {"metavar": metavar, "type": TYPES.get(metavar, str), **options}
        elif options.keys() == {"help"}:
            options["action"] = "store_true"
        parser.add_argument(name, **options)


def dests(flags: Iterable[str]) -> list[str]:
    """Names of the parsed values of `add_flags`.

    >>> dests(["--dry-run", "--split NAME"])
    ['dry_run', 'split']
    """
    return [flag.split()[0].removeprefix("--").replace("-", "_") for flag in flags]


def path(text: str) -> Path:
    """The path that an option gives, with ``~`` expanded; "" would be the current folder."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, found an empty text")
    return Path(os.path.expanduser(text))


def reject(arguments: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raises InputError if one of some options is given."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value is not False:  # 0 is a value
            shown = "PROMPT" if name == "text" else "--" + name.replace("_", "-")
            raise InputError(f"{shown}: {reason}")


def run_command(
    command: Callable[[list[str]], int], program: str, argv: Sequence[str] | None = None
) -> int:
    """Runs a command on its arguments and returns the exit code.

    A :class:`~jaxllm.JaxLLMError` prints one line (with ``--debug`` also the traceback) and gives
    2, and so do a full disk, a name that is too long, missing permissions, devices whose memory is
    full and a platform of JAX_PLATFORMS that is not there. Any other exception is a bug and keeps
    its traceback. A closed pipe (``| head``) gives 141, without a message.
    SIGINT, SIGTERM and SIGHUP give 130, 143 and 129 (see `Signals`).
    """
    with signals.handled(program):
        code = _exit_code(command, program, list(sys.argv[1:] if argv is None else argv))
        number = signals.received()
    return code if number is None else 128 + number


def command(
    make_parser: Callable[[str], Parser], run: Callable[[argparse.Namespace], int], name: str
) -> Callable[..., int]:
    """Makes the entry point of a command, ``main(argv=None, program=name)``; see `run_command`.

    Args:
        make_parser: makes the parser of a program of this name.
        run: runs the command on the arguments that the parser reads.
    """

    def main(argv: Sequence[str] | None = None, program: str = name) -> int:
        parser = make_parser(program)

        def parsed(arguments: list[str]) -> int:
            namespace = parser.parse(arguments)
            # For messages that repeat the command.
            namespace.command = shlex.join([*program.split(), *arguments])
            # Its import takes as long as JAX's.
            from jaxllm.common.precision import matmul_precision

            with matmul_precision(getattr(namespace, "matmul_precision", None)):
                return run(namespace)

        return run_command(parsed, program, argv)

    return main


def _exit_code(command: Callable[[list[str]], int], program: str, arguments: list[str]) -> int:
    try:
        with warnings.catch_warnings(), signals.giving_way():
            # Settings are checked while weights are read, and again for the call. A server, which
            # runs for weeks, remembers the latest warnings only.
            say = functools.lru_cache(100)(functools.partial(print, file=sys.stderr))
            warnings.showwarning = lambda message, *_, **__: say(
                f"{program}: warning: {one_line(str(message))}"
            )
            code = command(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        close_stdout()
        return BROKEN_PIPE
    except (JaxLLMError, RuntimeError, AssertionError, OSError) as failure:
        message = _explained(failure)
        if message is None:
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        # stderr may be closed or full, too.
        with contextlib.suppress(OSError):
            print(f"{program}: error: {one_line(message)}", file=sys.stderr, flush=True)
        # JAX would wait for minutes for the other processes.
        if isinstance(failure, JaxLLMError) and not signals.leave():
            sys.stdout.flush()
            os._exit(USAGE_ERROR)
        return USAGE_ERROR


def _explained(failure: Exception) -> str | None:
    """What the user can correct after a failure; None if it is a bug."""
    if isinstance(failure, JaxLLMError):
        return str(failure)
    if not isinstance(failure, OSError):
        if "RESOURCE_EXHAUSTED" in str(failure):
            reason = str(failure).splitlines()[0]
            return f"the memory of the devices is full; lower the sizes of the work ({reason})"
        return backend_failure()
    if failure.errno in _NAMED and failure.filename is not None:
        return f"{failure.filename}: {failure.strerror}"
    try:
        os.getcwd()  # to which paths are relative
    except FileNotFoundError:
        return "the current folder has been removed; change to another one"
    if failure.errno not in FULL:
        return None
    close_stdout()
    where = f"{failure.filename}: " if failure.filename else ""
    return f"{where}nothing more can be written ({failure.strerror})"


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


class Signals:
    """Ends the process on one of `STOP_SIGNALS`; signals that are ignored stay ignored.

    Python runs a signal handler between two instructions of the main thread: late while a program
    compiles, and inside whatever runs there, where an exception may be lost (garbage collection) or
    show the traceback of an import. So the handlers here do nothing. A thread reads the numbers of
    the signals from a pipe (``signal.set_wakeup_fd``) and acts on them.

    Attributes:
        program: name in messages.
        leave: disconnects this process from others before it ends; False if they did not answer.
    """

    def __init__(self) -> None:
        self.program = "jaxllm"
        self._reset()

    def _reset(self) -> None:
        self.leave: Callable[[], bool] = lambda: True
        self._react: Callable[[int], None] = self.end
        self._received: list[int] = []
        self._earlier: dict[int, Any] = {}
        self._is_handling = self._is_ending = False

    def install(self, program: str) -> None:
        """Handles the signals of this process until it exits."""
        self.program = program
        if not self._is_handling:
            self._start()
            # While Python exits it restores the default handlers, by which a command that has done
            # its work would still be killed. Functions registered first are called last.
            atexit.register(self._ignore)

    @contextlib.contextmanager
    def handled(self, program: str) -> Generator[None]:
        """Handles signals inside, and restores the earlier handlers, for callers in Python.

        Does nothing after `install`, and outside the main thread, where Python takes no signals.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if is_main:
            self.program = program
        if self._is_handling or not is_main:
            yield
            return
        self._start()
        try:
            yield
        finally:
            for number, handler in self._earlier.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(self._earlier_pipe)
            os.close(self._writer)
            self._reset()

    def _start(self) -> None:
        self._is_handling = True
        reader, self._writer = os.pipe()
        if hasattr(os, "set_blocking"):  # not with Python 3.11 on Windows, which needs it not
            os.set_blocking(self._writer, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):
                self._earlier[number] = handler
                signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()

    def _ignore(self) -> None:
        for number in self._earlier:
            signal.signal(number, signal.SIG_IGN)

    def _watch(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] in STOP_SIGNALS:
                self._react(number[0])
        os.close(reader)

    def end(self, number: int) -> None:
        """Ends the process with 128 + `number`, and one line."""
        self._is_ending = True
        self.say(f"stopped by {signal.Signals(number).name}")
        self.leave()
        os._exit(128 + number)

    def say(self, line: str) -> None:
        """Writes a line with the program's name to stderr, from any thread."""
        # Neither print nor sys.stderr, whose lock the main thread may hold.
        start = _SHOW_CURSOR if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{self.program}: {line}\n".encode())

    def received(self) -> int | None:
        """Number of the signal that was deferred, if any."""
        return self._received[0] if self._received else None

    def stop_after(
        self,
        unit: str | Callable[[], str],
        *,
        quiet: bool = False,
        from_now_on: bool = False,
    ) -> Callable[[], int | None]:
        """Makes a function `stop`, to be called between two steps or rows.

        From its first call on, the first signal is only recorded, and the next one ends the
        process. Before that a signal ends it at once, since nothing was begun.

        Args:
            unit: what is finished first ("step"), for the message. A function is called when the
                signal comes, and returns the whole phrase ("the 2 requests that run"), or an empty
                text if nothing is finished first.
            quiet: print no message.
            from_now_on: record signals before the first call, too, since other processes would
                wait for this one.

        Returns:
            A function without arguments: the number of the signal that was received, or None.
        """

        def defer(number: int) -> None:
            if self._received:
                self.end(number)
            self._received.append(number)
            if not quiet:
                first = f"this {unit}" if isinstance(unit, str) else unit()
                after = f" after {first}; a second signal ends at once" if first else ""
                self.say(f"{signal.Signals(number).name}: stopping{after}")

        def stop() -> int | None:
            self._react = defer
            return self.received()

        if from_now_on:
            self._react = defer
        return stop

    @contextlib.contextmanager
    def passed_to(self, react: Callable[[int], None]) -> Generator[None]:
        """Calls `react` with the numbers of signals inside, in another thread."""
        earlier, self._react = self._react, react
        try:
            yield
        finally:
            self._react = earlier

    @contextlib.contextmanager
    def giving_way(self) -> Generator[None]:
        """Waits at its end for that of the process, if a signal is ending it in the other thread.

        What fails then, such as the communication with processes that end too, is of no interest.
        """
        try:
            yield
        finally:
            if self._is_ending:
                threading.Event().wait()


signals = Signals()
"""The signals of this process, of which there is one set."""
