"""Answers to `generate_until` requests, by the batch engine's slots."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from lm_eval.models.utils import normalize_gen_kwargs

from jaxllm.batch import BatchGenerator
from jaxllm.batch.rows import RawRow
from jaxllm.common.errors import InputError
from jaxllm.generation.inputs.values import is_integer
from jaxllm.generation.settings.config import FIELDS
from jaxllm.generation.stopping import StopStringCriteria
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers import Tokenizer


@dataclasses.dataclass(frozen=True)
class GenerationSettings:
    """Settings of a `generate_until` request, read from its `gen_kwargs`."""

    until: tuple[str, ...]
    """Stop strings; the answer ends before the first of them."""
    max_new_tokens: int
    seed: int | None
    """None: the seed of the whole evaluation."""
    fields: Mapping[str, Any]
    """Other generation fields."""

    @classmethod
    def read(cls, gen_kwargs: Mapping[str, Any], default_new_tokens: int) -> Self:
        """Reads the settings as the harness's own backends do.

        A temperature above 0 samples unless `do_sample` is false. Fields that act on sampling alone
        are left out of a greedy request, where tasks often set them.

        >>> GenerationSettings.read({"until": ".", "max_tokens": 5, "top_p": 0.9}, 256)
        GenerationSettings(until=('.',), max_new_tokens=5, seed=None, fields={'do_sample': False})
        """
        fields: dict[str, Any] = {**normalize_gen_kwargs(dict(gen_kwargs), default_new_tokens)}
        until, seed = fields.pop("until"), fields.pop("seed", None)
        if not all(isinstance(text, str) for text in until):
            raise InputError(f"until: expected a string or a list of strings, found {until!r}")
        if seed is not None and not is_integer(seed):
            raise InputError(f"seed: expected an integer, found {seed!r}")
        if fields.get("num_return_sequences", 1) != 1:
            raise InputError(
                "num_return_sequences: a request has one answer; set the task's repeats"
            )
        if not fields["do_sample"]:
            fields = {
                name: value
                for name, value in fields.items()
                if not (name in FIELDS and FIELDS[name].only_sampling)
            }
        return cls(tuple(filter(None, until)), fields.pop("max_gen_toks"), seed, fields)


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """The prompt of a `generate_until` request as token ids, and its settings."""

    input_ids: Sequence[int]
    settings: GenerationSettings

    def row(self, stop_strings: Sequence[str], new_ids: Sequence[int]) -> dict[str, Any]:
        """The row of the batch engine that goes on after `new_ids`."""
        settings = self.settings
        row = {**settings.fields, "input_ids": [*self.input_ids, *new_ids]}
        if "max_length" not in row:
            row["max_new_tokens"] = settings.max_new_tokens - len(new_ids)
        if stop_strings:
            row["stop_strings"] = list(stop_strings)
        return row


def generate_until(
    model: GenerativeModel,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    *,
    slots: int | None = None,
    seed: int = 0,
) -> Iterator[tuple[int, list[int]]]:
    """Yields the index and new token ids of each request, in the order in which they end.

    A request ends after the token that completes one of its stop strings, with an end token, or
    at its length. Request i samples as `jaxllm.generate(..., key=seed, row_ids=[i])`, so that
    repeats of a request differ.

    Args:
        slots: requests that are decoded at once; None: the default of `BatchGenerator`.
        seed: seed of requests that have none.
    """
    seeds = [seed if each.settings.seed is None else each.settings.seed for each in requests]
    for row_seed in dict.fromkeys(seeds):
        generator = BatchGenerator(model, tokenizer, slots=slots, seed=row_seed)
        unfinished = {i: list[int]() for i in range(len(requests)) if seeds[i] == row_seed}
        first_row = 0
        while unfinished:
            unfinished = yield from _run(generator, tokenizer, requests, unfinished, first_row)
            first_row += len(requests)  # so that no row draws the random numbers of another


def _run(
    generator: BatchGenerator,
    tokenizer: Tokenizer,
    requests: Sequence[GenerationRequest],
    new_ids: Mapping[int, list[int]],
    first_row: int,
) -> Iterator[tuple[int, list[int]]]:
    """Goes on with some requests after their new ids.

    Returns those that ended too early: the engine, like transformers, also ends a row at a stop
    string that begins in the prompt, and the harness only at one that was generated.
    """
    stop_strings = {
        until: possible_strings(tokenizer, until)
        for until in {requests[i].settings.until for i in new_ids}
    }
    rows = [
        RawRow(first_row + i, i, requests[i].row(stop_strings[requests[i].settings.until], ids))
        for i, ids in new_ids.items()
    ]
    too_short: dict[int, list[int]] = {}
    for output in generator.answer(rows):
        i = output.index - first_row
        if output.error is not None:
            raise InputError(f"generate_until request {i}: {output.error}")
        ids = [*new_ids[i], *output.output_ids[0]]
        text = tokenizer.decode(ids, skip_special_tokens=False)
        settings = requests[i].settings
        if (
            output.finish_reasons[0] == "stop"
            and not generator.model.is_encoder_decoder
            and len(ids) < settings.max_new_tokens
            and not any(stop in text for stop in settings.until)
        ):
            too_short[i] = ids
        else:
            yield i, ids
    return too_short


def possible_strings(tokenizer: Tokenizer, strings: tuple[str, ...]) -> tuple[str, ...]:
    """The strings, or none if no token can complete any of them.

    T5's vocabulary has no line break, with which most tasks stop; the engine refuses such strings.
    """
    if not strings:
        return ()
    try:
        StopStringCriteria(tokenizer, strings)
    except InputError:
        return ()
    return strings
