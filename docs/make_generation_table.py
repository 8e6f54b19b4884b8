"""Writes the table of fields in docs/generation.md from the declarations of GenerationConfig."""

from __future__ import annotations

from pathlib import Path

from jaxllm.generation.settings.config import FIELDS

DOC = Path(__file__).with_name("generation.md")
START, END = "<!-- fields -->\n", "<!-- /fields -->\n"


def table() -> str:
    """One row per field: default, and meaning with the only values that do not raise."""
    rows = ["| field | default | what it does |", "|---|---|---|"]
    for name, field in FIELDS.items():
        notes = [f"needs {field.needs_text}"] if field.needs else []
        if field.supported is not None:
            supported = ", ".join(f"`{value!r}`" for value in field.supported)
            notes.append(f"only {supported}" + (", except in a file" if field.execution else ""))
        note = f" ({'; '.join(notes)})" if notes else ""
        rows.append(f"| `{name}` | `{field.default!r}` | {field.doc}{note} |")
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """The document with the current table."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + table() + END + after


if __name__ == "__main__":
    DOC.write_text(rewritten(DOC.read_text()))
