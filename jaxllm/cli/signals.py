"""Ends a command on SIGINT, SIGTERM or SIGHUP: at once, or after the step or row it is at.

Python runs a signal handler between two instructions of the main thread: late while a program
compiles, and inside whatever runs there, where an exception may be lost (garbage collection) or
show the traceback of an import. So the handlers here do nothing. A thread reads the numbers of
the signals from a pipe (``signal.set_wakeup_fd``) and acts on them.

Imports nothing heavy: commands install it before they import JAX.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Generator

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_CURSOR = "\r\x1b[2K\x1b[?25h"
"""Clears the line of a progress bar, which hides the cursor of a terminal."""


class SignalWatcher:
    """Handlers of `STOP_SIGNALS` and the thread that acts; signals that are ignored stay ignored.

    Args:
        program: name in messages.

    Attributes:
        received: signals that were deferred so far.
        react: called in the thread with the number of each signal.
        leave: disconnects this process from others; called before it ends.
        is_ending: True from the signal on that ends the process.
    """

    def __init__(self, program: str) -> None:
        self.program = program
        self.received: list[int] = []
        self.react: Callable[[int], None] = self.end
        self.leave: Callable[[], bool] = lambda: True
        self.is_ending = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        self._earlier = {
            number: signal.getsignal(number)
            for number in STOP_SIGNALS
            if signal.getsignal(number) not in (signal.SIG_IGN, None)
        }
        for number in self._earlier:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, name="signals", daemon=True).start()

    def ignore(self) -> None:
        """Ignores the signals from now on."""
        for number in self._earlier:
            signal.signal(number, signal.SIG_IGN)

    def close(self) -> None:
        """Restores the earlier handlers."""
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_pipe)
        os.close(self._writer)

    def _watch(self) -> None:
        while number := os.read(self._reader, 1):
            if number[0] in STOP_SIGNALS:
                self.react(number[0])
        os.close(self._reader)

    def end(self, number: int) -> None:
        """Ends the process with 128 + `number`, and one line."""
        self.is_ending = True
        self.say(f"stopped by {signal.Signals(number).name}")
        self.leave()
        os._exit(128 + number)

    def say(self, line: str) -> None:
        """Writes a line to stderr."""
        # Neither print nor sys.stderr, whose lock the main thread may hold.
        start = SHOW_CURSOR if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{start}{self.program}: {line}\n".encode())


_watcher: SignalWatcher | None = None


def install(program: str) -> None:
    """Handles the signals of this process until it exits."""
    global _watcher
    if _watcher is None:
        _watcher = SignalWatcher(program)
        # While Python exits it restores the default handlers, by which a command that has done its
        # work would still be killed. Functions that are registered first are called last.
        atexit.register(_watcher.ignore)
    _watcher.program = program


@contextlib.contextmanager
def handled(program: str) -> Generator[None]:
    """Handles signals inside, and restores the earlier handlers, for callers in Python.

    Does nothing within `install`, and outside the main thread, where Python takes no signals.
    """
    global _watcher
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    if _watcher is not None:
        _watcher.program = program
        yield
        return
    watcher = _watcher = SignalWatcher(program)
    try:
        yield
    finally:
        watcher.close()
        _watcher = None


def stop_after(
    unit: str | Callable[[], str], *, quiet: bool = False, from_now_on: bool = False
) -> Callable[[], int | None]:
    """Makes a function `stop`, to be called between two steps or rows.

    From its first call on, the first signal is only recorded, and the next one ends the process.
    Before that a signal ends it at once, since nothing was begun.

    Args:
        unit: what is finished first ("step"), for the message. A function is called when the signal
            comes, and returns the whole phrase ("the 2 requests that run"), or an empty text if
            nothing is finished first.
        quiet: print no message.
        from_now_on: record signals before the first call, too, since other processes would wait
            for this one.

    Returns:
        A function without arguments: the number of the signal that was received, or None.
    """
    watcher = _watcher
    if watcher is None:
        return lambda: None

    def defer(number: int) -> None:
        if watcher.received:
            watcher.end(number)
        watcher.received.append(number)
        if not quiet:
            first = f"this {unit}" if isinstance(unit, str) else unit()
            after = f" after {first}; a second signal ends at once" if first else ""
            watcher.say(f"{signal.Signals(number).name}: stopping{after}")

    def stop() -> int | None:
        watcher.react = defer
        return received()

    if from_now_on:
        watcher.react = defer
    return stop


def leave_by(leave: Callable[[], bool]) -> None:
    """Sets the function by which `leave` and a signal disconnect this process from others."""
    if _watcher is not None:
        _watcher.leave = leave


def leave() -> bool:
    """Disconnects this process from others; False if they did not answer in time."""
    return _watcher is None or _watcher.leave()


@contextlib.contextmanager
def giving_way() -> Generator[None]:
    """Waits at its end for that of the process, if a signal is ending it in the other thread.

    What fails then, such as the communication with processes that end too, is of no interest.
    """
    try:
        yield
    finally:
        if _watcher is not None and _watcher.is_ending:
            threading.Event().wait()


def say(line: str) -> None:
    """Writes a line with the program's name to stderr, from any thread."""
    if _watcher is not None:
        _watcher.say(line)


def received() -> int | None:
    """Number of the signal that was deferred, if any."""
    return _watcher.received[0] if _watcher is not None and _watcher.received else None


def end(number: int) -> None:
    """Ends the process on a signal, from the function of `passed_to`."""
    if _watcher is not None:
        _watcher.end(number)


@contextlib.contextmanager
def passed_to(react: Callable[[int], None]) -> Generator[None]:
    """Calls `react` with the numbers of signals inside, in another thread."""
    assert _watcher is not None
    earlier, _watcher.react = _watcher.react, react
    try:
        yield
    finally:
        _watcher.react = earlier
