"""Which columns of a table make the rows of a job, and which are copied to its output.

Templates over the columns make the prompts of the rows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from jaxllm.batch.rows import PROMPT_KEYS, ROW_KEYS
from jaxllm.common.arguments import checked_iterable, names_in
from jaxllm.common.cells import printable
from jaxllm.common.errors import DataError, InputError, TemplateError, listed, nearest, quoted
from jaxllm.common.files import names_file, read_text
from jaxllm.common.spelling import is_misspelt
from jaxllm.generation.settings.config import FIELDS
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
_TEXT_KEYS = frozenset({"id", "prompt", "completion", "regex", "grammar"})
"""Keys whose cells in a CSV file are texts, even where they look like numbers."""
FAILED = "failed_row"
"""Key of a row in the file of errors that has its number and its error."""


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


def generation_keys() -> frozenset[str]:
    """Keys of a row that generates: prompts, `id`, `seed`, and all generation fields."""
    return ROW_KEYS | FIELDS.keys()


@dataclasses.dataclass(frozen=True)
class ColumnChoice:
    """How the cells of a table become the keys of a row.

    A column is a key of the row if it has the name of one. Other columns are read by templates,
    copied to the output (`keep`), or left out.

    Attributes:
        keys: keys that the job reads.
        prompt: the column of the prompts: texts, lists of messages, or lists of token ids.
        completion: the column of the completions.
        template: makes the prompts, in place of a column.
        system_template: makes the system messages; the prompt is then a user message.
        keep: columns that the output has too, or "all".
        keep_prefix: put before their names.
    """

    keys: frozenset[str] = dataclasses.field(default_factory=generation_keys)
    prompt: str | None = None
    completion: str | None = None
    template: RowTemplate | None = None
    system_template: RowTemplate | None = None
    keep: tuple[str, ...] | Literal["all"] = ()
    keep_prefix: str = ""

    def __post_init__(self) -> None:
        names = self.prompt, self.completion, self.keep_prefix, *self.keep
        if wrong := [name for name in names if not isinstance(name, str | None)]:
            raise InputError(f"expected the name of a column, found {quoted(wrong[0])}")
        if "" in (self.prompt, self.completion):
            raise InputError("expected the name of a column, found an empty text")
        if self.template is not None and self.prompt is not None:
            raise InputError("--template cannot be combined with --prompt-column; remove one")
        if self.keep_prefix and not self.keep:
            raise InputError("--keep-prefix has no effect without --keep")

    @classmethod
    def of(
        cls,
        *,
        prompt_column: str | None = None,
        template: str | PathLike[str] | None = None,
        system_template: str | PathLike[str] | None = None,
        keep: Sequence[str] | Literal["all"] = (),
        keep_prefix: str = "",
    ) -> ColumnChoice:
        """The choice that the arguments of a Python call make; templates are texts or files."""
        if not isinstance(keep, str):
            keep = tuple(checked_iterable(keep, "keep", "columns"))
        return cls(
            prompt=prompt_column,
            template=row_template(template, "template"),
            system_template=row_template(system_template, "system_template"),
            keep=names_in(keep) if isinstance(keep, str) else keep,
            keep_prefix=keep_prefix,
        )

    @property
    def options(self) -> dict[str, Any]:
        """The options that are set, by their names, as JSON."""
        options = {
            "--prompt-column": self.prompt,
            "--completion-column": self.completion,
            "--template": self.template and self.template.source,
            "--system-template": self.system_template and self.system_template.source,
            "--keep": self.keep if isinstance(self.keep, str) else list(self.keep),
            "--keep-prefix": self.keep_prefix,
        }
        return {flag: value for flag, value in options.items() if value}

    def fields(self, columns: Sequence[str]) -> list[str]:
        """The columns that are keys of a row, of those that a table has."""
        replaced = {*self.template_settings, *(PROMPT_KEYS if self.prompt or self.template else ())}
        named = (self.prompt, self.completion)
        return [
            name
            for name in columns
            if name in named or (name in self.keys and name not in replaced)
        ]

    def used(self, columns: Sequence[str]) -> list[str]:
        """The columns that make the rows, of those that a table has.

        Raises:
            DataError: a column is missing, none has prompts, or the name of one is nearly that of
                a generation field.
        """
        for flag in ("--prompt-column", "--completion-column"):
            name = self.options.get(flag)
            if name is not None and name not in columns:
                raise DataError(f"{flag}: no column {name!r}; {nearest(name, columns)}")
        has_prompt = self.prompt or self.template or set(PROMPT_KEYS).intersection(columns)
        if not has_prompt:
            raise DataError(
                f"no column is called {' or '.join(PROMPT_KEYS)}; name the column of the prompts "
                "with --prompt-column, or write one from several columns with --template "
                f"(columns: {listed(columns)})"
            )
        used = set(self.fields(columns))
        for template in (self.template, self.system_template):
            used |= set(template.columns(columns) if template else ())
        for name in columns:
            if name not in used and (self.keep == "all" or name not in self.keep):
                self._check_spelling(name)
        return [name for name in columns if name in used]

    @property
    def template_names(self) -> set[str]:
        """The columns that templates name."""
        templates = (each for each in (self.template, self.system_template) if each)
        return {name for each in templates for name in each.names if name is not None}

    @property
    def template_settings(self) -> set[str]:
        """Names of settings that templates name: these columns are data of the prompt alone."""
        return self.template_names & (self.keys - {"id", *PROMPT_KEYS})

    def _check_spelling(self, name: str) -> None:
        settings = sorted(self.keys & FIELDS.keys())
        close = next((field for field in settings if is_misspelt(name, field)), None)
        if close and name not in self.keys:
            raise DataError(
                f"{name!r} is nearly the generation field {close!r}: rename it to that, or, if "
                f"it is data, name it in keep (--keep {name})"
            )

    def kept(self, columns: Sequence[str]) -> list[str]:
        """The columns that are copied to the output, of those that a table has.

        `id` is not among them, since every output has it. "all" leaves out what a file of errors
        adds.

        Raises:
            DataError: a column is missing.
        """
        if self.keep == "all":
            return [name for name in columns if name not in ("id", FAILED)]
        for name in self.keep:
            if name not in columns:
                raise DataError(f"--keep: no column {name!r}; {nearest(name, columns)}")
        return [name for name in columns if name in self.keep and name != "id"]

    def row(self, cells: Mapping[str, Any], *, are_texts: bool) -> dict[str, Any]:
        """The row of some cells; one without a value is as if the row had no such key.

        Args:
            are_texts: the cells are texts, of which those of fields are JSON or else text.

        Raises:
            DataError: the prompt or the completion is missing, or a template fails.

        >>> ColumnChoice(prompt="question").row({"question": "Why?", "top_k": "5"}, are_texts=True)
        {'prompt': 'Why?', 'top_k': 5}
        """
        row: dict[str, Any] = {}
        for name in self.fields(list(cells)):
            value = cells[name]
            if value is None or (are_texts and not value):
                continue
            key = "completion" if name == self.completion else name
            if name == self.prompt:
                key = _prompt_key(value)
            if are_texts and key not in _TEXT_KEYS:
                value = _json_or_text(value)
            # pandas writes integers as floats where a cell is empty
            row[key] = printable(value) if isinstance(value, float) else value
        if self.completion is not None and "completion" not in row:
            raise DataError(f"nothing in {self.completion!r}, the column of the completions")
        if self.template is not None:
            row["prompt"] = self.template.render(cells)
        elif not row.keys() & set(PROMPT_KEYS) and (self.prompt or "prompt") in cells:
            row["prompt"] = ""  # a line without text, which a translation keeps
        elif self.prompt is not None and not row.keys() & set(PROMPT_KEYS):
            raise DataError(f"nothing in {self.prompt!r}, the column of the prompts")
        if self.system_template is not None:
            row["messages"] = [
                {"role": "system", "content": self.system_template.render(cells)},
                *_messages_without_system(row),
            ]
            row.pop("prompt", None)
        return row


def _messages_without_system(row: Mapping[str, Any]) -> list[Any]:
    """The messages of a row to which a system message is added; a prompt is one of the user."""
    if isinstance(messages := row.get("messages"), list) and messages:
        if any(isinstance(each, Mapping) and each.get("role") == "system" for each in messages):
            raise DataError("messages: have a system message, but --system-template makes one too")
        return messages
    if not row.get("prompt"):
        raise DataError("no prompt, or an empty one, for the message of the user")
    return [{"role": "user", "content": row["prompt"]}]


def _prompt_key(prompt: object) -> str:
    """The key of a row under which such a prompt stands."""
    if not isinstance(prompt, list) or not prompt:
        return "prompt"
    return "messages" if isinstance(prompt[0], Mapping) else "input_ids"


def _json_or_text(cell: str) -> Any:
    """The value of a cell.

    >>> [_json_or_text(cell) for cell in ("0.5", "true", "[1, 2]", "never")]
    [0.5, True, [1, 2], 'never']
    """
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return cell
