"""The thread that owns the device: takes requests and cancellations, and delivers new tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.serve.live_rows import LiveTask
from jaxllm.serve.live_run import Chunk, LiveRun

_RATE_SEQUENCES = 64
"""Finished sequences from which the rate of the queue is estimated."""


class QueueFullError(JaxLLMError, RuntimeError):
    """Too many requests wait; a client may try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(JaxLLMError, RuntimeError):
    """The engine takes no requests: it is not started, is closing, or has failed."""


class ChunkReceiver(Protocol):
    """Receives the chunks of its tasks, from the engine's thread."""

    def deliver(self, chunks: list[Chunk]) -> None: ...


class EngineThread:
    """Runs a `LiveRun` until it is closed.

    Args:
        run: used by this thread alone from `start` on.
        queue_size: most tasks that wait for a slot while all slots are taken.
        prepare: called in the thread before the first request (compilation).
    """

    def __init__(self, run: LiveRun, queue_size: int, prepare: Callable[[], object]) -> None:
        self._run, self._queue_size, self._prepare = run, queue_size, prepare
        self._changed = threading.Condition()
        self._arrived: list[LiveTask] = []
        self._cancelled: list[tuple[ChunkReceiver, int]] = []
        self._waiting_in_run = 0
        self._slots = run.slots
        self._closing = False
        self._ready = threading.Event()
        self._finish_times: deque[float] = deque(maxlen=_RATE_SEQUENCES)
        main = with_settings_of_this_thread(self._main)
        self._thread = threading.Thread(target=main, name="jaxllm-engine", daemon=True)
        self.failure: BaseException | None = None
        """Error that ended the thread before it was closed."""
        self.running = 0
        """Tasks in slots after the last step."""

    def start(self) -> None:
        """Starts the thread, and waits until it is ready for requests.

        Raises what `prepare` raises.
        """
        self._thread.start()
        self._ready.wait()
        if self.failure is not None:
            raise self.failure

    @property
    def waiting(self) -> int:
        """Tasks that wait for a slot."""
        with self._changed:
            return len(self._arrived) + self._waiting_in_run

    def submit(self, tasks: list[LiveTask]) -> None:
        """Queues all of some tasks, or none.

        Raises:
            InputError: the queue never has a place for so many.
            QueueFullError: the queue has no place for all of them.
            EngineStoppedError: the engine takes no requests.
        """
        with self._changed:
            if self.failure is not None:
                raise EngineStoppedError(f"the engine has failed ({self.failure}): restart it")
            if self._closing or not self._ready.is_set():
                raise EngineStoppedError("the engine is not started, or is closing")
            if len(tasks) > self._queue_size + self._slots:
                raise InputError(
                    f"n: {len(tasks)} sequences are asked for, but all slots and the queue hold "
                    f"{self._queue_size + self._slots}; ask for fewer"
                )
            unfinished = len(self._arrived) + self._waiting_in_run + self.running
            if unfinished + len(tasks) > self._queue_size + self._slots:
                waiting = max(unfinished - self._slots, 0)
                raise QueueFullError(
                    f"{waiting} sequences wait for a slot, and the queue holds "
                    f"{self._queue_size}; try again later",
                    self._seconds_for(waiting),
                )
            self._arrived += tasks
            self._changed.notify()

    def cancel(self, request: ChunkReceiver, sample: int) -> None:
        """Ends one sample of a request after the step that runs."""
        with self._changed:
            self._cancelled.append((request, sample))
            self._changed.notify()

    def close(self, *, drain: bool = True) -> None:
        """Takes no more requests, and waits until the thread has ended.

        Args:
            drain: those that were taken are answered first; otherwise they end with an error.
        """
        with self._changed:
            self._closing = True
            if not drain and self.failure is None:
                self.failure = EngineStoppedError("the engine was closed")
            self._changed.notify()
        if self._thread.ident is not None:
            self._thread.join()

    def _seconds_for(self, sequences: int) -> int:
        """About how long so many sequences take, from 1 to 60."""
        times = self._finish_times
        if len(times) < 2:
            return 1
        seconds = (times[-1] - times[0]) / (len(times) - 1) * sequences
        return int(min(max(seconds, 1), 60))

    def _main(self) -> None:
        try:
            self._prepare()
            self._ready.set()
            while self._receive():
                results = self._run.step()
                with self._changed:
                    self._note()
                self._deliver(results)
        except BaseException as failure:
            with self._changed:
                self.failure = failure
        finally:
            self._end()

    def _receive(self) -> bool:
        """Takes what has arrived, and waits while there is nothing to do; False: the end."""
        with self._changed:
            while self.failure is None:
                tasks, self._arrived = self._arrived, []
                cancelled, self._cancelled = self._cancelled, []
                self._run.add(tasks)
                self._run.cancel(cancelled)
                self._note()
                if self._run.busy:
                    return True
                if self._closing:
                    return False
                self._changed.wait()
            return False

    def _note(self) -> None:
        """Notes for other threads what waits and runs; called with the lock held."""
        self._waiting_in_run, self.running = self._run.waiting, len(self._run.running)

    def _deliver(self, results: list[tuple[LiveTask, Chunk]]) -> None:
        now = time.monotonic()
        self._finish_times.extend(now for _, chunk in results if chunk.is_last)
        by_request: dict[int, tuple[ChunkReceiver, list[Chunk]]] = {}
        for task, chunk in results:
            _, chunks = by_request.setdefault(id(task.request), (task.request, []))
            chunks.append(chunk)
        for request, chunks in by_request.values():
            request.deliver(chunks)

    def _end(self) -> None:
        """Ends all requests that are left with an error."""
        with self._changed:
            self._closing = True
            tasks = [*self._run.take_all(), *self._arrived]
            self._arrived, self._waiting_in_run, self.running = [], 0, 0
        self._ready.set()
        error = EngineStoppedError(f"the engine ended during the request: {self.failure}")
        self._deliver([(task, Chunk(task.sample, (), error=error)) for task in tasks])
