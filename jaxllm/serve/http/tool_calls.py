"""Tool calls in the text of a model.

Recognised are the two forms that chat templates of the supported families ask for:
``<tool_call>{"name": ..., "arguments": ...}</tool_call>`` (Hermes, Qwen, SmolLM), any number of
them, and a text that is nothing but ``{"name": ..., "parameters": ...}`` (Llama 3).
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxllm.common.errors import InputError

START = "<tool_call>"
_CALL = re.compile(r"<tool_call>\s*(.*?)\s*(?:</tool_call>|\Z)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """A call of a function."""

    id: str
    name: str
    arguments: str
    """A JSON object, as text."""

    def to_json(self) -> dict[str, Any]:
        """The call as OpenAI's interface has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def split_tool_calls(text: str, names: Collection[str]) -> tuple[str, list[ToolCall]]:
    """Splits a text into its content and its tool calls.

    What is no valid call of one of the functions `names` stays in the content.

    >>> split_tool_calls('Hm. <tool_call>{"name": "f", "arguments": {}}</tool_call>', ["f"])[0]
    'Hm. '
    """
    calls: list[ToolCall] = []

    def take(match: re.Match[str]) -> str:
        call = _parsed(match[1], names)
        if call is None:
            return match[0]
        calls.append(call)
        return ""

    content = _CALL.sub(take, text)
    if not calls and (call := _parsed(text, names)) is not None:
        return "", [call]
    return (content.rstrip("\n") if calls else content), calls


def _parsed(text: str, names: Collection[str]) -> ToolCall | None:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(call, dict) or call.get("name") not in names:
        return None
    arguments = call.get("arguments", call.get("parameters", {}))
    if not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(f"call_{uuid.uuid4().hex[:24]}", call["name"], text)


def tool_names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the functions of a request.

    Raises:
        InputError: a tool is no function with a name.
    """
    names = []
    for number, tool in enumerate(tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            raise InputError(f"tools[{number}]: expected a function with a name")
        names.append(name)
    return names
