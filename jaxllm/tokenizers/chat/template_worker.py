"""The process in which chat templates are rendered: a program of its own, run by ``sandbox.py``.

It reads one request a line on stdin and writes one answer a line on stdout, both JSON. A template
may come from a stranger, and Jinja's sandbox keeps it from reaching Python objects but not from
looping for ever or filling the memory. So the operating system holds the limits: past the CPU
time the process is killed by a signal, past the memory it gets MemoryError.

The environment is that of transformers' ``apply_chat_template``. Only the standard library and
Jinja are imported here, to start fast.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    sys.path[:] = settings["path"]
    compile_template = lru_cache(maxsize=16)(environment().from_string)
    limit = settings["memory_bytes"]
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])  # SIGPROF kills when it rings
        try:
            request = json.loads(line)
            now = datetime.fromtimestamp(request["now"])
            variables = {"strftime_now": now.strftime, **request["variables"]}
            template = compile_template(request["template"])
            answer = {"text": collect(template, variables, settings["output_characters"])}
        except MemoryError:
            answer = {"error": f"it needs more than {limit} bytes of memory"}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:2000]}
        encoded = json.dumps(answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(encoded, file=answers, flush=True)


def collect(template: Any, variables: dict[str, Any], limit: int) -> str:
    pieces = []
    length = 0
    for piece in template.generate(variables):
        length += len(piece)
        if length > limit:
            raise ValueError(f"its output exceeds {limit} characters")
        pieces.append(piece)
    return "".join(pieces)


def environment() -> Any:
    """The Jinja environment in which transformers renders chat templates."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's words for training; here its body is text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class SafeNamespace(Namespace):
        """A namespace that stores no name of Python's own, such as ``__class__``."""

        def __init__(*args: Any, **kwargs: Any) -> None:
            self, values = args[0], dict(*args[1:], **kwargs)
            for name in values:
                SafeNamespace.check(name)
            Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            SafeNamespace.check(name)
            Namespace.__setitem__(self, name, value)

        @staticmethod
        def check(name: Any) -> None:
            if not isinstance(name, str) or name.startswith("_"):
                raise jinja2.TemplateRuntimeError(f"a namespace cannot store {name!r}")

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """Jinja's own filter of this name also escapes HTML."""
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    result.filters["tojson"] = tojson
    result.globals["raise_exception"] = raise_exception
    result.globals["namespace"] = SafeNamespace
    return result


if __name__ == "__main__":
    main()
