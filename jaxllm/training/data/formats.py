"""Formats: encode a row as an example.

The tokens in the loss depend on their field, never on their ids: if the pad token is also the EOS,
labels of the EOS must stay, or the model never learns to stop.

A chat template does not mark the assistant's tokens. They are found by rendering the conversation
up to an answer with the generation prompt, as for generation: the answer is the rest of the full
rendering. This requires that the template renders a prefix of a conversation the same whatever
follows, which is checked.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from jaxtyping import Float32, Int32

from jaxllm.common.cells import Cells, printable
from jaxllm.common.errors import ConfigError, DataError
from jaxllm.models.config_checks import is_float32_number
from jaxllm.models.input_checks import IGNORED
from jaxllm.tokenizers import Tokenizer
from jaxllm.tokenizers.byte_level import ids_are_bytes
from jaxllm.tokenizers.translation_tokenizers import WithLanguages
from jaxllm.training.data.config import DataConfig, ModelInfo, eos_of
from jaxllm.training.data.examples import (
    CausalExample,
    ClassificationExample,
    Example,
    PreferenceExample,
    Seq2SeqExample,
)
from jaxllm.training.data.rows import Row

PART_CHARACTERS = 1 << 20
"""Longer texts are encoded in parts: the tokenizers library uses a hundred bytes per token."""
Message = Mapping[str, Any]


@dataclass(frozen=True)
class TextFormat:
    """Text: labels are all tokens and the EOS after them.

    A `bytes` value (from a file of type `bytes`) needs a byte tokenizer, whose ids are the bytes.
    """

    tokenizer: Tokenizer
    eos: int
    field: str

    def __call__(self, row: Row) -> Example:
        raw = row.raw if isinstance(row, Cells) and ids_are_bytes(self.tokenizer) else row
        value = get(raw, self.field, str, bytes)
        if isinstance(value, bytes):
            if not ids_are_bytes(self.tokenizer):
                raise DataError(f"{self.field}: bytes need a tokenizer whose ids are bytes")
            ids = np.append(np.frombuffer(value, np.uint8).astype(np.int32), np.int32(self.eos))
        else:
            ids = int32([*encode_document(self.tokenizer, value), self.eos])
        return CausalExample.of(ids)


@dataclass(frozen=True)
class PromptCompletionFormat:
    """Prompt and completion: labels are the completion and its EOS.

    The two are encoded separately, as in generation, which continues from the prompt's tokens.
    """

    tokenizer: Tokenizer
    eos: int
    prompt: str
    completion: str

    def __call__(self, row: Row) -> Example:
        prompt = encode_beginning(self.tokenizer, get(row, self.prompt, str))
        completion = encode_continuation(self.tokenizer, get(row, self.completion, str))
        ids = int32([*prompt, *completion, self.eos])
        return CausalExample.of(ids, learnt_from=len(prompt))

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer."""
        ids = encode_beginning(self.tokenizer, get(row, self.prompt, str))
        return ids, get(row, self.completion, str)


@dataclass(frozen=True)
class Seq2SeqFormat:
    """Encoder-decoder (T5): source for the encoder, target for the decoder; both end with EOS.

    With a tokenizer that has language codes they have those of the row's languages, from the fields
    `src_lang` and `tgt_lang`, or of the tokenizer's.
    """

    tokenizer: Tokenizer
    eos: int
    source: str
    target: str
    prefix: str
    src_lang: str = "src_lang"
    tgt_lang: str = "tgt_lang"

    def __call__(self, row: Row) -> Example:
        tokenizer = tokenizer_of(row, self.tokenizer, self.src_lang, self.tgt_lang)
        source = self.prefix + get(row, self.source, str)
        target = get(row, self.target, str)
        return Seq2SeqExample(
            int32(encode_ended(tokenizer, source, self.eos)),
            int32(encode_ended(tokenizer.for_targets(), target, self.eos)),
        )

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer."""
        tokenizer = tokenizer_of(row, self.tokenizer, self.src_lang, self.tgt_lang)
        ids = encode_ended(tokenizer, self.prefix + get(row, self.source, str), self.eos)
        return ids, get(row, self.target, str)


def tokenizer_of(
    row: Row, tokenizer: Tokenizer, src_lang: str = "src_lang", tgt_lang: str = "tgt_lang"
) -> Tokenizer:
    """The tokenizer with the languages of a row.

    Args:
        src_lang, tgt_lang: names of their fields; a row need not have those of the default names.

    Raises:
        InputError: the tokenizer has no such language.
    """
    names = {"src_lang": src_lang, "tgt_lang": tgt_lang}
    is_used = isinstance(tokenizer, WithLanguages)
    languages = {
        name: get(row, field, str)
        for name, field in names.items()
        if (field in row and is_used) or field != name
    }
    return tokenizer.with_languages(**languages) if languages else tokenizer


def get(row: Row, name: str, *types: type) -> Any:
    """Returns a field of a row.

    Raises:
        DataError: the field is missing or has a value of another type.
    """
    if name not in row:
        raise DataError(
            f"{name}: no such field; the row has {', '.join(map(str, row)) or 'none'} (names of "
            "fields can be set)"
        )
    value = objects_of(row[name]) if list in types else row[name]
    if type(value) not in types:
        expected = " or ".join(kind.__name__ for kind in types)
        raise DataError(f"{name}: expected {expected}, found {str(value)[:60]!r}")
    return value


def objects_of(value: Any) -> Any:
    """A list of objects from the text of a CSV cell; any other value as it is.

    >>> objects_of('[{"role": "user"}]'), objects_of("[1]")
    ([{'role': 'user'}], '[1]')
    """
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(value)
    return value


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text with the tokenizer's special tokens (BOS, EOS)."""
    return tokenizer.encode(text, max_bytes=sys.maxsize)


def encode_ended(tokenizer: Tokenizer, text: str, eos: int) -> list[int]:
    """Encodes a text with the tokenizer's special tokens, and EOS unless the ids end with it."""
    ids = encode(tokenizer, text)
    is_ended = isinstance(tokenizer, WithLanguages) or ids[-1:] == [eos]
    return ids if is_ended else [*ids, eos]


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text without special tokens."""
    return tokenizer.encode(text, add_special_tokens=False, max_bytes=sys.maxsize)


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that continues another one.

    sentencepiece prepends a space to a text, which is wrong for a continuation. So the text is
    encoded after a line break, whose ids are then removed if they are unchanged.
    """
    before, both = plain(tokenizer, "\n"), plain(tokenizer, "\n" + text)
    if both[: len(before)] == before:
        return both[len(before) :]
    return plain(tokenizer, text)


def encode_beginning(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encodes a text that will be continued: with the tokenizer's BOS, without EOS."""
    return tokenizer.encode_beginning(text, max_bytes=sys.maxsize)


def encode_document(tokenizer: Tokenizer, text: str, size: int = PART_CHARACTERS) -> list[int]:
    """Like `encode_beginning`, but encodes a long text in parts that end at line ends."""
    ids: list[int] = []
    start = 0
    while start < len(text) or start == 0:
        stop = start + size
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        part = text[start:stop]
        ids += encode_continuation(tokenizer, part) if start else encode_beginning(tokenizer, part)
        start = stop
    return ids


def int32(ids: list[int]) -> Int32[np.ndarray, " T"]:
    return np.asarray(ids, np.int32)


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
        return self.encode(messages_of(row, self.field), objects_of(row.get("tools")))

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

    def prompt_of(self, row: Row) -> tuple[list[int], str]:
        """Ids to generate from, and the expected answer: the last one of the conversation."""
        return self.last_answer(messages_of(row, self.field), row, self.field)

    def last_answer(
        self, messages: Sequence[Message], row: Row, field: str
    ) -> tuple[list[int], str]:
        """Ids of the conversation before its last answer, and that answer; `field` holds it."""
        answers = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
        if not answers:
            raise DataError(f"{field}: no message of the assistant")
        reference = messages[answers[-1]].get("content")
        if not isinstance(reference, str):
            raise DataError(
                f"{field}[{answers[-1]}]: evaluation.metrics compare texts, and the "
                f"content of this answer is {str(reference)[:60]!r}"
            )
        ids = self.tokenizer.apply_chat_template(
            messages[: answers[-1]],
            tools=objects_of(row.get("tools")),
            chat_template=self.chat_template,
        )
        assert not isinstance(ids, str)
        return ids, reference

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


@dataclass(frozen=True)
class ClassificationFormat:
    """Encodes a text and its label according to the model's `problem_type`."""

    tokenizer: Tokenizer
    field: str
    label: str
    labels: Labels

    def __call__(self, row: Row) -> ClassificationExample:
        ids = encode(self.tokenizer, get(row, self.field, str))
        if not ids:
            raise DataError(f"{self.field}: empty, and the tokenizer has no BOS to stand for it")
        if self.label not in row:
            raise DataError(f"{self.label}: no such field; the row has {', '.join(map(str, row))}")
        try:
            return ClassificationExample(int32(ids), self.labels(row[self.label]))
        except DataError as failure:
            raise DataError(f"{self.label}: {failure}") from None


@dataclass(frozen=True)
class Labels:
    """Converts the label of a row to an array.

    - `single_label_classification`: a class number, or a class name if there are names: int32 [].
    - `multi_label_classification`: a list of numbers or names (the others are 0), or one float or
      boolean for each class: float32 [C].
    - `regression`: a number, or a list of C numbers for C outputs: float32 [] or [C].

    >>> labels = Labels("multi_label_classification", 3, ("red", "green", "blue"))
    >>> labels(["blue", "red"]).tolist(), labels([0.0, 1.0, 0.5]).tolist()
    ([1.0, 0.0, 1.0], [0.0, 1.0, 0.5])
    >>> Labels("regression", 1)("3.5").item()
    3.5
    """

    problem_type: str
    count: int
    names: tuple[str, ...] = ()

    def __call__(self, value: Any) -> Int32[np.ndarray, ""] | Float32[np.ndarray, "*C"]:
        value = self._from_text(value)
        match self.problem_type:
            case "single_label_classification":
                return np.asarray(self._number(value), np.int32)
            case "multi_label_classification":
                return self._several(value)
            case _:
                return self._numbers(value)

    def _from_text(self, value: Any) -> Any:
        """The number or the list in a text, such as a cell of CSV, that is no class name."""
        if isinstance(value, str) and value not in self.names:
            with contextlib.suppress(ValueError, RecursionError):
                return json.loads(value)
        return value

    def _number(self, value: Any) -> int:
        if isinstance(value, str):
            if not self.names:
                raise DataError(f"{value!r} is a name: list the classes in label_names")
            if value not in self.names:
                raise DataError(f"{value!r} is none of {', '.join(self.names)}")
            return self.names.index(value)
        value = printable(value)  # integers with gaps, which pandas stores as floats
        if type(value) is not int or not 0 <= value < self.count:
            raise DataError(f"expected a class, 0 to {self.count - 1}, found {str(value)[:60]!r}")
        return value

    def _several(self, value: Any) -> Float32[np.ndarray, " C"]:
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise DataError(f"expected a list of classes, found {str(value)[:60]!r}")
        if value and all(type(item) in (float, bool) for item in value):
            if len(value) != self.count or not all(0 <= item <= 1 for item in value):
                raise DataError(f"expected {self.count} numbers from 0 to 1, found {list(value)}")
            return np.asarray(value, np.float32)
        numbers = [self._number(item) for item in value]
        if len(set(numbers)) != len(numbers):
            raise DataError(
                f"{list(value)} lists a class twice; one value for each class is written with "
                "floats or booleans"
            )
        result = np.zeros(self.count, np.float32)
        result[numbers] = 1.0
        return result

    def _numbers(self, value: Any) -> Float32[np.ndarray, "*C"]:
        values = (
            list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        )
        if len(values) != self.count or not all(map(is_float32_number, values)):
            expected = "a number" if self.count == 1 else f"{self.count} numbers"
            raise DataError(f"expected {expected}, found {str(value)[:60]!r}")
        return np.asarray(values if self.count > 1 else values[0], np.float32)


def problem_of(model: ModelInfo) -> str:
    """Problem type of a classifier; the default depends on its number of outputs.

    >>> problem_of(ModelInfo(kind="classification", vocab_size=9, num_labels=1))
    'regression'
    """
    if model.problem_type is not None:
        return model.problem_type
    return "regression" if model.num_labels == 1 else "single_label_classification"


def labels_of(model: ModelInfo, names: tuple[str, ...]) -> Labels:
    """Makes the label converter of a model.

    Raises:
        ConfigError: the number of names is not the model's number of classes.
    """
    problem = problem_of(model)
    if names and problem == "regression":
        raise ConfigError("label_names: a regression has no classes")
    if names and len(names) != model.num_labels:
        raise ConfigError(
            f"label_names: {len(names)} names, but the model has {model.num_labels} classes "
            "(num_labels)"
        )
    return Labels(problem, model.num_labels, names)


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
            tools = objects_of(row.get("tools"))
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
        if not isinstance(objects_of(row.get(self.chosen)), list):
            return None
        if self.chat is None:
            raise DataError(f"{self.chosen}: messages, which an encoder-decoder cannot take; texts")
        return self.chat


def conversations_of(
    row: Row, prompt: str, chosen: str, rejected: str
) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """Messages of prompt, chosen and rejected answer; without a prompt, of what both begin with.

    Raises:
        DataError: a field is no list of messages, or the answers do not begin with one prompt.

    >>> user, good, bad = ({"role": "user"}, {"role": "assistant", "content": "a"},
    ...                    {"role": "assistant", "content": "b"})
    >>> conversations_of({"c": [user, good], "r": [user, bad]}, "p", "c", "r")[0]
    [{'role': 'user'}]
    """
    first, second = messages_of(row, chosen), messages_of(row, rejected)
    if prompt in row:
        return messages_of(row, prompt), first, second
    pairs = zip(first, second, strict=False)
    shared = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    if shared == 0:
        raise DataError(
            f"{prompt}: no such field, and {chosen} and {rejected} begin with different messages, "
            "so there is no common prompt"
        )
    # Equal conversations have no preference; the last message still is the answer.
    shared = min(shared, len(first) - 1, len(second) - 1)
    return first[:shared], first[shared:], second[shared:]


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
