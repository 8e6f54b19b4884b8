"""Writes the table of fields in docs/generation.md from the declarations of GenerationConfig."""

from __future__ import annotations

from pathlib import Path

from jaxllm.generation.settings.config import FIELDS

DOC = Path(__file__).with_name("generation.md")
START, END = "<!-- fields -->\n", "<!-- /fields -->\n"


def table() -> str:
    """One row per field: default, meaning, and values that raise."""
    rows = ["| field | default | what it does | values that raise |", "|---|---|---|---|"]
    for name, field in FIELDS.items():
        if field.supported is None:
            raises = ""
        else:
            raises = "all but " + ", ".join(f"`{value!r}`" for value in field.supported)
            raises += " (in a file: no effect)" if field.execution else ""
        needs = f" (needs {field.needs_text})" if field.needs else ""
        rows.append(f"| `{name}` | `{field.default!r}` | {field.doc}{needs} | {raises} |")
    return "\n".join(rows) + "\n"


def rewritten(text: str) -> str:
    """The document with the current table."""
    before, rest = text.split(START)
    after = rest.split(END)[1]
    return before + START + table() + END + after


if __name__ == "__main__":
    DOC.write_text(rewritten(DOC.read_text()))
