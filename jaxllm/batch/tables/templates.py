"""Templates over the columns of a table, which make the prompts of its rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.cells import printable
from jaxllm.common.errors import DataError, InputError, TemplateError, nearest, quoted
from jaxllm.common.files import names_file, read_text
from jaxllm.tokenizers.chat_templates import (
    CALLED,
    MAX_TEMPLATE_BYTES,
    compile_row_template,
    parse_row_template,
    render_row_template,
)

ROW = "row"
"""The variable of a template that holds all cells by column: `row["any name"]`."""
_COLUMN = "_jinja_column_"
"""Prefix of second names: of `row`, which no column can replace, and of the columns `self` and
`loop`, which Jinja cannot replace."""


class _AllCells(dict[str, Any]):
    """The cells of a row by column. A key that is no column belongs to the cell of the column
    `row`, if the table has one."""

    def __missing__(self, key: Any) -> Any:
        if ROW not in self:
            raise KeyError(key)
        return self[ROW][key]


class RowTemplate:
    """A Jinja template whose variables are the columns of a table.

    It runs in the sandbox of chat templates. `row["any name"]` is the cell of a column whose name
    is no identifier. An empty cell is an empty text, and a float that is a whole number is printed
    without ".0". A column comes before whatever Jinja or `dict` have by its name, except where the
    template calls it, as in `row.items()`.

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
        from jinja2 import nodes  # slow to import

        self.source, self.field = source, field
        try:
            tree, global_names = parse_row_template(source)
        except TemplateError as error:
            raise InputError(f"{field}: {error}") from None
        _put_columns_first(tree, global_names)
        self.names: dict[str | None, bool] = {}
        """Columns of the template, None for all of them, and whether each may be missing."""
        self._of_row: set[str | None] = set()
        for node, is_optional in _references(tree, global_names):
            name = _column(node)
            self.names[name] = self.names.get(name, False) or is_optional
            if not isinstance(node, nodes.Name):
                self._of_row.add(name)
        if not self.names:
            raise InputError(
                f"{field}: {source!r:.60} names no column; write one as in "
                "'Question: {{ question }}', or name a file that holds a template"
            )
        self._template = compile_row_template(tree)

    def columns(self, available: Iterable[str]) -> list[str]:
        """The columns that the template reads, of those that a table has.

        Raises:
            DataError: the table lacks a column, and the template does not allow for that with
                `is defined` or `default()`.
        """
        available = list(available)
        known = {None, ROW, *available, *(self._of_row if ROW in available else ())}
        for name, is_optional in self.names.items():
            if name not in known and not is_optional:
                raise DataError(
                    f"{self.field}: no column {name!r}; {nearest(str(name), available)}"
                )
        return [name for name in available if self._reads(name, available)]

    def _reads(self, name: str, available: Collection[str]) -> bool:
        """Whether the template may read a column of a table with the columns `available`."""
        reads_all = None in self.names or (ROW in self.names and ROW not in available)
        return reads_all or name in self.names or (name == ROW and bool(self._of_row))

    def render(self, cells: Mapping[str, Any]) -> str:
        """The text of a row.

        Raises:
            DataError: the template fails, or a column is missing in this row or cannot be read.
        """
        read = {name: cells[name] for name in cells if self._reads(name, cells)}
        texts = _AllCells({n: "" if x is None else printable(x) for n, x in read.items()})
        others = {_COLUMN + name: texts[name] for name in ("self", "loop") if name in texts}
        variables = {ROW: texts, **texts, **others, _COLUMN + ROW: texts}
        try:
            return render_row_template(self._template, variables)
        except TemplateError as error:
            raise DataError(f"{self.field}: {error}") from None


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


def _put_columns_first(tree: Any, global_names: frozenset[str]) -> None:
    """Renames what a template reads, so that columns come before the names of Jinja and `dict`.

    A function or a method that is called, `loop` where its attributes are read, and a name that
    the template sets itself keep Jinja's meaning.
    """
    from jinja2 import nodes

    own = _own_names(tree)
    called = [each.node for each in tree.find_all(nodes.Call)]
    lookups: list[Any] = [*tree.find_all((nodes.Getattr, nodes.Getitem))]
    of_jinja = [each.node for each in (*lookups, *tree.find_all(nodes.Assign))] + called
    for node in lookups:
        is_called = any(node is each for each in called) and isinstance(node, nodes.Getattr)
        holder: Any = node.node
        is_row = isinstance(holder, nodes.Name) and holder.name == ROW and ROW not in own
        if is_row and (not is_called or hasattr(dict, node.attr)):
            holder.name = _COLUMN + ROW
        if is_called:
            node.attr = CALLED + node.attr
    for node in tree.find_all(nodes.Name):
        if node.name in own:
            continue
        if node.name in global_names and any(node is each for each in called):
            node.name = CALLED + node.name
        is_loop = node.name == "loop" and not any(node is each for each in of_jinja)
        if node.name == "self" or is_loop:
            node.name = _COLUMN + node.name


def _own_names(tree: Any) -> set[str]:
    """The names that a template sets itself."""
    from jinja2 import nodes

    names = [each for each in tree.find_all(nodes.Name) if each.ctx != "load"]
    return {each.name for each in (*names, *tree.find_all(nodes.Macro))}


def _references(tree: Any, global_names: frozenset[str]) -> Iterator[tuple[Any, bool]]:
    """Expressions that stand for a column, and whether the template asks if it exists."""
    from jinja2 import meta, nodes

    undeclared = meta.find_undeclared_variables(tree) | (global_names - _own_names(tree))
    guards = [
        *(test.node for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")),
        *(part.node for part in tree.find_all(nodes.Filter) if part.name in ("default", "d")),
    ]
    cells = [
        node
        for node in tree.find_all((nodes.Getitem, nodes.Getattr))
        if getattr(node.node, "name", None) == _COLUMN + ROW and _column(node) is not None
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
        return None if node.name == _COLUMN + ROW else node.name.removeprefix(_COLUMN)
    if isinstance(node, nodes.Getattr):
        return None if node.attr.startswith(CALLED) else node.attr
    name = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return name if isinstance(name, str) else None
