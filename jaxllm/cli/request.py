"""Generates for one prompt and prints the result, complete or streamed.

The counterpart of batch.py; generate.py reads the options of both.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jaxllm import GenerationConfig, generate, stream
from jaxllm.cli.devices import is_main_process
from jaxllm.common.compile_clock import CompileClock
from jaxllm.common.progress import Reporter
from jaxllm.generation.call.keys import RandomKey
from jaxllm.generation.stopping.sequence_end import sequence_end, stop_string_matcher
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers import Tokenizer


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
        tokenizer: the model's, if it has one.
        stop_strings: strings that end a sequence.
        arguments: further arguments of ``generate``.
    """

    def __init__(
        self,
        model: GenerativeModel,
        input_ids: list[int],
        fields: GenerationConfig,
        key: RandomKey,
        eos_ids: Iterable[int],
        tokenizer: Tokenizer | None,
        stop_strings: Sequence[str] | None,
        **arguments: Any,
    ) -> None:
        self._model = model
        self._arguments = {
            "input_ids": [input_ids],
            "generation_config": fields,
            "key": key,
            "tokenizer": tokenizer,
            **arguments,
        }
        self._start = 1 if model.is_encoder_decoder else len(input_ids)
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer, self._stop_strings = tokenizer, stop_strings

    def stream(self) -> Iterator[list[int]]:
        """Yields new ids of the sequence in chunks; a single sequence has no padding."""
        for chunk in stream(self._model, **self._arguments):
            yield chunk[0].tolist()

    def generate(self) -> list[list[int]]:
        """Returns the new ids of every sequence, without the padding after its end."""
        sequences = np.asarray(generate(self._model, **self._arguments).sequences)
        return [self._new_ids(row) for row in sequences.tolist()]

    def _new_ids(self, sequence: list[int]) -> list[int]:
        prompt, ids = sequence[: self._start], sequence[self._start :]
        stops = stop_string_matcher(self._tokenizer, self._stop_strings, prompt)
        end = sequence_end(ids, self._eos_ids, stops)
        return ids[: end[0]] if end else ids


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
