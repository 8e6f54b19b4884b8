"""Renders Jinja templates in Jinja's sandbox, as transformers' `apply_chat_template` does.

The sandbox keeps a template from Python's objects, and so from files and code, and the size of its
output is limited. A template can still waste time and memory of the process: a library trusts its
caller, who chose the model. The server renders in a process with limits (`serve/text_worker.py`),
since its clients are strangers.

Which text is rendered is decided in `chat_templates.py`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

from jaxllm.common.errors import TemplateError, shortened

MAX_TEMPLATE_BYTES = 64 * 2**10
MAX_OUTPUT_CHARACTERS = 2**20


def render_in_sandbox(template: str, variables: Mapping[str, Any], now: float) -> str:
    """Renders a chat template.

    Args:
        template: Jinja source, at most 64 KiB.
        variables: JSON values.
        now: time for ``strftime_now``, in seconds since 1970.
    """
    clock = {"strftime_now": datetime.fromtimestamp(now).strftime}
    return _render(template, {**clock, **variables}, "the chat template", strict=False)


def render_row_template(template: str, variables: Mapping[str, Any]) -> str:
    """Renders a template over the columns of a table; a variable that is missing is an error."""
    return _render(template, variables, "the template", strict=True)


def parse_row_template(template: str) -> tuple[Any, frozenset[str]]:
    """The syntax tree of a template over columns, and the names that every template has."""
    import jinja2

    _check_size(template, "the template")
    environment = _environment(strict=True)
    try:
        environment.compile(template)  # also finds unknown filters and tests
        return environment.parse(template), frozenset(environment.globals)
    except jinja2.TemplateSyntaxError as error:
        message = shortened(str(error.message), 300)
        raise TemplateError(f"the template is wrong in line {error.lineno}: {message}") from None


def _render(template: str, variables: Mapping[str, Any], what: str, *, strict: bool) -> str:
    _check_size(template, what)
    try:
        return _collect(_compiled(template, strict), variables)
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
def _compiled(template: str, strict: bool) -> Any:
    return _environment(strict=strict).from_string(template)


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
def _environment(*, strict: bool) -> Any:
    """The Jinja environment in which transformers renders chat templates.

    Args:
        strict: a missing variable is an error where it is used; otherwise it is an empty text.
    """
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here its body is output."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
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

    result = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, loopcontrols],
        undefined=jinja2.StrictUndefined if strict else jinja2.Undefined,
    )
    result.filters["tojson"] = _tojson
    result.globals["raise_exception"] = _raise_exception
    result.globals["namespace"] = SafeNamespace
    return result
