"""/v1/completions; for an encoder-decoder the prompt is the encoder's input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxllm.common.errors import InputError
from jaxllm.serve.async_engine import GenerationStream
from jaxllm.serve.http.answers import Answer, Usage
from jaxllm.serve.http.api_types import CompletionRequest
from jaxllm.serve.http.logprobs_json import completion_logprobs, token_text
from jaxllm.serve.http.pieces import Choice, Piece
from jaxllm.serve.http.state import ServerState


class CompletionAnswer(Answer):
    """The continuations of one or more prompts."""

    object = "text_completion"
    chunk_object = "text_completion"
    id_prefix = "cmpl"
    default_new_tokens = 16
    request: CompletionRequest

    def __init__(self, state: ServerState, request: CompletionRequest, usage: Usage) -> None:
        super().__init__(state, request, usage)
        self._offsets: dict[int, int] = {}

    async def start(self) -> list[GenerationStream]:
        """Tokenizes the prompts and queues them."""
        request = self.request
        prompts = (request.prompts, "prompt", request.src_lang)
        ids = await self.state.in_thread(prompt_ids, self.state, *prompts)
        logprobs = request.logprobs is not None or request.best_of is not None
        language = {} if request.tgt_lang is None else {"tgt_lang": request.tgt_lang}
        return await self.submit(ids, request.max_tokens, logprobs=logprobs, **language)

    def selected(self, choices: list[Choice]) -> list[Choice]:
        """The `n` most probable choices of each prompt, the best first, with `best_of`."""
        request = self.request
        if request.best_of is None:
            return choices
        best: list[Choice] = []
        for start in range(0, len(choices), request.samples):
            of_prompt = choices[start : start + request.samples]
            of_prompt.sort(key=lambda choice: choice.mean_logprob, reverse=True)
            best += of_prompt[: request.n]
        return best

    def choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if self.request.logprobs is not None:
            logprobs = completion_logprobs(
                self.tokenizer, choice.tokens, choice.logprobs, self.request.logprobs
            )
        return {"text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def piece_choices(self, piece: Piece) -> list[dict[str, Any]]:
        logprobs = None
        if piece.logprobs is not None and self.request.logprobs is not None:
            offset = self._offsets.get(piece.index, 0)
            logprobs = completion_logprobs(
                self.tokenizer, piece.tokens, piece.logprobs, self.request.logprobs, offset
            )
            lengths = (len(token_text(self.tokenizer, token)[0]) for token in piece.tokens)
            self._offsets[piece.index] = offset + sum(lengths)
        if not piece.text and piece.finish_reason is None and logprobs is None:
            return []  # the text waits for the next token
        return [{"text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]


def prompt_ids(
    state: ServerState,
    prompts: list[str | tuple[int, ...]],
    name: str,
    src_lang: str | None = None,
) -> list[list[int]]:
    """The token ids of prompts, whose texts are in the language `src_lang`.

    Raises:
        InputError: a prompt is empty or too long, or has an id that the model does not know.
    """
    vocab_size, result = state.engine.model.config.vocab_size, []
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if src_lang is not None and len(texts) < len(prompts):
        raise InputError("src_lang: has no effect on token ids; leave it out")
    encoded: Iterator[list[int]] = iter(())
    if texts:
        options = {"max_bytes": state.limits.body_bytes, "src_lang": src_lang}
        batch = state.tokenize("__call__", texts, **options)
        encoded = iter(batch["input_ids"])
    for prompt in prompts:
        ids = next(encoded) if isinstance(prompt, str) else list(prompt)
        if not ids or not all(0 <= token < vocab_size for token in ids):
            raise InputError(f"{name}: expected one token id or more, from 0 to {vocab_size - 1}")
        result.append(ids)
    return result
