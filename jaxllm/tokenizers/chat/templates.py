"""Renders chat templates so that messages cannot inject special tokens.

A template writes ``<|im_end|>`` to end a turn; a user who types the same characters must not end
it. To distinguish them, the conversation is rendered twice: unchanged, and with one character of
every special token (``<`` for most) replaced by a placeholder in all user input. Special tokens in
the second text are the template's own. Placeholders are single characters, so that trimming,
slicing and length tests give the same result. Both texts must be equal after the placeholders are
replaced back; if not (the template tests for that character), another character is tried.

The text itself is unchanged: for messages without special tokens the ids are those of the whole
text, as in transformers.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from jaxllm.common.errors import InputError, TemplateError
from jaxllm.tokenizers.added_tokens import TokenFinder
from jaxllm.tokenizers.chat.sandbox import render_in_sandbox
from jaxllm.tokenizers.settings import AddedToken

_PLACEHOLDERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters
_ATTEMPTS = 6
_MAX_DEPTH = 100
_MAX_VALUES = 2**18


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a chat template.

    Raises:
        TemplateError: the template is too large, too expensive, or failed.
        InputError: a variable is not a JSON value.
    """
    return _check_unicode(render_in_sandbox(template, _json_values(variables, {}), time.time()))


def render_parts(
    template: str,
    untrusted: Mapping[str, Any],
    variables: Mapping[str, Any],
    special: Mapping[str, AddedToken],
) -> str | list[str | AddedToken]:
    """Renders a template, separating its special tokens from those in user input.

    Args:
        template: the chat template.
        untrusted: user input: messages, tools and documents.
        variables: all other variables.
        special: special tokens by text.

    Returns:
        The text, if all special tokens in it are the template's. Otherwise its parts: the
        template's special tokens, and the plain texts between them.

    Raises:
        TemplateError, InputError: as :func:`render`; also if a special token in a message cannot be
            separated from the template's.
    """
    now = time.time()
    trusted = _json_values(variables, {})
    plain = _json_values(untrusted, {})
    text = _check_unicode(render_in_sandbox(template, {**plain, **trusted}, now))
    finder = _token_finder(tuple(special))
    special_tokens = finder.find_all(text)
    if not special_tokens:
        return text
    user_text = "\0".join(_strings(plain))
    for characters in _hitting_sets(special):
        if not any(character in user_text for character in characters):
            return text
        placeholders = _choose_placeholders(characters, user_text + template)
        if placeholders is None:
            continue
        marked = {**_json_values(untrusted, str.maketrans(placeholders)), **trusted}
        try:
            marked_text = _check_unicode(render_in_sandbox(template, marked, now))
        except TemplateError:
            continue  # the template checks for the character that was replaced
        if _restore(marked_text, placeholders) != text:
            continue
        if finder.find_all(marked_text) == special_tokens:
            return text
        return _split(marked_text, finder, special, placeholders)
    folded = user_text.encode("utf-8", "replace").decode().casefold()
    spelled = TokenFinder(token.casefold() for token in special).find_all(folded)
    if not spelled:
        return text
    raise TemplateError(
        f"a message spells a special token ({spelled[0]!r}), and this chat template rewrites"
        " messages in a way that hides who wrote it: remove the token's text"
    )


@lru_cache(maxsize=8)
def _token_finder(tokens: tuple[str, ...]) -> TokenFinder:
    return TokenFinder(tokens)


def _json_values(value: object, placeholders: Mapping[int, str]) -> Any:
    """Converts a value to JSON types, replacing characters in its strings.

    Names that templates look up are unchanged: keys ("content"), and the role of a message.

    Raises:
        InputError: a value of another type, one that contains itself, or more than 2**18.
    """
    counter = itertools.count(1)

    def convert(value: object, placeholders: Mapping[int, str], depth: int) -> Any:
        if depth > _MAX_DEPTH or next(counter) > _MAX_VALUES:
            raise InputError(
                f"chat messages: lists and dicts are nested more than {_MAX_DEPTH} levels deep, or"
                f" hold more than {_MAX_VALUES} values: does one contain itself?"
            )
        if isinstance(value, int) and value.bit_length() > 1024:
            raise InputError("chat messages: a number of more than 1024 bits")
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return str(value).translate(placeholders)
        if isinstance(value, Mapping):
            result = {}
            for key, item in value.items():
                if not (key is None or isinstance(key, str | bool | int | float)):
                    raise InputError(f"chat messages: a dict has the key {str(key)[:40]!r}")
                is_role = key == "role" and str(item).isidentifier()
                name = convert(key, {} if str(key).isidentifier() else placeholders, depth)
                result[name] = convert(item, {} if is_role else placeholders, depth + 1)
            return result
        if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
            return [convert(item, placeholders, depth + 1) for item in value]
        raise InputError(
            f"chat templates take strings, numbers, lists and dicts, not {type(value).__name__}"
        )

    return convert(value, placeholders, 0)


def _strings(value: object) -> Iterator[str]:
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
    """Yields sets of characters that hit every special token; disjoint where possible.

    Letters are included in both cases, so that a template that changes case cannot make a token.

    >>> list(_hitting_sets({"<s>": AddedToken("<s>"), "<|a|>": AddedToken("<|a|>")}))[:2]
    [{'<'}, {'>'}]
    """
    used: set[str] = set()
    for _ in range(_ATTEMPTS):
        chosen: set[str] = set()
        # A token whose characters are all used may use any of them again.
        remaining = [set(token) - used or set(token) for token in special]
        while remaining and len(chosen) <= len(_PLACEHOLDERS):
            counts = Counter(character for characters in remaining for character in characters)
            best = max(counts, key=lambda character: (counts[character], -ord(character)))
            chosen.add(best)
            remaining = [characters for characters in remaining if best not in characters]
        used |= chosen
        if remaining:  # more characters than there are placeholders
            continue
        yield {variant for c in chosen for variant in (c, *c.lower(), *c.upper())}


def _choose_placeholders(characters: set[str], text: str) -> dict[str, str] | None:
    """Chooses a placeholder for each character, absent from the text even as a JSON escape."""
    folded = text.lower()
    free = [s for s in _PLACEHOLDERS if s not in text and _json_escape(s) not in folded]
    if len(free) < len(characters):
        return None
    return dict(zip(sorted(characters), free, strict=False))


def _json_escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _restore(text: str, placeholders: Mapping[str, str]) -> str:
    for character, placeholder in placeholders.items():
        text = text.replace(placeholder, character).replace(_json_escape(placeholder), character)
    return text


def _split(
    marked_text: str,
    finder: TokenFinder,
    special: Mapping[str, AddedToken],
    placeholders: Mapping[str, str],
) -> list[str | AddedToken]:
    parts: list[str | AddedToken] = []
    start = 0
    for token_start, end in finder.spans(marked_text):
        text = _restore(marked_text[start:token_start], placeholders)
        parts += [text, special[marked_text[token_start:end]]]
        start = end
    parts.append(_restore(marked_text[start:], placeholders))
    return [part for part in parts if part != ""]


def _check_unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as failure:
        raise InputError("the conversation holds an unpaired surrogate") from failure
    return text
