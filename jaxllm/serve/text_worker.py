"""Tokenizes and renders the texts of strangers in processes with limits of time and memory.

A client of the server may send a text for which an honest regular expression or chat template takes
quadratic time, while Python's lock is held. So a small process holds the tokenizer, and forks a
child for each text. The child computes under the limits of the operating system, and is killed if
it exceeds them. The children share the processors, so a slow text does not delay the others, and
they leave the processors to the server when it needs them.

Where a process cannot fork (Windows), texts are tokenized in the server's process, without limits.

The small process runs this file as a program. It imports the package's tokenizers, but not JAX.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CPU_SECONDS = 2.0
SECONDS_PER_BYTE = 4e-6
"""Several times what honest tokenizers take."""
MEMORY_BYTES = 2**30
"""Memory that a child may take beside that of the process which forks it."""
WALL_SECONDS = 60.0
"""Limit for a child on a busy machine."""
MAX_TEXTS = 64
"""Largest number of texts that are computed at once. Further texts wait."""
HEADER_BYTES, READY = 8, b"+"
"""Size of the number before a message, and the sign that the process holds the tokenizer."""
CAN_FORK = hasattr(os, "fork") and hasattr(socket, "send_fds")


class TextWorker:
    """Calls methods of a tokenizer in forked processes with limits.

    Args:
        tokenizer: the server's. A copy of it is sent to the process.
        cpu_seconds: CPU time of one call, beside 4 microseconds per byte.
        memory_bytes: memory of one call, on Linux.

    Attributes:
        threads: threads that wait for texts, so that the threads of the event loop stay free.

    Raises:
        TokenizerError: the process does not start.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        cpu_seconds: float = CPU_SECONDS,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._tokenizer, self._cpu_seconds = tokenizer, cpu_seconds
        self.threads = ThreadPoolExecutor(MAX_TEXTS, "texts")
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._settings = {"memory_bytes": memory_bytes, "path": [*map(os.path.abspath, sys.path)]}
        if CAN_FORK:
            self._start()

    def _start(self) -> None:
        """Starts the process and waits until it holds the tokenizer."""
        ours, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-I", os.path.abspath(__file__), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal is for the server alone
        )
        theirs.close()
        self._socket = ours
        with contextlib.suppress(OSError):  # the process has ended
            for value in (self._settings, self._tokenizer):
                content = pickle.dumps(value)
                ours.sendall(_header(content) + content)
            if ours.recv(1) == READY:
                return
        self._end()
        from jaxllm.common.errors import TokenizerError

        raise TokenizerError(
            "the process that tokenizes the texts of clients ended before it was ready; its "
            "message is above"
        )

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method of the tokenizer.

        Raises:
            JaxLLMError: as the method, or InputError if the call exceeds a limit.
        """
        if not CAN_FORK:
            return getattr(self._tokenizer, method)(*arguments, **options)
        call = pickle.dumps((method, arguments, options))
        seconds = self._cpu_seconds + SECONDS_PER_BYTE * len(call)
        request = pickle.dumps((seconds, call))
        reader, writer = os.pipe()
        try:
            try:
                with self._lock:
                    self._send(request, writer)
            finally:
                os.close(writer)
            answer = _read(reader, WALL_SECONDS)
        finally:
            os.close(reader)
        return _result(answer, seconds)

    def _send(self, request: bytes, writer: int) -> None:
        """Sends a request and the pipe for its answer. Starts the process again if it ended."""
        for attempt in (1, 2):
            assert self._socket is not None
            try:
                socket.send_fds(self._socket, [_header(request)], [writer])
                self._socket.sendall(request)
                return
            except OSError:
                if attempt == 2:
                    raise
                self._end()
                self._start()

    def close(self) -> None:
        """Ends the process."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._end()

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _header(content: bytes) -> bytes:
    """The length of a message, which is sent before the message."""
    return len(content).to_bytes(HEADER_BYTES, "little")


def _read(reader: int, seconds: float) -> bytes:
    """The number of the child and its answer. The child is killed after some seconds."""
    content, deadline = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            part = os.read(reader, 1 << 20)
            if not part:
                return content
            content += part
    if len(content) >= HEADER_BYTES:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int.from_bytes(content[:HEADER_BYTES], "little"), signal.SIGKILL)
    return b""


def _result(answer: bytes, seconds: float) -> Any:
    """The value that a child sent, or the error that it raised."""
    from jaxllm.common.errors import InputError

    try:
        is_error, value = pickle.loads(answer[HEADER_BYTES:])
    except (EOFError, pickle.UnpicklingError):  # the child was killed
        raise InputError(
            f"the text takes more than {seconds:.1f} s or too much memory to tokenize: give a "
            "shorter one"
        ) from None
    if is_error:
        raise value
    return value


def serve(connection: socket.socket) -> None:
    """Receives the tokenizer, then forks a child for each request until the server ends."""
    settings = pickle.loads(_receive(connection, connection.recv(HEADER_BYTES, socket.MSG_WAITALL)))
    sys.path[:] = settings["path"]
    tokenizer = pickle.loads(
        _receive(connection, connection.recv(HEADER_BYTES, socket.MSG_WAITALL))
    )
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of children that exceed their limits
    connection.sendall(READY)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    while True:
        header, files, _, _ = socket.recv_fds(connection, HEADER_BYTES, 1, socket.MSG_WAITALL)
        if not header:
            return
        request = _receive(connection, header)
        if os.fork() == 0:
            connection.close()
            _answer(tokenizer, request, files[0], settings["memory_bytes"])
        os.close(files[0])


def _receive(connection: socket.socket, header: bytes) -> bytes:
    """The message after a header."""
    size, content = int.from_bytes(header, "little"), bytearray()
    while len(content) < size:
        part = connection.recv(size - len(content))
        if not part:
            os._exit(0)
        content += part
    return bytes(content)


def _answer(tokenizer: Any, request: bytes, writer: int, memory_bytes: int) -> None:
    """Computes one request under its limits, in a child, and ends the child."""
    os.write(writer, os.getpid().to_bytes(HEADER_BYTES, "little"))
    os.nice(10)
    seconds, call = pickle.loads(request)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF kills the process
    limit_memory(memory_bytes)
    try:
        method, arguments, options = pickle.loads(call)
        answer = (False, getattr(tokenizer, method)(*arguments, **options))
    except MemoryError:
        os._exit(1)
    except Exception as error:
        answer = (True, error)
    with open(writer, "wb") as file:
        pickle.dump(answer, file)
    os._exit(0)


def limit_memory(extra_bytes: int) -> None:
    """Limits the address space of this process to what it has and some bytes more, on Linux.

    Other systems have no such limit that works.
    """
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + extra_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
