"""Rows of a batch: before they are read, ready to run, and their outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Self

import numpy as np
from jaxtyping import Int

from jaxllm.batch.constraints import RowConstraint
from jaxllm.common.errors import InputError, JaxLLMError, quoted
from jaxllm.generation.inputs.values import is_integer, to_scalar
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.tokenizers.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, eq=False)
class BatchRow:
    """A checked row, ready to run."""

    index: int
    """Number of the row in the job, from 0."""
    id: str | int
    input_ids: Int[np.ndarray, " T"]
    """Prompt ids; for an encoder-decoder, the encoder's input ids."""
    decoder_prompt: Int[np.ndarray, " C"]
    """The decoder's prompt: `input_ids`, or an encoder-decoder's start token."""
    config: GenerationConfig
    eos: tuple[int, ...]
    max_new_tokens: int
    """Maximum number of new tokens of a sequence."""
    seed: int
    row_number: int
    """`generate(..., key=seed, row_ids=[row_number])` samples the same."""
    mode: str
    """Generation mode, as `generation_mode` names it, or the name of a registered strategy."""
    constraint: RowConstraint | None = None
    """What the new text must match."""

    @property
    def samples(self) -> int:
        """Number of sequences that the row returns."""
        return self.config.num_return_sequences

    @property
    def max_length(self) -> int:
        """Columns of the longest sequence."""
        return len(self.decoder_prompt) + self.max_new_tokens

    def finish_reason(self, found: str, count: int) -> str:
        """Why a sequence of `count` new tokens ended: "length" where an end token that is found was
        forced at the limit (`forced_eos_token_id`, as in BART's configs)."""
        forced = self.config.forced_eos_token_id is not None and count == self.max_new_tokens
        return "length" if forced and found == "eos" else found


@dataclasses.dataclass(frozen=True)
class BatchOutput:
    """The result of one row: `num_return_sequences` generated sequences, or an error."""

    index: int
    id: str | int
    output_ids: tuple[list[int], ...] = ()
    """New tokens of each sequence, the end token included."""
    texts: tuple[str, ...] | None = None
    """Decoded `output_ids`, without special tokens; None where there is no tokenizer."""
    finish_reasons: tuple[str, ...] = ()
    """Why each sequence ended: "eos", "length", or "stop" (a stop string)."""
    prompt_tokens: int = 0
    error: str | None = None
    """Error message of a row that cannot be answered."""
    error_kind: str | None = None
    """Class name of the error, such as "InputError"."""

    @classmethod
    def of(
        cls,
        row: BatchRow,
        output_ids: tuple[list[int], ...],
        finish_reasons: tuple[str, ...],
        tokenizer: Tokenizer | None,
    ) -> Self:
        """The result of a row from the new tokens of its sequences."""
        texts = None
        if tokenizer is not None:
            texts = tuple(tokenizer.decode(ids, skip_special_tokens=True) for ids in output_ids)
        prompt_tokens = len(row.input_ids)
        return cls(row.index, row.id, output_ids, texts, finish_reasons, prompt_tokens)

    @property
    def new_lengths(self) -> tuple[int, ...]:
        """Number of new tokens of each sequence."""
        return tuple(map(len, self.output_ids))

    @property
    def text(self) -> str | None:
        """The first text."""
        return self.texts[0] if self.texts else None

    def to_dict(self) -> dict[str, Any]:
        """The result as a line of an output file: lists where the row asked for several sequences.

        >>> BatchOutput(0, "a", ([5, 2],), ("Hi",), ("eos",), 3).to_dict()
        {'id': 'a', 'text': 'Hi', 'output_ids': [5, 2], 'finish_reason': 'eos'}
        """
        if self.error is not None:
            return {"id": self.id, "error": self.error, "error_kind": self.error_kind}
        texts = [None] * len(self.output_ids) if self.texts is None else self.texts
        columns = (texts, self.output_ids, self.finish_reasons)
        single = len(self.output_ids) == 1
        text, output_ids, reason = (column[0] if single else list(column) for column in columns)
        return {"id": self.id, "text": text, "output_ids": output_ids, "finish_reason": reason}


@dataclasses.dataclass(frozen=True)
class RawRow:
    """A row before it is read."""

    index: int
    """Number of the row in the job, from 0; its samples depend on it if it has no seed."""
    id: str | int
    """Default of its `id`."""
    raw: Any
    """A mapping, a prompt or token ids; or the error of the line that it should be on."""

    def mapping(self, keys: Collection[str] | None = None) -> dict[str, Any]:
        """The row as a mapping; a string is a prompt, anything else token ids.

        Args:
            keys: the only keys that it may have; None: any.

        Raises:
            JaxLLMError: the error that stands in its place, or a key is unknown.
        """
        if isinstance(self.raw, JaxLLMError):
            raise self.raw
        if isinstance(self.raw, str):
            return {"prompt": self.raw}
        if not isinstance(self.raw, Mapping):
            return {"input_ids": self.raw}
        for name in self.raw:
            if not isinstance(name, str):
                raise InputError(f"a row's fields have names, but one is {quoted(name)}")
            if keys is not None and name not in keys:
                raise InputError(f"{name}: unknown; this task reads {', '.join(sorted(keys))}")
        return dict(self.raw)

    @property
    def row_id(self) -> str | int:
        """The row's own `id`, or the default if it has no valid one."""
        own: Any = to_scalar(self.raw.get("id")) if isinstance(self.raw, Mapping) else None
        return own if isinstance(own, str) or is_integer(own) else self.id


def error_output(row: BatchRow | RawRow, error: JaxLLMError) -> BatchOutput:
    """The output of a row with an error."""
    row_id = row.row_id if isinstance(row, RawRow) else row.id
    return BatchOutput(row.index, row_id, error=str(error), error_kind=type(error).__name__)
