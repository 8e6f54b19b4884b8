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
ANSWER_SECONDS = 30.0
"""Time in which the process must begin a request. A process that does not is replaced."""
ATTEMPTS = 2
"""Processes to which one request is sent before it fails."""
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
        answer_seconds: time in which the process must begin a call. A process that does not, such
            as one that a signal has stopped, is replaced.

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
        answer_seconds: float = ANSWER_SECONDS,
    ) -> None:
        self._tokenizer, self._cpu_seconds = tokenizer, cpu_seconds
        self._answer_seconds = answer_seconds
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
        ours.settimeout(WALL_SECONDS)
        with contextlib.suppress(OSError):  # the process has ended
            for value in (self._settings, self._tokenizer):
                content = pickle.dumps(value)
                ours.sendall(_header(content) + content)
            if ours.recv(1) == READY:
                ours.settimeout(self._answer_seconds)
                return
        self._end()
        from jaxllm.common.errors import TokenizerError

        raise TokenizerError(
            "the process that tokenizes the texts of clients ended before it was ready; its "
            "message is above"
        )

    def call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """The result of a method of the tokenizer.

        A call that the process had not begun when it ended is sent to the next process, once.

        Raises:
            JaxLLMError: as the method, or InputError if the call exceeds a limit.
            WorkerStoppedError: two processes ended, or did not answer, before they began the call.
        """
        if not CAN_FORK:
            return getattr(self._tokenizer, method)(*arguments, **options)
        call = pickle.dumps((method, arguments, options))
        seconds = self._cpu_seconds + SECONDS_PER_BYTE * len(call)
        request = pickle.dumps((seconds, call))
        from jaxllm.common.errors import TokenizerError, WorkerStoppedError

        for _ in range(ATTEMPTS):
            process, answer = self._ask(request)
            if answer:
                return _result(answer, seconds)
            try:
                self._replace(process)
            except TokenizerError:  # the next process does not start
                break
        raise WorkerStoppedError(
            "the process that tokenizes the texts of clients ended before it read this one; send "
            "the request again"
        )

    def _ask(self, request: bytes) -> tuple[subprocess.Popen[bytes], bytes]:
        """Sends a request to the process; returns the process and its answer.

        The answer is empty if the process has not begun the request.
        """
        reader, writer = os.pipe()
        try:
            try:
                with self._lock:
                    process, connection = self._process, self._socket
                    assert process is not None
                    assert connection is not None
                    try:
                        socket.send_fds(connection, [_header(request)], [writer])
                        connection.sendall(request)
                    except OSError:  # the process ended, or does not read
                        self._end()  # nothing may follow a part of a request
                        return process, b""
            finally:
                os.close(writer)
            return process, _read(reader, self._answer_seconds)
        finally:
            os.close(reader)

    def _replace(self, process: subprocess.Popen[bytes] | None) -> None:
        """Starts a process in place of another one, unless another thread did so before.

        Raises:
            TokenizerError: the process does not start.
        """
        with self._lock:
            if self._process is process:
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


def _read(reader: int, answer_seconds: float) -> bytes:
    """The number of the child and its answer.

    Empty if the process does not begin the request within `answer_seconds`. The number alone if the
    child was killed, as it is after `WALL_SECONDS`.
    """
    content, deadline = b"", time.monotonic() + answer_seconds
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(deadline - time.monotonic(), 0)):
            part = os.read(reader, 1 << 20)
            if not part:
                return content
            if not content:  # the child has begun
                deadline = time.monotonic() + WALL_SECONDS
            content += part
    if content:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int.from_bytes(content[:HEADER_BYTES], "little"), signal.SIGKILL)
    return content[:HEADER_BYTES]


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
    tokenizer.prepare_chats()
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
