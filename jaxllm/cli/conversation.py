"""A conversation with a model: its messages, its tokens, and their KV cache."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

from jaxllm import GenerateOutput, GenerationConfig, generate
from jaxllm.common.errors import InputError
from jaxllm.generation.call.merging import merged_config
from jaxllm.generation.call.past_key_values import PastKeyValues
from jaxllm.generation.settings.lengths import with_default_length
from jaxllm.models.decoder import GenerativeModel
from jaxllm.tokenizers import Tokenizer

Message = dict[str, str]


class AnswerStoppedError(Exception):
    """The user stopped an answer."""


class Conversation:
    """A conversation whose KV cache is kept: each turn computes the new tokens only.

    Args:
        model: a decoder-only model.
        tokenizer: the model's, with a chat template.
        system: text of the system message, if any.
        fields: generation fields, which may be changed between turns.
        seed: of the samples.

    Attributes:
        messages: the messages so far, the system's included.
        ids: token ids so far: of the last prompt and its answer, as the model wrote them.
    """

    def __init__(
        self,
        model: GenerativeModel,
        tokenizer: Tokenizer,
        *,
        system: str | None = None,
        fields: GenerationConfig | None = None,
        seed: int = 0,
    ) -> None:
        self.fields = fields or GenerationConfig()
        self._model, self._tokenizer = model, tokenizer
        self._key = jax.random.key(seed)
        self.reset(system)

    def reset(self, system: str | None) -> None:
        """Begins anew, with this system message."""
        self.messages: list[Message] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})
        self.ids: list[int] = []
        self.past: PastKeyValues | None = None

    def ask(self, text: str, show: Callable[[str], None], stopped: Callable[[], bool]) -> int:
        """Answers a message; returns the number of tokens of the answer.

        If it raises, the conversation is as before.

        Args:
            text: the message.
            show: called with each piece of the answer's text.
            stopped: the answer ends, and is kept, when this returns True.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        _, ends = merged_config(self._model, self.fields, {})
        prompt = continued_ids(self._tokenizer, messages, self.ids, ends)
        limit = self._model.config.context_length
        if limit is not None and len(prompt) >= limit:
            raise InputError(
                f"the conversation has {len(prompt)} tokens, the model's {limit} at most: send"
                " less, or begin anew with /reset"
            )
        config = with_default_length(self.fields, self._model, len(prompt))
        streamer = _Streamer(self._tokenizer, show, stopped)
        past = self.past if self.past is not None and begins_with(prompt, self.past) else None
        try:
            output: GenerateOutput = generate(
                self._model,
                [prompt],
                generation_config=config,
                key=jax.random.fold_in(self._key, len(messages)),
                past_key_values=past,
                return_past_key_values=True,
                streamer=streamer,
                tokenizer=self._tokenizer,
            )
            self.past = output.past_key_values
        except AnswerStoppedError:
            pass  # the cache of the last answer still holds what came before
        streamer.end()
        answer = streamer.ids
        content = self._tokenizer.decode(answer, skip_special_tokens=True)
        self.messages = [*messages, {"role": "assistant", "content": content}]
        self.ids = [*prompt, *answer]
        return len(answer)


class _Streamer:
    """Shows tokens as they come; raises StoppedError after the token at which the user stops.

    The first token is shown with the second: it comes from the prefill, and the decode loop may
    compile for many seconds in between.
    """

    def __init__(
        self, tokenizer: Tokenizer, show: Callable[[str], None], stopped: Callable[[], bool]
    ) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._show, self._stopped = show, stopped
        self._has_prompt = self._has_ended = False
        self._shown = 0
        self.ids: list[int] = []

    def put(self, value: Int[np.ndarray | Array, ...]) -> None:
        if not self._has_prompt:
            self._has_prompt = True
            return
        if len(value) != 1:
            raise InputError("num_return_sequences: a chat has one answer")
        self.ids.append(int(value[0]))
        if len(self.ids) > 1:
            self._show_rest()
        if self._stopped():
            raise AnswerStoppedError

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._show_rest()
            self._show(self._decoder.end())

    def _show_rest(self) -> None:
        self._show(self._decoder.put(self.ids[self._shown :]))
        self._shown = len(self.ids)


def continued_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], ids: list[int], ends: Collection[int]
) -> list[int]:
    """Token ids of a conversation, up to where the next answer begins.

    They begin with `ids`, the tokens so far, where the template writes the earlier messages as it
    did before: encoding an answer's text may give other tokens than those the model wrote, and the
    KV cache holds the latter. Only what the template writes after the answer is added.

    Args:
        messages: all messages; the last one is the user's.
        ids: the last prompt and its answer; empty at the first message.
        ends: end tokens, one of which the template writes after an answer.
    """
    whole: list[int] = tokenizer.apply_chat_template(messages)
    if not ids:
        return whole
    earlier: list[int] = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=False)
    # An end token before the answer is that of the user's message.
    start = len(tokenizer.apply_chat_template(messages[:-2]))
    places = [place for place in range(start, len(earlier)) if earlier[place] in ends]
    if whole[: len(earlier)] != earlier or not places:
        return whole
    answer = messages[-2]["content"].strip()
    if not tokenizer.decode(earlier[: places[-1]]).strip().endswith(answer):
        return whole
    closing = earlier[places[-1] :]
    if ids[-1] in ends:  # the model closed its answer itself
        closing = closing[1:]
    return [*ids, *closing, *whole[len(earlier) :]]


def begins_with(ids: list[int], past: PastKeyValues) -> bool:
    """True if the tokens in the cache are the first of `ids`, and not all of them."""
    [cached] = past.tokens()
    return len(cached) < len(ids) and ids[: len(cached)] == cached.tolist()


def answer_fields(name: str, value: Any, fields: GenerationConfig) -> GenerationConfig:
    """The fields with one more; raises InputError or UnsupportedError for a bad one."""
    return fields.merge(GenerationConfig(**{name: value}))
