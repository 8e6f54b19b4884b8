"""Generates for one prompt and prints the result, complete or streamed.

The counterpart of batch.py; generate.py reads the options of both.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import numpy as np

from jaxllm import GenerationConfig, generate, stream
from jaxllm.cli.devices import is_main_process
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.progress import Reporter
from jaxllm.generation.call.keys import RandomKey
from jaxllm.models.decoder import GenerativeModel


class TextDecoder(Protocol):
    """Converts streamed ids to text; implemented by a tokenizer's ``StreamDecoder``."""

    def put(self, ids: Any, /) -> str: ...

    def end(self) -> str: ...


class IdDecoder:
    """Text decoder of a model without a tokenizer: comma-separated ids.

    >>> decoder = IdDecoder()
    >>> decoder.put([5, 6]) + decoder.put([7]) + decoder.end()
    '5,6,7'
    """

    def __init__(self) -> None:
        self._started = False

    def put(self, ids: Iterable[int], /) -> str:
        text = "".join(f",{index}" for index in ids)
        first = bool(text) and not self._started
        self._started = self._started or first
        return text[1:] if first else text

    def end(self) -> str:
        return ""


class PromptRequest:
    """A prompt with its generation settings.

    Args:
        model: a model that generates.
        input_ids: prompt ids (of the encoder, for an encoder-decoder).
        fields: generation fields of this call, which override the model's own.
        key: random key or seed, for sampling.
        eos_ids: EOS token ids.
        arguments: further arguments of ``generate``.
    """

    def __init__(
        self,
        model: GenerativeModel,
        input_ids: list[int],
        fields: GenerationConfig,
        key: RandomKey,
        eos_ids: Iterable[int],
        **arguments: Any,
    ) -> None:
        self._model = model
        self._arguments = {
            "input_ids": [input_ids],
            "generation_config": fields,
            "key": key,
            **arguments,
        }
        self._start = 1 if model.is_encoder_decoder else len(input_ids)
        self._eos_ids = frozenset(eos_ids)

    def stream(self) -> Iterator[list[int]]:
        """Yields new ids of the sequence in chunks, up to and including EOS."""
        for chunk in stream(self._model, **self._arguments):
            ids = self._until_end(chunk[0].tolist())
            yield ids
            if ids and ids[-1] in self._eos_ids:
                return

    def generate(self) -> list[list[int]]:
        """Returns the new ids of every sequence, up to and including EOS."""
        sequences = np.asarray(generate(self._model, **self._arguments).sequences)
        return [self._until_end(row) for row in sequences[:, self._start :].tolist()]

    def _until_end(self, ids: list[int]) -> list[int]:
        for count, index in enumerate(ids, start=1):
            if index in self._eos_ids:
                return ids[:count]
        return ids


def print_streamed(
    request: PromptRequest,
    new_decoder: Callable[[], TextDecoder],
    reporter: Reporter,
    clock: CompileClock,
) -> None:
    """Prints tokens as they are generated."""
    chunks = request.stream()
    with reporter.phase("compiling and reading the prompt"):
        # Two chunks: the first comes from the prefill program, the second from the loop.
        first = [index for ids in itertools.islice(chunks, 2) for index in ids]
    decoder, later, start = new_decoder(), 0, time.perf_counter()
    _write(decoder.put(first))
    for ids in chunks:
        _write(decoder.put(ids))
        later += len(ids)
    _write(decoder.end() + "\n")
    seconds = time.perf_counter() - start
    speed = f", {later / seconds:.1f} tokens/s after the first {len(first)}" if later else ""
    reporter.say(f"{len(first) + later} tokens{speed}; {clock.summary()}")


def print_whole(
    request: PromptRequest,
    new_decoder: Callable[[], TextDecoder],
    reporter: Reporter,
    clock: CompileClock,
) -> None:
    """Prints complete sequences, with a line of three dashes between them."""
    start, compiled = time.perf_counter(), clock.seconds
    with reporter.phase("compiling and generating"):
        rows = request.generate()
    seconds = time.perf_counter() - start - (clock.seconds - compiled)
    for number, ids in enumerate(rows):
        decoder = new_decoder()
        _write(("---\n" if number else "") + decoder.put(ids) + decoder.end() + "\n")
    count = sum(map(len, rows))
    reporter.say(f"{count} tokens, {count / seconds:.1f} tokens/s; {clock.summary()}")


def _write(text: str) -> None:
    if is_main_process():
        sys.stdout.write(text)
        sys.stdout.flush()
