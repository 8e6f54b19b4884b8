"""Prompts of rows: texts, messages or token ids, and the ids that they become."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import numpy as np
from jaxtyping import Int, Shaped

from jaxllm.common.errors import InputError, quoted
from jaxllm.generation.inputs.padded_batch import checked_ids
from jaxllm.generation.inputs.values import to_scalar
from jaxllm.tokenizers.tokenizer import Tokenizer

R = TypeVar("R", bound="RowPrompt")
PROMPT_KEYS = ("prompt", "messages", "input_ids")


@dataclasses.dataclass(frozen=True)
class RowPrompt:
    """The id and the prompt of a row."""

    id: str | int | None = None
    prompt: str | None = None
    messages: Annotated[list[Any], "a list of messages"] | None = None
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

    def ids(self, row: RowPrompt, *, ends: bool = True) -> Int[np.ndarray, " T"]:
        """The row's prompt as token ids.

        Args:
            ends: append the end token that the tokenizer adds to a text, if it adds one.

        Raises:
            JaxLLMError: it has none, or a wrong one.
        """
        key = row.prompt_key
        if row.src_lang is not None and not self.is_text(row):
            raise InputError(
                f"src_lang: has no effect on {key}, which is not encoded as a text; leave it out"
            )
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
            text = row.prompt or ""
            tokenizer = self._tokenizer.with_languages(row.src_lang)
            encode = tokenizer.encode if ends else tokenizer.encode_beginning
            ids = [encode(text)]
        else:
            ids = [self._tokenizer.apply_chat_template(messages)]
        if len(ids[0]) == 0:
            raise InputError(f"{key}: is empty, and the tokenizer adds no token to it")
        return checked_ids(key, np.asarray(ids), self._vocab_size)[0]


def checked_row(row_class: type[R], raw: Mapping[str, Any]) -> R:
    """The keys of a row that a class of rows declares, with their types checked.

    Raises:
        InputError: a value is of the wrong type.
    """
    from jaxllm.common.validation import check_types  # imports pydantic, which is slow

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
