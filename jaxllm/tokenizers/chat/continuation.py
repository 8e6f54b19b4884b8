"""`continue_final_message`: a chat that ends inside its last message, for the model to go on.

As in transformers, a tag after the message's text marks where the rendered chat is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.common.errors import InputError, TemplateError
from jaxllm.tokenizers.settings import AddedToken

TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def tagged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with the tag at the end of the last one's text.

    Raises:
        InputError: there is no message, or the last one has no text.
    """
    last = dict(messages[-1]) if messages else {}
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + TAG
    elif isinstance(content, Sequence):
        parts: list[Any] = list(content)
        texts = [i for i, part in enumerate(parts) if isinstance(part, Mapping) and "text" in part]
        if texts:
            parts[texts[-1]] = {**parts[texts[-1]], "text": parts[texts[-1]]["text"] + TAG}
            last["content"] = parts
    if last.get("content") == content:
        raise InputError("continue_final_message: the last message has no text to go on with")
    return [*messages[:-1], last]


def cut(text: str) -> str:
    """The text up to the tag.

    >>> cut("<user>Hi<assistant>I am CONTINUE_FINAL_MESSAGE_TAG <end>")
    '<user>Hi<assistant>I am '
    """
    start = text.rfind(TAG.strip())
    if start < 0:
        raise TemplateError("continue_final_message: the template leaves out the last message")
    if text[start:].startswith(TAG):
        return text[:start]
    return text[:start].rstrip()  # the template trimmed the message


def cut_parts(parts: str | Sequence[str | AddedToken]) -> str | list[str | AddedToken]:
    """`cut` for a text whose special tokens are split off."""
    if isinstance(parts, str):
        return cut(parts)
    for number in range(len(parts) - 1, -1, -1):
        part = parts[number]
        if isinstance(part, str) and TAG.strip() in part:
            return [*parts[:number], cut(part)]
    return [cut("")]
