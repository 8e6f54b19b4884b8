"""`AsyncEngine`: requests that come as they come, answered in slots, from asyncio.

An `EngineThread` owns the device. It takes requests and cancellations, and delivers new tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Self

import numpy as np
from jax.sharding import Mesh

from jaxllm.batch.generator import check_model, check_tokenizer, slot_limits
from jaxllm.batch.memory import Prediction, fitting_slots, memory_budget, predict
from jaxllm.batch.prompt_chunks import staged_shapes
from jaxllm.batch.row_groups import Task, TaskChunk
from jaxllm.batch.rows import BatchOutput, BatchRow, Chunk, RowReader
from jaxllm.batch.slot_pool import BatchCounts, few_slots
from jaxllm.batch.slots import Sizes
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, JaxLLMError
from jaxllm.common.hardware import nbytes
from jaxllm.common.threads import with_settings_of_this_thread
from jaxllm.generation.inputs.arguments import SMALLEST_BUCKET
from jaxllm.generation.inputs.values import bucket
from jaxllm.generation.processors.grammar import GrammarLogitsProcessor
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.decoder_only import with_rope_per_row
from jaxllm.parallel.placement import platform_of_arrays
from jaxllm.parallel.sharding import row_shards
from jaxllm.serve.admission import PrefixCounts, buckets, prefill_options
from jaxllm.serve.live_run import LiveRun, RequestReader, live_group
from jaxllm.serve.programs import Programs
from jaxllm.tokenizers.tokenizer import Tokenizer

_LOG = logging.getLogger("jaxllm.serve")
_RATE_SEQUENCES = 64
"""Finished sequences from which the rate of the queue is estimated."""
DEFAULT_QUEUE_SIZE = 256


class QueueFullError(JaxLLMError, RuntimeError):
    """Too many requests wait; a client may try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineStoppedError(JaxLLMError, RuntimeError):
    """The engine takes no requests: it is not started, is closing, or has failed."""


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
        self._arrived: list[Task] = []
        self._cancelled: list[tuple[GenerationStream, int]] = []
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

    def submit(self, tasks: list[Task]) -> None:
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

    def cancel(self, request: GenerationStream, sample: int) -> None:
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

    def fail(self, failure: BaseException) -> None:
        """Ends all requests with an error, from another thread."""
        with self._changed:
            self.failure = self.failure or failure
            self._changed.notify()

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
            if self._ready.is_set():  # else `start` raises it
                _LOG.error("the engine has failed", exc_info=failure)
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

    def _deliver(self, results: list[TaskChunk]) -> None:
        now = time.monotonic()
        self._finish_times.extend(now for _, chunk in results if chunk.is_last)
        by_request: dict[int, tuple[GenerationStream, list[Chunk]]] = {}
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
        self._deliver([end for task in tasks for end in task.failed(error)])


class GenerationStream:
    """The chunks of one request, as they come: an asynchronous iterator.

    Used as a context manager, it cancels the request when the block ends early.
    """

    def __init__(self, thread: EngineThread, row: BatchRow) -> None:
        self._thread, self.row = thread, row
        self._loop = asyncio.get_running_loop()
        self._chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self._open_samples = set(range(row.samples))

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.row.input_ids)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        """The next chunk of any sample.

        Raises:
            JaxLLMError: the request ended with an error.
        """
        while self._open_samples:
            chunk = await self._chunks.get()
            if chunk.sample not in self._open_samples:  # cancelled
                continue
            if chunk.is_last:
                self._open_samples.remove(chunk.sample)
            if chunk.error is not None:
                self.cancel()
                raise chunk.error
            return chunk
        raise StopAsyncIteration

    def cancel(self, sample: int | None = None) -> None:
        """Ends the request, or one of its samples; slots are free after the step that runs."""
        samples = self._open_samples if sample is None else self._open_samples & {sample}
        for number in samples:
            self._thread.cancel(self, number)
        self._open_samples -= samples

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cancel()

    def deliver(self, chunks: list[Chunk]) -> None:
        """Called by the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nobody reads
            self._loop.call_soon_threadsafe(self._put, chunks)

    def _put(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self._chunks.put_nowait(chunk)


class AsyncEngine:
    """Answers requests as they come, with continuous batching.

    In float32, a request gets the same result as from `jaxllm.generate`, up to rounding.

    A request is a row of `jaxllm.BatchGenerator`: a prompt, a list of token ids, or a mapping with
    one of `prompt`, `messages` and `input_ids`, optionally `seed`, and generation fields of greedy
    search and sampling. It waits for a free slot while the others decode; its tokens stream out
    after every few steps. Requests of all settings share one decode program and the programs of
    prefill, one for each of the two widths of chunks, which `start` compiles.

    ::

        async with jaxllm.serve.AsyncEngine(model, tokenizer) as engine:
            async with engine.submit({"prompt": "Once upon", "max_new_tokens": 20}) as stream:
                async for chunk in stream:
                    print(chunk.tokens)

    Args:
        model: a causal or encoder-decoder language model; where it lies on a mesh, so do the slots.
        tokenizer: the model's own. None: requests have `input_ids`.
        slots: most sequences that are decoded at once; None: as `BatchGenerator`.
        memory: bytes to use on each device; as `BatchGenerator`.
        context: tokens of a slot, prompt and answer together (of an encoder-decoder, of each of the
            two), rounded up to a power of two. None: the model's context, but at most 2048.
        queue_size: most sequences that wait for a slot.
        steps_per_call: decode steps after which new tokens are read, and requests that wait are
            admitted. More steps take less of the host's time.
        prefill_chunk_size: columns of prompts that are prefilled between two decode calls, rounded
            up to a power of two. Prompts are prefilled in chunks of this size and, at their end, of
            32 columns on a CPU and 64 elsewhere. None: 128 on a CPU, 512 elsewhere. An
            encoder-decoder's prompt, and one of a model whose RoPE depends on the length, is
            prefilled as a whole.
        kept_prefixes: most prefixes that several prompts share, such as a system prompt, whose KV
            caches are kept so that they are not computed again; each takes the memory of a slot.
            None: 4, or 0 for the models whose prompts are prefilled as a whole.
        seed: seed of requests that have none; the i-th request, from 0, then samples as row i of
            `BatchGenerator`, and one with a seed as `jaxllm.generate(..., key=its_seed)`.
        default_new_tokens, fields: as `BatchGenerator`.
        warm_up: `start` compiles all programs. "background": `start` compiles the programs by which
            every request can run, and the others are compiled while requests run, those first that
            a request asks for. False: each program is compiled when a request first needs it.
        on_compile: called before programs are compiled that requests wait for, with their number.

    Attributes:
        model, tokenizer, fields: as given.
        context: most tokens of a prompt and its answer.
        counts: counters of slots and program calls.
        memory: predicted memory.
        programs: the compiled programs; all of them are `programs.names`, and `programs.compiled`
            is the number of those that are ready. Empty without `warm_up`.
        needed_programs: number of programs that `start` compiles.

    Raises:
        InputError: a field of all requests is wrong, or `context` is longer than the model's.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer | None = None,
        *,
        slots: int | None = None,
        memory: int | str | None = None,
        context: int | None = None,
        queue_size: int = DEFAULT_QUEUE_SIZE,
        steps_per_call: int = 4,
        prefill_chunk_size: int | None = None,
        kept_prefixes: int | None = None,
        seed: int = 0,
        default_new_tokens: int | None = None,
        warm_up: bool | Literal["background"] = True,
        on_compile: Callable[[int], object] = lambda number: None,
        **fields: Any,
    ) -> None:
        mesh = check_model(model)
        check_tokenizer(tokenizer)
        _check_numbers(
            context=context,
            queue_size=queue_size,
            steps_per_call=steps_per_call,
            prefill_chunk_size=prefill_chunk_size,
        )
        _check_numbers(0, kept_prefixes=kept_prefixes)
        self.model, self.tokenizer, self.fields = model, tokenizer, fields
        self.counts = BatchCounts()
        sizes = _most_sizes(model, context, slots, mesh)
        limit = model.config.longest_prompt
        if context is not None and limit is not None and context > limit:
            raise InputError(
                f"context: expected at most the model's {limit} tokens, found {context}"
            )
        self.context = sizes.columns if limit is None else min(sizes.columns, limit)
        prefill = prefill_options(model, prefill_chunk_size, kept_prefixes)
        sizes = prefill.sizes(sizes)
        per_row = with_rope_per_row(model)
        group = live_group(steps_per_call, model.config.vocab_size)
        reader = RowReader(model, tokenizer, fields, seed, default_new_tokens)
        self._reader = RequestReader(reader, tokenizer, group, sizes)
        tasks = [self._task_of(width) for width in buckets(self.context)]
        on_compile(2 if prefill.whole else 2 + len(sizes.chunks))  # and the decode program
        budget = memory_budget(memory, 1 if mesh is None else mesh.size)

        kept_bytes = 0
        if prefill.kept_prefixes:
            prompt = staged_shapes(per_row, sizes.with_slots(1), mesh)
            kept_bytes = prefill.copied_prompts * nbytes(prompt)

        def few_of(slots: int) -> int | None:
            return few_slots(slots, platform_of_arrays(per_row)) if mesh is None else None

        def predicted(slots: int) -> Prediction:
            pool = predict(per_row, group, budget, mesh, tasks[-1:], sizes, slots)
            copies = pool.cache * (few_of(slots) or 0) // slots + kept_bytes
            return dataclasses.replace(pool, cache=pool.cache + copies)

        self.memory = fitting_slots(predicted, sizes.slots, sizes.shards)
        if not self.memory.fits:
            raise InputError(f"memory: {self.memory} do not fit; lower context, or raise memory")
        sizes = sizes.with_slots(self.memory.slots)
        options = self.counts, mesh, prefill, few_of(sizes.slots)
        self.programs, self.needed_programs = Programs(), 0
        self._run = LiveRun(per_row, group, sizes, tasks[-1], *options, self.programs)
        if warm_up:
            needed, others = self._run.programs(tasks)
            self.programs.add(needed | others)
            self.needed_programs = len(needed if warm_up == "background" else needed | others)
            on_compile(self.needed_programs)
        self._thread = EngineThread(
            self._run, queue_size, lambda: self.programs.compile(self.needed_programs)
        )
        self.programs.on_failure = self._thread.fail
        self._numbers = itertools.count()

    @property
    def slots(self) -> int:
        """Most sequences that are decoded at once."""
        return self.memory.slots

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End tokens of requests that do not set their own."""
        return self._reader.eos

    @property
    def waiting(self) -> int:
        """Sequences that wait for a slot."""
        return self._thread.waiting

    @property
    def running(self) -> int:
        """Sequences in slots."""
        return self._thread.running

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Counters of kept prefixes."""
        return self._run.prefix_counts

    @property
    def failure(self) -> BaseException | None:
        """Error that ended the engine; None while it runs."""
        return self._thread.failure

    async def start(self) -> None:
        """Compiles the programs that `warm_up` says, and then takes requests."""
        await asyncio.to_thread(self._thread.start)
        if self.programs.names:
            self.programs.compile_in_background()

    async def close(self, *, drain: bool = True) -> None:
        """Takes no more requests, answers those that it has (`drain`), and ends.

        A program that is being compiled in the background is compiled to its end all the same.
        """
        self.programs.stop()
        await asyncio.to_thread(partial(self._thread.close, drain=drain))

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        await self.close(drain=kind is None)

    def submit(
        self,
        request: Any,
        *,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> GenerationStream:
        """Queues a request; call it in the event loop that reads the stream.

        Args:
            request: as described above.
            logprobs: chunks have the log-probabilities of their tokens.
            grammar: of `json_schema` and similar functions; the text matches it.

        Raises:
            JaxLLMError: the request is wrong.
            QueueFullError: too many requests wait.
            EngineStoppedError: the engine takes no requests.
        """
        return self.submit_all([request], logprobs=logprobs, grammar=grammar)[0]

    def submit_all(
        self,
        requests: Iterable[Any],
        *,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> list[GenerationStream]:
        """Queues all of some requests, or none; arguments and errors are those of `submit`."""
        return self._queue(self._read(self._numbered(requests), logprobs, grammar))

    async def submit_in_thread(
        self,
        requests: Iterable[Any],
        *,
        logprobs: bool = False,
        grammar: GrammarLogitsProcessor | None = None,
    ) -> list[GenerationStream]:
        """As `submit_all`, but checks the requests in a thread, so that the event loop goes on."""
        read = with_settings_of_this_thread(self._read)
        return self._queue(
            await asyncio.to_thread(read, self._numbered(requests), logprobs, grammar)
        )

    def _numbered(self, requests: Iterable[Any]) -> list[tuple[int, Any]]:
        """The requests with their numbers, from which the draws of those without a seed follow."""
        return [(next(self._numbers), request) for request in requests]

    def _read(
        self,
        requests: Iterable[tuple[int, Any]],
        logprobs: bool,
        grammar: GrammarLogitsProcessor | None,
    ) -> list[list[Task]]:
        """The tasks of each request."""
        options = {"logprobs": logprobs, "grammar": grammar}
        return [self._reader.read(number, request, **options) for number, request in requests]

    def _queue(self, read: list[list[Task]]) -> list[GenerationStream]:
        streams = [GenerationStream(self._thread, tasks[0].row) for tasks in read]
        self._thread.submit(
            [
                dataclasses.replace(task, request=stream)
                for stream, tasks in zip(streams, read, strict=True)
                for task in tasks
            ]
        )
        return streams

    async def generate(self, request: Any, **options: Any) -> BatchOutput:
        """The whole result of a request; arguments and errors are those of `submit`."""
        async with self.submit(request, **options) as stream:
            chunks = [chunk async for chunk in stream]
        return BatchOutput.of(stream.row, chunks, self.tokenizer)

    def _task_of(self, width: int) -> Task:
        """A task with a prompt of a bucket, whose only new token has a column too."""
        length = min(width, self.context)
        if not self.model.is_encoder_decoder:
            length -= 1  # for the new token
        fields = {"input_ids": np.zeros(length, int), "max_new_tokens": 1}
        return self._reader.read(0, fields)[0]


def _most_sizes(
    model: GenerativeModel, context: int | None, slots: int | None, mesh: Mesh | None
) -> Sizes:
    """Sizes of the slots, as many as there are if they fit into memory."""
    window = model.config.default_window if context is None else context
    columns = bucket(window, SMALLEST_BUCKET)
    sizes = Sizes(
        slots=0,
        columns=columns,
        encoder_columns=columns if model.is_encoder_decoder else None,
        shards=row_shards(mesh),
    )
    return sizes.with_slots(slot_limits(slots, mesh).least)


def _check_numbers(at_least: int = 1, **numbers: int | None) -> None:
    for name, number in numbers.items():
        if number is not None and (not is_integer(number) or number < at_least):
            raise InputError(f"{name}: expected an integer of {at_least} or more, found {number!r}")
