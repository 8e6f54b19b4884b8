"""The messages of a conversation as chat templates get them, as in transformers 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jaxllm.common.errors import InputError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, a few the second."""


def normalized_messages(messages: object) -> list[dict[str, Any]]:
    """Messages without keys that are None, and with their reasoning under its usual names.

    OpenAI's interface gives ``content=None`` beside tool calls, which many templates write as
    "None"; all of them know missing keys.

    >>> normalized_messages([{"role": "assistant", "content": None, "reasoning": "2 + 2"}])
    [{'thinking': '2 + 2', 'role': 'assistant', 'reasoning': '2 + 2', 'reasoning_content': '2 + 2'}]

    Raises:
        InputError: not a list of dicts.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InputError(f"messages: expected a list of dicts, found {type(messages).__name__}")
    return [_normalized(message) for message in messages]


def _normalized(message: object) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(
            f"messages: expected a list of dicts, found a {type(message).__name__} in it"
        )
    given = {key: value for key, value in message.items() if value is not None}
    reasoning = next((given[key] for key in REASONING if key in given), None)
    if reasoning is None:
        return given
    return {"thinking": reasoning, **given, "reasoning_content": reasoning}
