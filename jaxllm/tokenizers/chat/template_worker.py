"""Worker program that renders chat templates; run by ``sandbox.py``.

It reads one JSON request per line on stdin and writes one JSON answer per line on stdout. Templates
are untrusted: Jinja's sandbox prevents access to Python objects, but not endless loops or memory
exhaustion. So the operating system enforces limits: a signal kills the process at the CPU limit,
and allocations beyond the memory limit raise MemoryError.

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
        signal.setitimer(signal.ITIMER_PROF, settings["cpu_seconds"])  # SIGPROF kills the process
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


def raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def tojson(
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


def namespace_class() -> Any:
    """Makes Jinja's ``namespace`` class, but rejecting names such as ``__class__``."""
    import jinja2
    from jinja2.utils import Namespace

    class SafeNamespace(Namespace):
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

    return SafeNamespace


def environment() -> Any:
    """Makes the Jinja environment in which transformers renders chat templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks the assistant's text for training; here its body is output."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    result = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    result.filters["tojson"] = tojson
    result.globals["raise_exception"] = raise_exception
    result.globals["namespace"] = namespace_class()
    return result


if __name__ == "__main__":
    main()
