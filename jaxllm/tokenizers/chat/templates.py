"""Chat templates whose users cannot write special tokens.

A template writes ``<|im_end|>`` to end a turn; a user who types the same characters must not end
it. The characters alone cannot tell the two apart, so the conversation is rendered twice: as it
stands, and with one character of every special token (``<``, for most) replaced, in everything that
users wrote, by a stand-in that occurs nowhere else. Special tokens found in the second text are the
template's own. The stand-ins are one character each, so that trimming, slicing and measuring give
the same; that the two texts agree once the stand-ins are put back is checked, and where they do not
(the template looks for that very character) another character of the tokens is tried.

The text itself stays untouched: for messages that spell no special token the ids are exactly those
of the whole text, as in transformers.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxllm.common.errors import InputError, TemplateError
from jaxllm.tokenizers.added_tokens import token_pattern
from jaxllm.tokenizers.chat.sandbox import render as _render
from jaxllm.tokenizers.settings import AddedToken

_STAND_INS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode: never characters
_ATTEMPTS = 6


def render(template: str, variables: Mapping[str, Any]) -> str:
    """The text that a chat template writes.

    Raises:
        TemplateError: The template is too large, too expensive, or failed.
        InputError: A variable is nothing that JSON can express.
    """
    return _checked(_render(template, _plain(variables, {}), time.time()))


def render_parts(
    template: str,
    untrusted: Mapping[str, Any],
    variables: Mapping[str, Any],
    special: Mapping[str, AddedToken],
) -> str | list[str | AddedToken]:
    """Render, and tell the template's special tokens from those that users wrote.

    Args:
        template: The chat template.
        untrusted: Variables that users wrote: the messages, tools and documents.
        variables: All others.
        special: The special tokens by their text.

    Returns:
        The text, when every special token in it is the template's. Otherwise its parts: the
        template's special tokens, and the texts between them, to be read as plain text.

    Raises:
        TemplateError, InputError: As :func:`render`; also when a message spells a special token
            and the template is such that the two cannot be told apart.
    """
    now = time.time()
    trusted = _plain(variables, {})
    plain = _plain(untrusted, {})
    text = _checked(_render(template, {**plain, **trusted}, now))
    pattern = token_pattern(special)
    found = pattern.findall(text)
    if not found:
        return text
    written = "\0".join(_strings(plain))
    for characters in _hitting_sets(special):
        if not any(character in written for character in characters):
            return text
        stand_ins = _choose_stand_ins(characters, written + template)
        if stand_ins is None:
            continue
        marked = {**_plain(untrusted, str.maketrans(stand_ins)), **trusted}
        try:
            marked_text = _checked(_render(template, marked, now))
        except TemplateError:
            continue  # the template checks for the character that was replaced
        if _restore(marked_text, stand_ins) != text:
            continue
        if pattern.findall(marked_text) == found:
            return text
        return _split(marked_text, pattern, special, stand_ins)
    spelt = re.search(pattern.pattern, written, re.IGNORECASE)
    if spelt is None:
        return text
    raise TemplateError(
        f"a message spells a special token ({spelt[0]!r}), and this chat template rewrites"
        " messages in a way that hides who wrote it: remove the token's text"
    )


def _plain(value: Any, stand_ins: Mapping[int, str]) -> Any:
    """``value`` rebuilt of JSON's types, with characters of its strings replaced.

    Names that templates look up stay as they are: keys ("content"), and the role of a message.
    """
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return str(value).translate(stand_ins)
    if isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            is_role = key == "role" and str(item).isidentifier()
            name = _plain(key, {} if str(key).isidentifier() else stand_ins)
            result[name] = _plain(item, {} if is_role else stand_ins)
        return result
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [_plain(item, stand_ins) for item in value]
    raise InputError(
        f"chat templates take strings, numbers, lists and dicts, not {type(value).__name__}"
    )


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _hitting_sets(special: Mapping[str, AddedToken]) -> Iterator[set[str]]:
    """Sets of characters of which every special token has one, each of other characters if it can.

    With a letter goes its other case, so that a template that changes case cannot make a token.

    >>> list(_hitting_sets({"<s>": AddedToken("<s>"), "<|a|>": AddedToken("<|a|>")}))[:2]
    [{'<'}, {'>'}]
    """
    used: set[str] = set()
    for _ in range(_ATTEMPTS):
        chosen: set[str] = set()
        # Tokens that all their characters were tried of take part with all of them again.
        left = [set(token) - used or set(token) for token in special]
        while left:
            counts = Counter(character for characters in left for character in characters)
            best = max(counts, key=lambda character: (counts[character], -ord(character)))
            chosen.add(best)
            left = [characters for characters in left if best not in characters]
        used |= chosen
        yield {variant for c in chosen for variant in (c, *c.lower(), *c.upper())}


def _choose_stand_ins(characters: set[str], text: str) -> dict[str, str] | None:
    """A stand-in for each character, none of which the text holds, not even as a JSON escape."""
    folded = text.lower()
    free = [s for s in _STAND_INS if s not in text and _json_escape(s) not in folded]
    if len(free) < len(characters):
        return None
    return dict(zip(sorted(characters), free, strict=False))


def _json_escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _restore(text: str, stand_ins: Mapping[str, str]) -> str:
    for character, stand_in in stand_ins.items():
        text = text.replace(stand_in, character).replace(_json_escape(stand_in), character)
    return text


def _split(
    marked_text: str,
    pattern: re.Pattern[str],
    special: Mapping[str, AddedToken],
    stand_ins: Mapping[str, str],
) -> list[str | AddedToken]:
    parts: list[str | AddedToken] = []
    start = 0
    for match in pattern.finditer(marked_text):
        parts += [_restore(marked_text[start : match.start()], stand_ins), special[match[0]]]
        start = match.end()
    parts.append(_restore(marked_text[start:], stand_ins))
    return [part for part in parts if part != ""]


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise InputError("the conversation holds an unpaired surrogate") from failure
    return text
