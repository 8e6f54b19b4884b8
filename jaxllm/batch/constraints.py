"""Constraints of rows: a JSON schema, a regular expression or a grammar for the new text."""

from __future__ import annotations

import dataclasses
import json
import os
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.common.errors import InputError, JaxLLMError, quoted
from jaxllm.common.files import names_file, parse_json, read_text
from jaxllm.generation.processors.base import logits_processor, store
from jaxllm.generation.processors.grammar import (
    GrammarLogitsProcessor,
    json_schema,
    lark,
    regex,
)
from jaxllm.generation.processors.host import (
    WORD_BITS,
    HostRow,
    register_rule,
    rule_of,
)
from jaxllm.tokenizers.tokenizer import Tokenizer

_MAX_BYTES = 2**20
_COMPILE = {"schema": json_schema, "regex": regex, "grammar": lark}
CONSTRAINT_KEYS = tuple(_COMPILE)
"""Keys of a row, or options of a job."""


@logits_processor()
class RowGrammarLogitsProcessor(GrammarLogitsProcessor):
    """A grammar for one row of a batch: where it fails, the row ends, and the others go on.

    Args:
        grammar: shared by all rows with this grammar and these end tokens.
        ends: end tokens of the row.
        prompt_len: columns of the row's prompt.
        failures: where the error goes.
    """

    def __init__(
        self,
        grammar: GrammarLogitsProcessor,
        ends: tuple[int, ...],
        prompt_len: int,
        failures: list[JaxLLMError],
    ) -> None:
        rule = partial(_allowed_or_ended, grammar, ends, failures)
        length: Any = np.int32(prompt_len)
        store(self, rule=register_rule(rule, owner=self), prompt_len=length)


@dataclasses.dataclass(frozen=True, eq=False)
class RowConstraint:
    """The compiled constraint of a row.

    Attributes:
        grammar: shared by rows.
        processor: of this row.
        failures: errors while the row ran.
    """

    grammar: GrammarLogitsProcessor
    processor: RowGrammarLogitsProcessor
    failures: list[JaxLLMError]


class ConstraintCompiler:
    """Compiles the constraints of rows, each grammar once.

    Args:
        job: constraint of rows that have none: at most one of schema, regex and grammar.
    """

    def __init__(self, tokenizer: Tokenizer | None, job: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._job = only_one(job)
        if self._job is not None:
            self._job = (self._job[0], constraint_source(*self._job, field=self._job[0]))
        self._compiled: dict[tuple[str, str, tuple[int, ...]], GrammarLogitsProcessor] = {}

    def check_job(self, eos: tuple[int, ...]) -> None:
        """Compiles the constraint of the job.

        Raises:
            InputError: it is wrong.
        """
        if self._job is not None:
            self._grammar(*self._job, eos)

    def of_row(
        self, own: dict[str, Any], eos: tuple[int, ...], prompt_len: int
    ) -> RowConstraint | None:
        """The constraint of a row; None if neither it nor the job has one.

        Args:
            own: the row's values of `CONSTRAINT_KEYS`.

        Raises:
            InputError: it is wrong.
        """
        chosen = only_one(own) or self._job
        if chosen is None:
            return None
        grammar, failures = self._grammar(*chosen, eos), list[JaxLLMError]()
        processor = RowGrammarLogitsProcessor(grammar, eos, prompt_len, failures)
        return RowConstraint(grammar, processor, failures)

    def _grammar(self, key: str, source: Any, eos: tuple[int, ...]) -> GrammarLogitsProcessor:
        if self._tokenizer is None:
            raise InputError(f"{key}: needs a tokenizer, which this model does not have")
        cache_key = (key, _source_text(key, source), eos)
        if cache_key not in self._compiled:
            compiled = _COMPILE[key](source, self._tokenizer, eos_token_id=list(eos))
            self._compiled[cache_key] = compiled
        return self._compiled[cache_key]


def constraint_source(key: str, value: Any, field: str) -> Any:
    """A constraint from its value, its text, or a file that holds it.

    Args:
        field: the option that has it, for messages.

    Raises:
        InputError: the file cannot be read, or the schema is no JSON object.
    """
    if key == "regex" or not isinstance(value, str | PathLike):
        return value
    if not isinstance(value, str) or names_file(value):
        value = read_text(Path(value), max_bytes=_MAX_BYTES, error=InputError)
    elif key == "schema" and value.lstrip()[:1] not in ("{", "["):
        raise InputError(f"{field}: {quoted(value)} is neither a JSON object nor a file")
    if key != "schema":
        return value
    schema = parse_json(os.fsencode(value), source=field, error=InputError)
    if not isinstance(schema, dict):
        raise InputError(f"{field}: expected a JSON object, or the name of a file that has one")
    return schema


def _source_text(key: str, source: Any) -> str:
    """The source of a grammar as text; raises InputError if JSON cannot hold it."""
    try:
        return json.dumps(source, sort_keys=True)
    except (TypeError, ValueError) as failure:  # also more digits than Python writes
        raise InputError(f"{key}: not JSON ({failure}), found {quoted(source)}") from None


def only_one(constraints: dict[str, Any]) -> tuple[str, Any] | None:
    """Key and source of the constraint that is set; None if none is.

    Raises:
        InputError: several are set.

    >>> only_one({"schema": None, "regex": "a+"})
    ('regex', 'a+')
    """
    pairs = [(key, source) for key, source in constraints.items() if source is not None]
    if len(pairs) > 1:
        names = " and ".join(key for key, _ in pairs)
        raise InputError(f"{names}: give only one of them")
    return pairs[0] if pairs else None


def _allowed_or_ended(
    grammar: GrammarLogitsProcessor,
    ends: tuple[int, ...],
    failures: list[JaxLLMError],
    rows: list[HostRow],
    vocab_size: int,
) -> np.ndarray:
    """The tokens that the grammar allows; after a failure only the end tokens."""
    try:
        return rule_of(grammar.rule)(rows, vocab_size)
    except InputError as error:
        failures.append(error)
    words = np.zeros((len(rows), -(-vocab_size // WORD_BITS)), np.uint32)
    for end in ends:
        words[:, end // WORD_BITS] |= np.uint32(1 << end % WORD_BITS)
    return words
