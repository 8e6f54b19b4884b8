"""Encodes conversations with the chat template; labels are the tokens of the assistant's messages.

A template does not mark the assistant's tokens. They are found by rendering the conversation up
to an answer with the generation prompt, as for generation: the answer is the rest of the full
rendering. This requires that the template renders a prefix of a conversation the same whatever
follows, which is checked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from jaxllm.common.errors import DataError
from jaxllm.models.input_checks import IGNORED
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data.example import CausalExample
from jaxllm.training.data.formats import get, int32
from jaxllm.training.data.rows import Row

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatFormat:
    """Encodes messages ``{"role": ..., "content": ...}``; a row may have `tools` for the template.

    The loss covers the assistant's messages and the token that ends each. Special tokens are only
    those that the template writes.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    field: str
    chat_template: str | None = None
    train_on: Literal["all", "last"] = "all"

    def __call__(self, row: Row) -> CausalExample:
        return self.encode(messages_of(row, self.field), row.get("tools"))

    def encode(self, messages: Sequence[Message], tools: Any, first: int = 0) -> CausalExample:
        """Encodes a conversation; labels are the assistant's messages from number `first` on.

        Raises:
            DataError: the assistant says nothing there, or the template does not tell what.
        """
        answers = [n for n in range(first, len(messages)) if messages[n]["role"] == "assistant"]
        if not answers:
            raise DataError(f"{self.field}: no message of the assistant, so nothing to learn")
        conversation = _Conversation(
            self.tokenizer, messages, self.chat_template, tools, self.field
        )
        ids = int32(conversation.ids)
        labels = np.full_like(ids, IGNORED)
        for number in answers if self.train_on == "all" else answers[-1:]:
            start = conversation.boundary(number, before_answer=True)
            stop = self._turn_end(conversation, number, start)
            labels[start:stop] = ids[start:stop]
        labels[0] = IGNORED
        return CausalExample(ids, labels)

    def _turn_end(self, conversation: _Conversation, number: int, start: int) -> int:
        """Position after the token that ends the answer, excluding a following line break."""
        stop = conversation.boundary(number + 1, before_answer=False)
        ends = self.tokenizer.special_ids.union(self.eos_token_ids)
        answer = conversation.ids[start:stop]
        last = max((n for n, token in enumerate(answer) if token in ends), default=None)
        if last is None or self.tokenizer.decode(answer[last + 1 :]).strip():
            raise DataError(
                f"{self.field}[{number}]: the chat template puts no special token after the "
                "assistant's message, so the model would not learn to stop; give a chat_template "
                "that does"
            )
        return start + last + 1


@dataclass
class _Conversation:
    """A rendered conversation and the token positions of its messages."""

    tokenizer: Tokenizer
    messages: Sequence[Message]
    template: str | None
    tools: Any
    field: str

    def __post_init__(self) -> None:
        self.ids: list[int] = self._render(len(self.messages), prompt=False, tokenize=True)

    def boundary(self, number: int, *, before_answer: bool) -> int:
        """Token count of `number` messages, with the generation prompt if `before_answer`."""
        if number == len(self.messages):
            return len(self.ids)
        ids = self._render(number, prompt=before_answer, tokenize=True)
        if self.ids[: len(ids)] == ids:
            return len(ids)
        text = self._render(number, prompt=before_answer, tokenize=False)
        whole = self._render(len(self.messages), prompt=False, tokenize=False)
        if not whole.startswith(text):
            raise DataError(
                f"{self.field}[{number}]: the chat template writes the messages before this one "
                "differently when it follows, so the assistant's tokens cannot be told from the "
                "others; end each row with an answer and set train_on to 'last', or give another "
                "chat_template"
            )
        # A token that spans the boundary belongs to the part after it.
        return next(
            n for n, pair in enumerate(zip(ids, self.ids, strict=False)) if pair[0] != pair[1]
        )

    def _render(self, count: int, *, prompt: bool, tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            self.messages[:count],
            add_generation_prompt=prompt,
            tokenize=tokenize,
            tools=self.tools,
            chat_template=self.template,
        )


def messages_of(row: Row, field: str) -> Sequence[Message]:
    """The messages of a row, checked to be objects with a role."""
    messages = get(row, field, list)
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(
                f"{field}[{number}]: expected an object with a role, found {str(message)[:60]!r}"
            )
    return messages
