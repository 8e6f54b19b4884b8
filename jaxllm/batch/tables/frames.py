"""Data frames as tables, and outputs as data frames of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxllm.batch.tables.table import ArrowTable, Table
from jaxllm.common.errors import InputError
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
    kind = type(frame).__module__.partition(".")[0]
    if isinstance(frame, arrow.Table):
        return ArrowTable("table", frame), lambda table: table
    if kind == "pandas" and hasattr(frame, "columns"):
        table = arrow.Table.from_pandas(frame, preserve_index=False)
        return ArrowTable("table", table), lambda table: table.to_pandas().set_axis(frame.index)
    if kind == "polars" and hasattr(frame, "columns"):
        return ArrowTable("table", frame.to_arrow()), type(frame)
    raise InputError(
        f"table: expected a pandas or Polars data frame, a pyarrow.Table or a path, found "
        f"{type(frame).__name__}"
    )
