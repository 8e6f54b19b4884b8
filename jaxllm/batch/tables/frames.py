"""Data frames as tables, and outputs as data frames of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.batch.tables.table import ArrowTable, Table
from jaxllm.common.errors import InputError, quoted, shortened
from jaxllm.common.optional_packages import require


def table_of_frame(frame: Any) -> tuple[Table, Callable[[Any], Any]]:
    """A data frame as a table, and the function that makes a data frame of its kind.

    Args:
        frame: a pandas or Polars data frame, or a `pyarrow.Table`. The index of a pandas frame is
            no column; the frame that is made has the same index.

    Raises:
        InputError: it is something else.
        MissingExtraError: pyarrow is missing.
    """
    arrow = require("pyarrow", extra="parquet", purpose="data frames")
    kind, name = type(frame).__module__.partition(".")[0], type(frame).__name__
    if isinstance(frame, arrow.Table):
        return ArrowTable("table", frame), lambda table: table
    if (kind, name) == ("pandas", "DataFrame"):
        if not frame.columns.is_unique:
            twice = frame.columns[frame.columns.duplicated()][0]
            raise InputError(f"table: the column {twice!r} is there twice; rename one")
        try:
            own = arrow.Table.from_pandas(frame, preserve_index=False)
        except arrow.ArrowException as failure:  # a column of several types
            reasons = "; ".join(map(str, reversed(failure.args)))
            raise InputError(
                f"table: {shortened(reasons, 300)}; give it one type, such as astype(str)"
            ) from None

        def to_pandas(table: Any) -> Any:
            # The metadata has pandas' own types of the columns.
            typed = table.replace_schema_metadata(own.schema.metadata)
            return typed.to_pandas().set_axis(frame.index)

        return ArrowTable("table", own), to_pandas
    if (kind, name) == ("polars", "DataFrame"):
        return ArrowTable("table", frame.to_arrow()), type(frame)
    raise InputError(
        "table: expected a pandas or Polars data frame, a pyarrow.Table or a path, found "
        f"{quoted(type(frame).__name__)}"
    )
