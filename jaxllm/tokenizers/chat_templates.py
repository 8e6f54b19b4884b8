"""Renders chat templates so that messages cannot inject special tokens.

A template writes ``<|im_end|>`` to end a turn; a user who types the same characters must not end
it. To distinguish them, the conversation is rendered twice: unchanged, and with one character of
every special token (``<`` for most) replaced by a placeholder in all user input. Special tokens in
the second text are the template's own. Placeholders are single characters, so that trimming,
slicing and length tests give the same result. Both texts must be equal after the placeholders are
replaced back; if not (the template tests for that character), another character is tried.

The text itself is unchanged: for messages without special tokens the ids are those of the whole
text, as in transformers.

With `continue_final_message` a chat ends inside its last message, for the model to go on. As in
transformers, a tag after the message's text marks where the rendered chat is cut.

Templates are rendered in Jinja's sandbox, which keeps them from Python's objects, and so from files
and code, and the size of their output is limited. A template can still waste time and memory of the
process: a library trusts its caller, who chose the model. The server renders in a process with
limits (`serve/text_worker.py`), since its clients are strangers.
"""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jaxllm.common.cells import cell_text
from jaxllm.common.errors import InputError, TemplateError, shortened
from jaxllm.tokenizers.added_tokens import AddedToken, TokenFinder

TAG = "CONTINUE_FINAL_MESSAGE_TAG "
CALLED = "_jinja_"
"""Prefix of the names of functions and methods that a template over columns calls."""
MAX_TEMPLATE_BYTES = 64 * 2**10
MAX_OUTPUT_CHARACTERS = 2**20
_PLACEHOLDERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # Unicode noncharacters
MARKS = "\U0001fffe\U0001ffff"
"""Characters before and after the text that a template marks; Unicode noncharacters too."""
_ATTEMPTS = 6
_MAX_DEPTH = 100
_MAX_VALUES = 2**18


def tagged(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, with the tag at the end of the last one's text."""
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


def prepare(template: str, special: Iterable[str]) -> None:
    """Compiles a chat template and what finds special tokens, for processes that are forked later.

    Raises:
        TemplateError: the template's syntax is wrong, or it is too long.
    """
    parse_chat_template(template)
    _compiled(template, False)
    _token_finder(tuple(special))


def render(template: str, variables: Mapping[str, Any], *, with_marks: bool = False) -> str:
    """Renders a chat template.

    Args:
        with_marks: put the two characters of `MARKS` around the text that the template marks with
            ``{% generation %}``.

    Raises:
        InputError: a message holds one of these characters.
    """
    strings: list[str] = []
    values = _json_values(variables, {}, strings)
    if with_marks and any(mark in text for text in strings for mark in MARKS):
        raise InputError("the conversation holds a Unicode noncharacter (U+1FFFE or U+1FFFF)")
    return _check_unicode(render_in_sandbox(template, values, time.time(), with_marks=with_marks))


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
    """
    now = time.time()
    trusted = _json_values(variables, {})
    strings: list[str] = []
    plain = _json_values(untrusted, {}, strings)
    text = _check_unicode(render_in_sandbox(template, {**plain, **trusted}, now))
    finder = _token_finder(tuple(special))
    special_tokens = finder.find_all(text)
    if not special_tokens:
        return text
    user_text = "\0".join(strings)
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


def _json_values(
    value: object, placeholders: Mapping[int, str], strings: list[str] | None = None
) -> Any:
    """Converts a value to JSON types, replacing characters in its strings.

    Names that templates look up are unchanged: keys ("content"), and the role of a message. The
    strings, as they were, are added to the list `strings`.
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
            if strings is not None:
                strings.append(str(value))
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


def render_in_sandbox(
    template: str, variables: Mapping[str, Any], now: float, *, with_marks: bool = False
) -> str:
    """Renders a chat template.

    Args:
        template: Jinja source, at most 64 KiB.
        variables: JSON values.
        now: time for ``strftime_now``, in seconds since 1970.
        with_marks: as `render`.
    """
    values = {"strftime_now": datetime.fromtimestamp(now).strftime, **variables}
    return _render(template, values, "the chat template", with_marks=with_marks)


def render_row_template(template: Any, variables: Mapping[str, Any]) -> str:
    """Renders a template over the columns of a table; a variable that is missing is an error.

    Args:
        template: of `compile_row_template`.
    """
    return _render(template, variables, "the template")


def compile_row_template(tree: Any) -> Any:
    """The template of a syntax tree over columns."""
    return _environment(strict=True).from_string(tree)


def parse_chat_template(template: str) -> Any:
    """The syntax tree of a chat template, with `MARKS` as texts.

    Raises:
        TemplateError: its syntax is wrong, or it is too long.
    """
    return _parse(template, "the chat template", _environment(strict=False, with_marks=True))


def parse_row_template(template: str) -> tuple[Any, frozenset[str]]:
    """The syntax tree of a template over columns, and the names that every template has."""
    environment = _environment(strict=True)
    names = frozenset(name for name in environment.globals if not name.startswith(CALLED))
    return _parse(template, "the template", environment), names


def _parse(template: str, what: str, environment: Any) -> Any:
    import jinja2

    _check_size(template, what)
    try:
        environment.compile(template)  # also finds unknown filters and tests
        return environment.parse(template)
    except jinja2.TemplateSyntaxError as error:
        message = shortened(str(error.message), 300)
        raise TemplateError(f"{what} is wrong in line {error.lineno}: {message}") from None


def _render(
    template: Any, variables: Mapping[str, Any], what: str, *, with_marks: bool = False
) -> str:
    is_source = isinstance(template, str)
    if is_source:
        _check_size(template, what)
    try:
        return _collect(_compiled(template, with_marks) if is_source else template, variables)
    except Exception as error:  # of the template, Jinja or the limits
        message = shortened(f"{type(error).__name__}: {error}", 300)
        raise TemplateError(f"{what} failed: {message}") from None


def _check_size(template: str, what: str) -> None:
    size = len(template.encode("utf-8", "surrogatepass"))
    if size > MAX_TEMPLATE_BYTES:
        raise TemplateError(f"{what} has {size} bytes, but at most {MAX_TEMPLATE_BYTES} are taken")


def _collect(template: Any, variables: Mapping[str, Any]) -> str:
    pieces, length = [], 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > MAX_OUTPUT_CHARACTERS:
            raise ValueError(f"its output exceeds {MAX_OUTPUT_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=16)
def _compiled(template: str, with_marks: bool, /) -> Any:
    return _environment(strict=False, with_marks=with_marks).from_string(template)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's ``tojson`` filter, which also escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@cache
def _environment(*, strict: bool, with_marks: bool = False) -> Any:
    """The Jinja environment in which transformers renders chat templates.

    Args:
        strict: the environment of templates over columns. A missing variable and a method that is
            not called are errors where they are used, and values are printed as cells are. In chat
            templates a missing variable is an empty text.
        with_marks: as `render`.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            if with_marks:
                start, end = (nodes.Output([nodes.TemplateData(mark)]) for mark in MARKS)
                body = [start, *body, end]
            return nodes.Scope(body).set_lineno(line)

    class SafeNamespace(Namespace):
        """Jinja's ``namespace`` without names such as ``__class__``."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, values = args[0], dict(*args[1:], **kwargs)
            for name in values:
                SafeNamespace.check(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: object) -> None:
            SafeNamespace.check(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name: object) -> None:
            if not isinstance(name, str) or name.startswith("_"):
                raise jinja2.TemplateRuntimeError(f"a namespace cannot store {name!r}")

    class RowSandbox(ImmutableSandboxedEnvironment):
        """Keys come before attributes, and methods are found only to be called."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if attribute.startswith(CALLED):
                return super().getattr(obj, attribute.removeprefix(CALLED))
            return self.getitem(obj, attribute)

        def getitem(self, obj: Any, argument: Any) -> Any:
            return checked(super().getitem(obj, argument), f"{argument!r} is a method")

    def checked(value: Any, what: str = "this is a function") -> Any:
        if callable(value) and not isinstance(value, jinja2.Undefined):
            raise jinja2.TemplateRuntimeError(f"{what}; call it with ()")
        return value

    def printed(value: Any) -> Any:
        return value if isinstance(checked(value), jinja2.Undefined) else cell_text(value)

    result = (RowSandbox if strict else ImmutableSandboxedEnvironment)(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
        finalize=printed if strict else None,
    )
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise_exception
    result.globals["namespace"] = SafeNamespace
    if strict:
        result.globals.update({CALLED + name: each for name, each in result.globals.items()})
    return result
