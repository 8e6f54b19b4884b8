"""Templates over the columns of a table, which make the prompts of its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.errors import DataError, InputError, TemplateError, nearest, quoted
from jaxllm.common.files import names_file, read_text
from jaxllm.tokenizers.chat_templates import (
    MAX_TEMPLATE_BYTES,
    parse_row_template,
    render_row_template,
)

ROW = "row"
"""The variable of a template that holds all cells by column: `row["any name"]`."""


class RowTemplate:
    """A Jinja template whose variables are the columns of a table.

    It runs in the sandbox of chat templates. `row["any name"]` is the cell of a column whose name
    is no identifier. An empty cell is an empty text.

    Args:
        source: text of the template.
        field: the option or field that has it, for messages.

    Raises:
        InputError: the template is no valid Jinja, or has no variable.

    >>> template = RowTemplate("{{ question }} ({{ row['asked by'] }})", "--template")
    >>> template.render({"question": "Why?", "asked by": None})
    'Why? ()'
    """

    def __init__(self, source: str, field: str) -> None:
        self.source, self.field = source, field
        try:
            self._tree, self._globals = parse_row_template(source)
        except TemplateError as error:
            raise InputError(f"{field}: {error}") from None
        if not self.names.keys() - self._globals:
            raise InputError(
                f"{field}: {source!r:.60} names no column; write one as in "
                "'Question: {{ question }}', or name a file that holds a template"
            )

    def columns(self, available: Iterable[str]) -> list[str]:
        """The columns that the template reads, of those that a table has.

        Raises:
            DataError: the table lacks a column, and the template does not allow for that with
                `is defined` or `default()`.
        """
        available = list(available)
        used = self.names
        for name, is_optional in used.items():
            if name is not None and name not in available and not is_optional:
                raise DataError(f"{self.field}: no column {name!r}; {nearest(name, available)}")
        if None in used:  # `row` as a whole
            return available
        return [name for name in available if name in used]

    def render(self, cells: Mapping[str, Any]) -> str:
        """The text of a row.

        Raises:
            DataError: the template fails, or a column is missing in this row.
        """
        texts = {name: "" if cell is None else cell for name, cell in cells.items()}
        try:
            return render_row_template(self.source, {**texts, ROW: texts})
        except TemplateError as error:
            raise DataError(f"{self.field}: {error}") from None

    @cached_property
    def names(self) -> dict[str | None, bool]:
        """Columns of the template, None for all of them, and whether each may be missing."""
        names: dict[str | None, bool] = {}
        for node, is_optional in _references(self._tree, self._globals):
            name = _column(node)
            # A column goes before what Jinja calls by its name, such as `range`.
            is_global = getattr(node, "name", None) in self._globals
            names[name] = names.get(name, False) or is_optional or is_global
        return names


def template_text(text: str | PathLike[str]) -> str:
    """The text of a template, or of the file that a path or a text names.

    Raises:
        InputError: the file is too large or cannot be read.
    """
    if isinstance(text, str) and not names_file(text):
        return text
    return read_text(Path(text), max_bytes=MAX_TEMPLATE_BYTES, error=InputError)


def row_template(text: str | PathLike[str] | None, field: str) -> RowTemplate | None:
    """The template of an option, from its text or from the file that it names."""
    if not isinstance(text, str | PathLike | None):
        raise InputError(f"{field}: expected a text or a file, found {quoted(text)}")
    return None if text is None else RowTemplate(template_text(text), field)


def _references(tree: Any, global_names: frozenset[str]) -> Iterator[tuple[Any, bool]]:
    """Expressions that stand for a column, and whether the template asks if it exists."""
    from jinja2 import meta, nodes

    undeclared = meta.find_undeclared_variables(tree) | global_names
    guards = [
        *(test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")),
        *(part.node for part in tree.find_all(nodes.Filter) if part.name in ("default", "d")),
    ]
    cells = [
        node
        for node in tree.find_all((nodes.Getitem, nodes.Getattr))
        if getattr(node.node, "name", None) == ROW and _column(node) is not None
    ]
    within = [node.node for node in cells]
    for node in (*cells, *tree.find_all(nodes.Name)):
        is_column = not isinstance(node, nodes.Name) or node.name in undeclared
        if is_column and not any(node is each for each in within):
            yield node, any(node is guard for guard in guards)


def _column(node: Any) -> str | None:
    """The column for which an expression stands; None for all of them, or for one that only
    rendering tells."""
    from jinja2 import nodes

    if isinstance(node, nodes.Name):
        return None if node.name == ROW else node.name
    if isinstance(node, nodes.Getattr):
        return None if hasattr(dict, node.attr) else node.attr
    name = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return name if isinstance(name, str) else None
