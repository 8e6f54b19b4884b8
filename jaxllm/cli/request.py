"""Generates for one prompt: token ids in, new token ids out, complete or streamed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
from jax import Array

from jaxllm import GenerationConfig, generate, stream


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


class Request:
    """A prompt with its generation settings.

    Args:
        model: a model that generates.
        input_ids: prompt ids (of the encoder, for an encoder-decoder).
        fields: generation fields of this call, which override the model's own.
        key: random key for sampling.
        eos_ids: EOS token ids.
        arguments: further arguments of ``generate``.
    """

    def __init__(
        self,
        model: Any,
        input_ids: list[int],
        fields: GenerationConfig,
        key: Array,
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
