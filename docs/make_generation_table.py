"""Writes the table of fields in docs/generation.md from the declarations of GenerationConfig."""

from __future__ import annotations

from pathlib import Path

from jaxllm.generation.settings.config import FIELDS

DOC = Path(__file__).with_name("generation.md")
START, END = "<!-- fields -->\n", "<!-- /fields -->\n"


def table() -> str:
    """One row per field that acts, then the fields with one value, and those without effect."""
    rows = ["| field | default | what it does |", "|---|---|---|"]
    fixed: list[str] = []
    for name, field in FIELDS.items():
        if field.supported is not None and all(not x or x is True for x in field.supported):
            fixed.append(f"`{name}`" + ("" if field.execution else " (in a file too)"))
        elif not field.metadata:
            notes = [f"needs {field.needs_text}"] if field.needs else []
            if field.supported is not None:
                notes.append("only " + ", ".join(f"`{value!r}`" for value in field.supported))
            note = f" ({'; '.join(notes)})" if notes else ""
            rows.append(f"| `{name}` | `{field.default!r}` | {field.doc}{note} |")
    ignored = [f"`{name}`" for name, field in FIELDS.items() if field.metadata]
    rows += ["", f"Fields for which a call accepts only the default: {', '.join(fixed)}."]
    rows += ["", f"Fields without effect: {', '.join(ignored)}."]
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """The document with the current table."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + table() + END + after


if __name__ == "__main__":
    DOC.write_text(rewritten(DOC.read_text()))
