"""Reads messages and tools, and gives them the form that a chat template expects.

Conversations come in the formats of OpenAI's interface, of data sets, and of Hugging Face's
documentation: the content is a text or a list of parts, the arguments of a call are an object or
JSON text, and tables hold nulls where a message has no such key. `Tokenizer.apply_chat_template`
reads every conversation here, so that a model is trained, evaluated and asked with the same text.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from jaxllm.common.cells import plain_value
from jaxllm.common.errors import InputError, quoted
from jaxllm.common.files import parse_json
from jaxllm.tokenizers.template_analysis import TemplateReads

T = TypeVar("T")
Message = Mapping[str, Any]
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, a few the second."""
_LEFT_OUT = object()
"""Stands for the content of a message that has none."""
_TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of a part that holds text, in OpenAI's two interfaces."""


def read_messages(messages: object, name: str = "messages") -> list[dict[str, Any]]:
    """Checks a conversation, and removes what has no meaning in it.

    Keys of a message, a part or a call that are null are removed, and so is an empty list of calls.
    The content of an assistant's message may be missing or null if the message has calls or
    reasoning. Arguments of calls that are an empty text become an empty object.

    Args:
        messages: a list of messages, or JSON text of one.
        name: name of the field, for errors.

    Returns:
        New messages. Reading them again changes nothing.

    Raises:
        InputError: the value is not a conversation. The error names the message and its field.

    >>> read_messages([{"role": "assistant", "content": "4", "reasoning": "2 + 2", "name": None}])
    [{'thinking': '2 + 2', 'role': 'assistant', 'content': '4', 'reasoning': '2 + 2', \
'reasoning_content': '2 + 2'}]
    """
    try:
        items = _listed(_parsed(messages, name))
    except InputError as error:
        raise InputError(f"{error}; give a list of messages, or JSON text of one") from None
    if items is None:
        raise InputError(f"{name}: expected a list of messages, found {_kind(messages)}")
    return [_read_message(each, f"{name}[{number}]") for number, each in enumerate(items)]


def read_tools(tools: object, name: str = "tools") -> list[dict[str, Any]] | None:
    """Checks tools: JSON schemas of functions.

    Args:
        tools: a list of schemas, one schema, or JSON text of either; elements may be JSON text too.
        name: name of the field, for errors.

    Returns:
        The tools; None if there are none: null, an empty list, or an empty text.

    Raises:
        InputError: the value is something else.

    >>> read_tools(' [ {"name": "f"} ] '), read_tools("[]")
    ([{'name': 'f'}], None)
    """
    tools = _parsed(tools, name)
    if tools is None or tools == {}:
        return None
    items = _listed([tools] if isinstance(tools, Mapping) else tools)
    if items is None:
        raise InputError(f"{name}: expected a list of JSON schemas, found {_kind(tools)}")
    result = [_parsed(each, f"{name}[{number}]") for number, each in enumerate(items)]
    for number, each in enumerate(result):
        if not isinstance(each, Mapping):
            raise InputError(
                f"{name}[{number}]: expected the JSON schema of a function, found {_kind(each)}"
            )
    return [dict(each) for each in result] or None


def template_forms(
    messages: Sequence[Message], reads: TemplateReads, name: str = "messages"
) -> Iterator[list[dict[str, Any]]]:
    """The forms of a conversation that a template may expect, the likeliest first.

    A template that loops over the parts of a content gets them as they are, and where it takes
    nothing else, it gets a text as one part. Any other template gets the texts of the parts, joined
    without a separator. A content that is null stays null where the template tests for it, and is
    removed elsewhere. Arguments of calls are objects.

    There are further forms, since templates treat their messages differently: they loop over the
    parts of the user's messages but write a system message as it is, fail on a null that they test
    for elsewhere, or write arguments as they are. Then parts are joined, in the system message or
    in all, null is removed or an empty text, and arguments are JSON text.

    Args:
        messages: from `read_messages`.

    Raises:
        InputError: a message has calls, and the template has no place for them.
    """
    contents = [message.get("content", _LEFT_OUT) for message in messages]
    calls = [number for number, message in enumerate(messages) if "tool_calls" in message]
    if calls and not reads.calls:
        raise InputError(
            f"{name}[{calls[0]}].tool_calls: the chat template does not write calls; give one that "
            "does, or leave them out"
        )
    has_parts = any(isinstance(content, list) for content in contents)
    joins: list[Collection[str] | None] = [() if reads.parts else None]  # None: of all roles
    if has_parts and reads.parts and reads.text:
        joins = [(), ("system", "developer"), None]
    nulls = [*([None] if reads.null_content else ()), _LEFT_OUT, ""] if None in contents else [None]
    texts = [False, True] if calls else [False]
    for null, as_text, joined in itertools.product(nulls, texts, joins):
        form: list[dict[str, Any]] = []
        for message, content in zip(messages, contents, strict=True):
            if content is None:
                content = null
            elif isinstance(content, list) and (joined is None or message["role"] in joined):
                content = text_content(message)
            elif isinstance(content, str) and not reads.text:
                content = [{"type": "text", "text": content}]
            formed = {**message, "content": content}
            formed.pop("weight", None)  # for training alone
            if content is _LEFT_OUT:
                del formed["content"]
            if "tool_calls" in message:
                formed["tool_calls"] = [_formed(call, as_text) for call in message["tool_calls"]]
            form.append(formed)
        yield form


def _formed(call: Message, as_text: bool) -> dict[str, Any]:
    """A call whose arguments are an object, or JSON text."""
    function = dict(call.get("function", call))
    arguments = function["arguments"]
    if as_text and not isinstance(arguments, str):
        function["arguments"] = json.dumps(arguments, ensure_ascii=False)
    elif not as_text:
        function["arguments"] = _parsed(arguments, "arguments")
    return {**call, "function": function} if "function" in call else function


def is_whole(text: str, messages: Sequence[Message], form: Sequence[Message]) -> bool:
    """True if a rendered conversation has the texts of all parts, and no object as Python shows it.

    Args:
        messages: the conversation from `read_messages`.
        form: the form of it that was rendered.
    """
    parts = [part for each in messages for part in each.get("content") or () if part is not None]
    texts = [part["text"].strip() for part in parts if isinstance(part, dict)]
    calls = [call.get("function", call) for each in form for call in each.get("tool_calls", ())]
    shown = [*parts, *(call["arguments"] for call in calls)]
    as_python = [str(each) for each in shown if isinstance(each, dict) and each]
    return all(each in text for each in texts) and not any(each in text for each in as_python)


def text_content(message: Message) -> str | None:
    """The content of a message as one text; None if it has none.

    >>> text_content({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]})
    'ab'
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    return "".join(part["text"] for part in content)


def is_arrow_data(rows: object) -> bool:
    """True for a data set of `datasets`, and for a column of one."""
    return type(rows).__module__.partition(".")[0] == "datasets"


def plain_rows(rows: Iterable[T]) -> Iterable[T | Any]:
    """Rows or conversations; those of a data set or its column without the null keys of Arrow."""
    if not is_arrow_data(rows):
        return rows
    return (
        {name: plain_value(cell, drops_nulls=True) for name, cell in row.items()}
        if isinstance(row, Mapping)
        else plain_value(row, drops_nulls=True)
        for row in rows
    )


def _read_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where}: expected an object with a role, found {_kind(message)}")
    result = {k: v for k, v in message.items() if v is not None or k == "content"}
    if not isinstance(result.get("role"), str):
        raise InputError(
            f"{where}.role: expected the name of a role, such as 'user', found "
            f"{_kind(result.get('role'))}"
        )
    if "function_call" in result:
        raise InputError(
            f"{where}.function_call: is the old form of a call; write it into tool_calls"
        )
    calls = _read_calls(result.pop("tool_calls", None), f"{where}.tool_calls")
    if calls:
        result["tool_calls"] = calls
    reasoning = next((result[key] for key in _REASONING if key in result), None)
    if reasoning is not None:
        result = {"thinking": reasoning, **result, "reasoning_content": reasoning}
    if result.get("content") is not None:
        result["content"] = _read_content(result["content"], f"{where}.content")
    elif result["role"] != "assistant" or not (calls or reasoning):
        raise InputError(
            f"{where}.content: is missing or null; expected a text (only an assistant's message "
            "with tool_calls or reasoning has none)"
        )
    return result


def _read_content(content: object, where: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    items = _listed(content)
    if items is None:
        raise InputError(f"{where}: expected a text or a list of parts, found {_kind(content)}")
    parts: list[dict[str, Any]] = []
    for number, part in enumerate(items):
        items_given = part.items() if isinstance(part, Mapping) else ()
        given = {key: value for key, value in items_given if value is not None}
        if given.get("type", "text") not in _TEXT_PARTS or not isinstance(given.get("text"), str):
            raise InputError(
                f"{where}[{number}]: expected a part of type text with its text, found "
                f"{_kind(part)}; images, audio and files are not supported"
            )
        parts.append({**given, "type": "text"})
    return parts


def _read_calls(calls: object, where: str) -> list[dict[str, Any]]:
    calls = _parsed(calls, where)
    items = [] if calls is None else _listed(calls)
    if items is None:
        raise InputError(f"{where}: expected a list of calls, found {_kind(calls)}")
    return [_read_call(each, f"{where}[{number}]") for number, each in enumerate(items)]


def _read_call(call: object, where: str) -> dict[str, Any]:
    """A call as OpenAI has it, with a `function`, or with the name and the arguments alone."""
    result = {k: v for k, v in call.items() if v is not None} if isinstance(call, Mapping) else {}
    function = result.get("function", result)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(
            f"{where}: expected a call with the name of its function, found {_kind(call)}"
        )
    function = {key: value for key, value in function.items() if value is not None}
    place = f"{where}.function.arguments" if "function" in result else f"{where}.arguments"
    arguments = _parsed(function.get("arguments"), place)
    if arguments is None:
        function["arguments"] = {}
    elif not isinstance(arguments, Mapping):
        raise InputError(f"{place}: expected a JSON object, found {_kind(arguments)}")
    return {**result, "function": function} if "function" in result else function


def _parsed(value: Any, where: str) -> Any:
    """The value of JSON text, None for a text that is empty; any other value as it is."""
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    return parse_json(value.encode("utf-8", "replace"), source=where, error=InputError)


def _kind(value: object) -> str:
    """A wrong value for an error, which may be logged: no texts of the user."""
    match value:
        case None:
            return "nothing"
        case str():
            return "a text"
        case bool() | int() | float():
            return quoted(value)
        case {"type": str(kind)}:
            return f"an object of type {quoted(kind)}"
        case _:
            return f"a value of type {type(value).__name__}"


def _listed(value: object) -> Sequence[Any] | None:
    """The value, if it is a list, an array, or another sequence that is no text; else None."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray):
        return value
    return None
