"""Runs the Python of a Markdown page as it stands."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any


def run_python(page: Path, **names: Any) -> tuple[dict[str, Any], str]:
    """Runs the Python blocks of a page in order, in one namespace that begins with `names`.

    Returns:
        The namespace, and what was printed.
    """
    text, printed = page.read_text(encoding="utf-8"), io.StringIO()
    namespace: dict[str, Any] = {"__name__": page.stem.lower(), **names}
    with contextlib.redirect_stdout(printed):
        for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(page), "exec")  # tracebacks name the line
            exec(code, namespace)
    return namespace, printed.getvalue()
