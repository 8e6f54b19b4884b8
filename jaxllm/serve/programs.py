"""The compiled programs of a server, most of which become ready while requests run."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from jaxllm.batch.slot_pool import ProgramTable
from jaxllm.common.threads import with_settings_of_this_thread

_LOG = logging.getLogger("jaxllm.serve")


class Programs:
    """Programs by name, and which of them are compiled.

    A program that is not among them is compiled when it is first called. XLA compiles without
    Python's lock, so that requests run while other programs are compiled in the background.

    Attributes:
        names: all programs.
        failure: why a program could not be compiled in the background.
        on_failure: called after that.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failure: BaseException | None = None
        self.on_failure: Callable[[BaseException], object] = lambda failure: None
        self._missing: ProgramTable = {}
        self._wanted = ""
        self._is_stopping = False
        # As the engine's thread, which calls the programs: under the settings of the thread that
        # makes the engine.
        self._main = with_settings_of_this_thread(self._compile_rest)
        self._thread: threading.Thread | None = None

    def add(self, programs: ProgramTable) -> None:
        """Adds programs, which are compiled in this order."""
        self.names += programs
        self._missing |= programs

    @property
    def compiled(self) -> int:
        """Number of programs that are compiled."""
        return len(self.names) - len(self._missing)

    @property
    def is_compiling(self) -> bool:
        """True while programs are compiled in the background."""
        return self._thread is not None and self._thread.is_alive()

    def has(self, name: str) -> bool:
        """True if a program is compiled, or will be when it is first called."""
        return name not in self._missing

    def first(self, name_of: Callable[[int], str], width: int) -> int:
        """The smallest width, found by doubling, whose program is compiled. The program of `width`
        itself is compiled before the others, if it is missing.

        Args:
            name_of: maps a width to the name of its program.
        """
        if not self.has(name_of(width)):
            self._wanted = name_of(width)
        while not self.has(name_of(width)):
            width *= 2
        return width

    def compile(self, count: int | None = None) -> None:
        """Compiles programs until `count` are compiled, or all. Compiles no further one after
        `stop`, or when the main thread has ended."""
        count = len(self.names) if count is None else count
        # Python waits for this thread then: a daemon thread inside XLA would abort the process.
        main = threading.main_thread()
        while self.compiled < count and main.is_alive() and not self._is_stopping:
            name = self._wanted if self._wanted in self._missing else next(iter(self._missing))
            self._missing[name]()
            del self._missing[name]

    def compile_in_background(self) -> None:
        """Compiles the missing programs in a thread of their own."""
        self._thread = threading.Thread(target=self._main, name="jaxllm-compile")
        self._thread.start()

    def _compile_rest(self) -> None:
        try:
            self.compile()
        except BaseException as failure:
            _LOG.error("a program cannot be compiled", exc_info=failure)
            self.failure = failure
            self.on_failure(failure)

    def stop(self) -> None:
        """Compiles nothing more after the program that is being compiled."""
        self._is_stopping = True
