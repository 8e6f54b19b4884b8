"""Formats of conversations: encode what the assistant says as labels.

The learned tokens are those that a chat template marks with ``{% generation %}``. Most templates
mark nothing. Then an answer is found by rendering the conversation before it with the generation
prompt, as for generation: the answer is the rest of the full rendering. This requires that the
template renders a prefix of a conversation the same whatever follows, which is checked.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np

from jaxllm.common.errors import ConfigError, DataError, TemplateError, quoted
from jaxllm.models.input_checks import IGNORED
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.chats import Chat, select_template, shared_length
from jaxllm.tokenizers.messages import Message, read_messages, read_tools, text_content
from jaxllm.tokenizers.template_analysis import template_reads
from jaxllm.training.data.config import DataConfig, ModelInfo, eos_of
from jaxllm.training.data.examples import CausalExample, PreferenceExample
from jaxllm.training.data.formats import (
    PromptCompletionFormat,
    Seq2SeqFormat,
    get,
    int32,
)
from jaxllm.training.data.rows import Row

_OTHER_MARKS = ("train", "loss_mask", "trainable", "loss", "train_detail")
"""Keys of a message by which other programs leave it out of the loss."""
_NO_END = (
    "its {% generation %} marks leave out the token that ends a message, so the model would not "
    "learn to stop; move {% endgeneration %} behind that token"
)


@dataclass(frozen=True)
class ChatFormat:
    """Encodes messages ``{"role": ..., "content": ...}``; a row may have `tools` for the template.

    The loss covers the assistant's messages and the token that ends each, as far as the template's
    marks, the `weight` of a message (0 or 1) and `train_on` all allow. Special tokens are only
    those that the template writes.

    Raises:
        ConfigError: the template's marks leave out the token that ends an answer.
    """

    tokenizer: Tokenizer
    eos_token_ids: tuple[int, ...]
    field: str
    chat_template: str | None = None
    train_on: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        probe = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        with contextlib.suppress(TemplateError):  # a template that fails fails for the rows too
            if self._marks(None):
                spans = self.tokenizer.marked_tokens(probe, chat_template=self.chat_template)
                ids = self._ids(probe, None)
                if spans and self._end(ids[slice(*spans[-1])]) is None:
                    raise ConfigError(f"chat_template: {_NO_END}")

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
        if self.train_on == "last":
            answers = answers[-1:]
        learned = [n for n in answers if messages[n].get("weight", 1)]
        ids = self._ids(messages, tools)
        labels = np.full(len(ids), IGNORED, np.int32)
        find = self._marked if self._marks(tools) else self._answers
        for start, stop in find(ids, messages, tools, learned):
            labels[start:stop] = ids[start:stop]
        labels[0] = IGNORED
        return CausalExample(int32(ids), labels)

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer: the last one that is to be learned."""
        return self.last_answer(messages_of(row, self.field), row, self.field)

    def last_answer(
        self, messages: Sequence[Message], row: Row, field: str
    ) -> tuple[list[int], str]:
        """Ids of the conversation before its last answer, and that answer; `field` holds it."""
        answers = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and message.get("weight", 1)
        ]
        if not answers:
            raise DataError(f"{field}: no message of the assistant, or all have weight 0")
        reference = text_content(messages[answers[-1]])
        if reference is None:
            raise DataError(
                f"{field}[{answers[-1]}]: evaluation.metrics compare texts, and this answer has "
                "no content"
            )
        ids = self.tokenizer.apply_chat_template(
            messages[: answers[-1]],
            tools=row.get("tools"),
            chat_template=self.chat_template,
        )
        return ids, reference

    def _marks(self, tools: Any) -> bool:
        """True if the template marks what is learned."""
        templates = self.tokenizer.settings.chat_templates
        has_tools = read_tools(tools) is not None
        return template_reads(select_template(templates, self.chat_template, has_tools)).marks

    def _marked(
        self, ids: list[int], messages: Sequence[Message], tools: Any, learned: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Start and end, in `ids`, of each mark of the messages that are learned.

        The marks of a message are those that appear when the message is added to the conversation.

        Raises:
            DataError: adding a message changes the marks of earlier messages, or the marks leave
                out the token that ends a message.
        """
        spans = self.tokenizer.marked_tokens(
            messages, tools=tools, chat_template=self.chat_template
        )

        @cache
        def marked(count: int) -> list[str]:
            """The marked texts of the first messages."""
            if count == 0:
                return []
            variables = {"add_generation_prompt": False, "tools": tools}
            settings = self.tokenizer.settings
            chat = Chat.of(settings, self.chat_template, messages[:count], variables)
            text = chat.text()
            return [text[start:stop] for start, stop in chat.marked_spans()]

        whole, result = marked(len(messages)), list[tuple[int, int]]()
        for number in learned:
            before, after = marked(number), marked(number + 1)
            if whole[: len(after)] != after or after[: len(before)] != before:
                if [*learned] == [n for n, x in enumerate(messages) if x["role"] == "assistant"]:
                    return spans
                raise changed_error(self.field, number)
            own = spans[len(before) : len(after)]
            if own and self._end(ids[slice(*own[-1])]) is None:
                raise DataError(f"{self.field}[{number}]: chat_template: {_NO_END}")
            result += own
        return result

    def _answers(
        self, ids: list[int], messages: Sequence[Message], tools: Any, learned: Sequence[int]
    ) -> list[tuple[int, int]]:
        """Start and end, in `ids`, of the messages that are learned, by rendering prefixes."""
        conversation = _Conversation(
            ids, self.tokenizer, messages, self.chat_template, tools, self.field
        )
        spans: list[tuple[int, int]] = []
        for number in learned:
            start = conversation.boundary(number, before_answer=True)
            stop = conversation.boundary(number + 1, before_answer=False)
            end = self._end(ids[start:stop])
            if end is None:
                raise DataError(
                    f"{self.field}[{number}]: the chat template puts no special token after the "
                    "assistant's message, so the model would not learn to stop; give a "
                    "chat_template that does"
                )
            spans.append((start, start + end))
        return spans

    def _end(self, answer: Sequence[int]) -> int | None:
        """Position after the token that ends an answer, before a following line break; None if
        there is no such token."""
        ends = self.tokenizer.special_ids.union(self.eos_token_ids)
        last = max((n for n, token in enumerate(answer) if token in ends), default=None)
        if last is None or self.tokenizer.decode(answer[last + 1 :]).strip():
            return None
        return last + 1

    def _ids(self, messages: Sequence[Message], tools: Any) -> list[int]:
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=False, tools=tools, chat_template=self.chat_template
        )


@dataclass
class _Conversation:
    """A rendered conversation and the token positions of its messages."""

    ids: list[int]
    tokenizer: Tokenizer
    messages: Sequence[Message]
    template: str | None
    tools: Any
    field: str

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
            raise changed_error(self.field, number)
        # A token that spans the boundary belongs to the part after it.
        return shared_length(ids, self.ids)

    def _render(self, count: int, *, prompt: bool, tokenize: bool) -> Any:
        return self.tokenizer.apply_chat_template(
            self.messages[:count],
            add_generation_prompt=prompt,
            tokenize=tokenize,
            tools=self.tools,
            chat_template=self.template,
        )


def changed_error(field: str, number: int) -> DataError:
    """The error for a conversation of which no prefix is rendered as the beginning of the whole."""
    return DataError(
        f"{field}[{number}]: the chat template writes the messages before this one differently "
        "when it follows, so the assistant's tokens cannot be told from the others; end each row "
        "with an answer and set train_on to 'last', or give another chat_template"
    )


def messages_of(row: Row, field: str) -> list[dict[str, Any]]:
    """The messages of a row: a list, or JSON text of one. Each `weight` is 0 or 1.

    Raises:
        DataError: the field is missing, or a weight is wrong.
        InputError: it is no conversation.
    """
    messages = read_messages(get(row, field, list, tuple, str), field)
    for number, message in enumerate(messages):
        if wrong := [key for key in _OTHER_MARKS if key in message]:
            raise DataError(
                f"{field}[{number}].{wrong[0]}: is not read; write weight: 0 into a message of the "
                "assistant that should not be learned, and weight: 1, or nothing, into others"
            )
        weight = message.get("weight", 1)
        if isinstance(weight, bool) or weight not in (0, 1):
            raise DataError(f"{field}[{number}].weight: expected 0 or 1, found {quoted(weight)}")
    return messages


AnswerFormat = PromptCompletionFormat | Seq2SeqFormat


@dataclass(frozen=True)
class PreferenceFormat:
    """Encodes a prompt and two answers to it: texts, or lists of messages.

    Labels are those of the answers: for texts the tokens and the EOS, for messages what the
    assistant says after the prompt.
    """

    texts: tuple[AnswerFormat, AnswerFormat]
    """Formats of the chosen and the rejected text."""
    chat: ChatFormat | None
    """Format of messages; None: the model has no conversations (T5)."""
    prompt: str
    chosen: str
    rejected: str

    def __call__(self, row: Row) -> PreferenceExample:
        chat = self._chat_of(row)
        if chat is None:
            chosen, rejected = (encode(row) for encode in self.texts)
        else:
            tools = row.get("tools")
            prompt, *answers = conversations_of(row, self.prompt, self.chosen, self.rejected)
            chosen, rejected = (
                chat.encode([*prompt, *answer], tools, first=len(prompt)) for answer in answers
            )
        return PreferenceExample(chosen, rejected)

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer: the chosen one."""
        chat = self._chat_of(row)
        if chat is None:
            return self.texts[0].prompt_of(row)
        prompt, chosen, _ = conversations_of(row, self.prompt, self.chosen, self.rejected)
        return chat.last_answer([*prompt, *chosen[:1]], row, self.chosen)

    def _chat_of(self, row: Row) -> ChatFormat | None:
        """The format of the messages of a row; None if its answers are texts."""
        if not _are_messages(row.get(self.chosen)):
            return None
        if self.chat is None:
            raise DataError(f"{self.chosen}: messages, which an encoder-decoder cannot take; texts")
        return self.chat


def conversations_of(
    row: Row, prompt: str, chosen: str, rejected: str
) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """Messages of prompt, chosen and rejected answer; without a prompt, of what both begin with.

    A prompt that is a text is the first message of the user. The answers may begin with it or not.

    Raises:
        DataError: the answers do not begin with one prompt.
        InputError: a field is no list of messages.

    >>> answer = {"role": "assistant", "content": "4"}
    >>> row = {"p": "2 + 2?", "c": [answer], "r": [{**answer, "content": "5"}]}
    >>> conversations_of(row, "p", "c", "r")[0]
    [{'role': 'user', 'content': '2 + 2?'}]
    """
    first, second = messages_of(row, chosen), messages_of(row, rejected)
    given = row.get(prompt)
    if isinstance(given, str) and not _are_messages(given):
        questions = [_first_question(answer) for answer in (first, second)]
        if questions == [None, None]:
            return [{"role": "user", "content": given}], first, second
        if any(question is None or question.strip() != given.strip() for question in questions):
            raise DataError(
                f"{prompt}: is a text, but {chosen} or {rejected} begins with another message of "
                "the user"
            )
    elif given is not None:
        asked = messages_of(row, prompt)
        size = len(asked)
        repeated = all(len(x) > size and x[:size] == asked for x in (first, second))
        return asked, *((first[size:], second[size:]) if repeated else (first, second))
    shared = shared_length(first, second)
    if shared == 0:
        found = "no such field" if given is None else "is a text"
        raise DataError(
            f"{prompt}: {found}, and {chosen} and {rejected} begin with different messages, so "
            "there is no common prompt"
        )
    # Equal conversations have no preference; the last message still is the answer.
    shared = min(shared, len(first) - 1, len(second) - 1)
    return first[:shared], first[shared:], second[shared:]


def _first_question(messages: Sequence[Message]) -> str | None:
    """The text of the user's message before the first answer; None if there is none."""
    before = itertools.takewhile(lambda message: message["role"] != "assistant", messages)
    return next((text_content(each) for each in before if each["role"] == "user"), None)


def _are_messages(value: object) -> bool:
    """True for a list, and for JSON text of a list of messages."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
        return isinstance(value, list) and any(isinstance(x, dict) and "role" in x for x in value)
    return isinstance(value, list)


def preference_format(
    config: DataConfig, tokenizer: Tokenizer, model: ModelInfo
) -> PreferenceFormat:
    """Makes the format of preference rows for a causal language model or a T5."""
    eos, prompt = eos_of(tokenizer, model), config.prompt_field
    chosen, rejected = config.chosen_field, config.rejected_field
    if model.kind == "seq2seq":
        targets = (
            Seq2SeqFormat(tokenizer, eos, prompt, chosen, ""),
            Seq2SeqFormat(tokenizer, eos, prompt, rejected, ""),
        )
        return PreferenceFormat(targets, None, prompt, chosen, rejected)
    completions = (
        PromptCompletionFormat(tokenizer, eos, prompt, chosen),
        PromptCompletionFormat(tokenizer, eos, prompt, rejected),
    )
    chat = ChatFormat(tokenizer, model.eos_token_ids, f"{prompt} and answer", config.chat_template)
    return PreferenceFormat(completions, chat, prompt, chosen, rejected)


GeneratedFormat = PromptCompletionFormat | Seq2SeqFormat | ChatFormat | PreferenceFormat
"""Formats whose rows have a prompt and an answer, which a model can generate."""
