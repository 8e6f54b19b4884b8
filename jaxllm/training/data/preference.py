"""Format of preference rows: a prompt with a chosen and a rejected answer, as in TRL."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.common.errors import DataError
from jaxllm.tokenizers import Tokenizer
from jaxllm.training.data.chat import ChatFormat, Message, messages_of
from jaxllm.training.data.config import DataConfig, ModelInfo, eos_of
from jaxllm.training.data.example import Example, PreferenceExample
from jaxllm.training.data.formats import PromptCompletionFormat, Seq2SeqFormat
from jaxllm.training.data.rows import Row

TextFormat = PromptCompletionFormat | Seq2SeqFormat


@dataclass(frozen=True)
class PreferenceFormat:
    """Encodes a prompt and two answers to it: texts, or lists of messages.

    Labels are those of the answers: for texts the tokens and the EOS, for messages what the
    assistant says after the prompt.
    """

    texts: tuple[TextFormat, TextFormat]
    """Formats of the chosen and the rejected text."""
    chat: ChatFormat | None
    """Format of messages; None: the model has no conversations (T5)."""
    prompt: str
    chosen: str
    rejected: str

    def __call__(self, row: Row) -> PreferenceExample:
        if isinstance(row.get(self.chosen), list):
            return self._conversations(row)
        chosen, rejected = (encode(row) for encode in self.texts)
        assert isinstance(chosen, Example)
        assert isinstance(rejected, Example)
        return PreferenceExample(chosen, rejected)

    def _conversations(self, row: Row) -> PreferenceExample:
        if self.chat is None:
            raise DataError(f"{self.chosen}: messages, which an encoder-decoder cannot take; texts")
        prompt, *answers = conversations_of(row, self.prompt, self.chosen, self.rejected)
        chosen, rejected = (
            self.chat.encode([*prompt, *answer], row.get("tools"), first=len(prompt))
            for answer in answers
        )
        return PreferenceExample(chosen, rejected)


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
