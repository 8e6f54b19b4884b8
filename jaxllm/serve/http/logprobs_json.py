"""Log-probabilities as OpenAI's interface has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxllm.serve.chunks import TokenLogprob
from jaxllm.tokenizers.tokenizer import Tokenizer

FLOOR = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_text(tokenizer: Tokenizer, token: int) -> tuple[str, list[int] | None]:
    """A token's text inside a sequence, and its bytes; the text of a part of a character has
    replacement characters."""
    content = tokenizer.token_bytes()[token] if token < len(tokenizer) else None
    if content is None:
        return "", None
    return content.decode("utf-8", "replace"), list(content)


def chat_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    top_logprobs: int,
) -> dict[str, Any]:
    """The `logprobs` of a choice of a chat."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        text, content = token_text(tokenizer, token)
        return {"token": text, "logprob": max(logprob, FLOOR), "bytes": content}

    return {
        "content": [
            entry(token, item.logprob)
            | {"top_logprobs": [entry(*pair) for pair in item.top[:top_logprobs]]}
            for token, item in zip(tokens, logprobs, strict=True)
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    tokens: Sequence[int],
    logprobs: Sequence[TokenLogprob],
    top_logprobs: int,
    offset: int = 0,
) -> dict[str, Any]:
    """The `logprobs` of a choice of a text completion.

    Args:
        offset: characters of the tokens before these.
    """
    texts = [token_text(tokenizer, token)[0] for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(item.logprob, FLOOR) for item in logprobs],
        "top_logprobs": [
            {
                token_text(tokenizer, token)[0]: max(logprob, FLOOR)
                for token, logprob in reversed(item.top[:top_logprobs])
            }
            for item in logprobs
        ],
        "text_offset": offsets,
    }
