"""The README's Python runs as it stands, in order, in one process."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
from paths import ROOT

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


@pytest.mark.ci
def test_python_blocks_run(smollm2_gguf: Path) -> None:
    namespace: dict[str, object] = {"__name__": "readme"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in re.finditer(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL):
            line = TEXT.count("\n", 0, block.start(1))
            code = compile("\n" * line + block[1], str(README), "exec")  # tracebacks name the line
            exec(code, namespace)
    answer, streamed, samples, *_ = printed.getvalue().splitlines()
    assert answer == streamed == "The capital of France is Paris."
    assert samples == "4"
    assert "[[-inf   6.   4.]]" in printed.getvalue()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link: str) -> None:
    assert link.startswith("https://") or (README.parent / link).exists()
