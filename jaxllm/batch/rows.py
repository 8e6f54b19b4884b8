"""Rows of a batch: before they are read, ready to run, their prompts, and their outputs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Self, TypeVar

import numpy as np
from jaxtyping import Int, Shaped

from jaxllm.batch.constraints import RowConstraint
from jaxllm.common.arguments import is_integer
from jaxllm.common.errors import InputError, JaxLLMError, quoted
from jaxllm.common.validation import check_types
from jaxllm.generation.inputs.arguments import checked_ids
from jaxllm.generation.inputs.values import to_scalar
from jaxllm.generation.settings.config import GenerationConfig
from jaxllm.tokenizers.messages import read_tools
from jaxllm.tokenizers.tokenizer import Tokenizer

R = TypeVar("R", bound="RowPrompt")
PROMPT_KEYS = ("prompt", "messages", "input_ids")


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
    is_blank: bool = False
    """True for a line without text to translate, whose translation is empty too."""
    was_cut: bool = False
    """True for a text that was too long, and was cut."""

    @property
    def samples(self) -> int:
        """Number of sequences that the row returns."""
        return self.config.num_return_sequences

    @property
    def max_length(self) -> int:
        """Columns of the longest sequence."""
        return len(self.decoder_prompt) + self.max_new_tokens


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


@dataclasses.dataclass(frozen=True)
class RowPrompt:
    """The id and the prompt of a row."""

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[list[Any] | str, "a list of messages"] | None = None
    """A list of messages, or JSON text of one."""
    tools: Any = None
    """Tools for the chat template: a list of JSON schemas, or JSON text of one."""
    input_ids: Any = None
    """Token ids; any sequence of integers."""
    src_lang: str | None = None
    """Language of the prompt's text, for a translation model."""

    @property
    def prompt_key(self) -> str:
        """The key of the prompt: prompt, messages or input_ids.

        Raises:
            InputError: the row has none of them, or several.
        """
        keys = [key for key in PROMPT_KEYS if getattr(self, key) is not None]
        if len(keys) == 1:
            return keys[0]
        raise InputError(
            "a row has exactly one of prompt, messages and input_ids; found "
            + (" and ".join(keys) or "none")
        )


class PromptReader:
    """Makes token ids of prompts.

    Args:
        chat: a `prompt` is a user message, for the model's chat template, after `system`.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, chat: bool, system: str | None
    ) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._chat, self._system = chat, system

    def is_text(self, row: RowPrompt) -> bool:
        """True if the prompt is a text that is tokenized as it is."""
        return row.prompt is not None and not self._chat

    def ids(
        self,
        row: RowPrompt,
        encode: Callable[[Tokenizer, str], list[int]] = Tokenizer.encode,
    ) -> Int[np.ndarray, " T"]:
        """The row's prompt as token ids, which `encode` gives of a text.

        Raises:
            JaxLLMError: it has none, or a wrong one.
        """
        key = row.prompt_key
        if row.src_lang is not None and not self.is_text(row):
            raise InputError(
                f"src_lang: has no effect on {key}, which is not encoded as a text; leave it out"
            )
        tools = read_tools(row.tools)
        if tools is not None and (row.input_ids is not None or self.is_text(row)):
            raise InputError(f"tools: have no effect on {key}; give messages, or use chat")
        if row.input_ids is not None:
            return checked_ids(key, _id_array(row.input_ids)[None], self._vocab_size)[0]
        if self._tokenizer is None:
            raise InputError(f"{key}: this model has no tokenizer; give input_ids")
        messages = row.messages
        if messages == []:
            raise InputError("messages: expected a list of messages, found []")
        if row.prompt is not None and self._chat:
            system = [] if self._system is None else [{"role": "system", "content": self._system}]
            messages = [*system, {"role": "user", "content": row.prompt}]
        if messages is None:
            tokenizer = self._tokenizer.with_languages(row.src_lang)
            ids = [encode(tokenizer, row.prompt or "")]
        else:
            ids = [self._tokenizer.apply_chat_template(messages, tools=tools)]
        if len(ids[0]) == 0:
            raise InputError(f"{key}: is empty, and the tokenizer adds no token to it")
        return checked_ids(key, np.asarray(ids), self._vocab_size)[0]


def checked_row(row_class: type[R], raw: Mapping[str, Any]) -> R:
    """The keys of a row that a class of rows declares, with their types checked.

    Raises:
        InputError: a value is of the wrong type.
    """
    names = {field.name for field in dataclasses.fields(row_class)}
    values = {name: value for name, value in raw.items() if name in names}
    values |= {name: to_scalar(values[name]) for name in ("id", "seed") if name in values}
    row = row_class(**values)
    check_types(row, InputError)
    return row


def _id_array(ids: object) -> Shaped[np.ndarray, " T"]:
    """A list that should be token ids, as an array."""
    array = np.zeros(0)
    if isinstance(ids, Sequence | np.ndarray) and not isinstance(ids, str):
        with contextlib.suppress(ValueError):  # ragged nested lists
            array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0:
        raise InputError(f"input_ids: expected a list of token ids, found {quoted(ids)}")
    return array
