"""`JaxLLMStage`: generation as a stage of Ray Data. Needs pyarrow; Ray itself calls it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.row_reader import checked_seed
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.outputs import OutputTable, arrow_table
from jaxllm.batch.tables.read import RESULTS
from jaxllm.batch.tables.source import Source
from jaxllm.batch.tables.table import ArrowTable
from jaxllm.common.errors import DataError, JaxLLMError
from jaxllm.common.optional_packages import require
from jaxllm.loading import load
from jaxllm.parallel.sharding import make_mesh


class JaxLLMStage:
    """Holds a model, and generates for batches of rows: a callable class for `map_batches`.

    ::

        rows = ray.data.read_parquet("s3://bucket/prompts")
        results = rows.map_batches(
            JaxLLMStage,
            fn_constructor_kwargs={"model": "/shared/model", "max_new_tokens": 64},
            compute=ray.data.ActorPoolStrategy(size=4),
            num_gpus=1,
            batch_size=512,
            batch_format="pyarrow",
        )
        results.write_parquet("s3://bucket/results")

    The columns of a row are its keys, as in a file of rows: an `id`, one of `prompt`, `messages`
    and `input_ids`, perhaps a `seed`, and generation fields; other columns are not read. Its result
    is that of `jaxllm.generate` on it alone. A row without a `seed` draws with one that follows
    from `seed` and its `id` (`row_seed`), so that it does not depend on batches and actors.

    Args:
        model: as `jaxllm.load`; a folder that all nodes share, or an id of the Hub. All devices
            that the process sees are used, on a `data` mesh.
        load_options: other arguments of `jaxllm.load`, such as ``{"dtype": "bfloat16"}``.
        prompt_column, template, system_template, keep, keep_prefix: as
            `BatchGenerator.generate_table`.
        seed: seed of rows that have none.
        options: arguments of `BatchGenerator`: slots, memory, chat, ..., generation fields.

    Raises:
        JaxLLMError: as `jaxllm.load` and `BatchGenerator` raise.
    """

    def __init__(
        self,
        model: str,
        *,
        load_options: Mapping[str, Any] | None = None,
        prompt_column: str | None = None,
        template: str | PathLike[str] | None = None,
        system_template: str | PathLike[str] | None = None,
        keep: Sequence[str] | Literal["all"] = (),
        keep_prefix: str = "",
        seed: int = 0,
        **options: Any,
    ) -> None:
        require("pyarrow", extra="ray", purpose="clusters")
        self._choice = ColumnChoice.of(
            prompt_column=prompt_column,
            template=template,
            system_template=system_template,
            keep=keep,
            keep_prefix=keep_prefix,
        )
        self._seed = checked_seed(seed)
        mesh = make_mesh() if jax.device_count() > 1 else None
        loaded = load(model, **{"mesh": mesh, **(load_options or {})})
        self._engine = BatchGenerator(*loaded, **options)

    def __call__(self, batch: Any) -> Any:
        """Generates for the rows of a batch.

        Args:
            batch: a `pyarrow.Table`, a pandas data frame, or a dict of numpy arrays.

        Returns:
            A `pyarrow.Table` with the columns `id`, `text`, `output_ids` and `finish_reason` (lists
            of them if `num_return_sequences` is a column, or an option above 1), and `error` and
            `error_kind` of rows that have one.

        Raises:
            DataError: a column is missing.
        """
        arrow = require("pyarrow", extra="ray", purpose="clusters")
        table = batch
        if not isinstance(batch, arrow.Table):
            # NaN in a column of objects is pandas' missing cell.
            columns = {
                name: arrow.array(column, from_pandas=True) for name, column in plain(batch).items()
            }
            table = arrow.table(columns)
        if "id" not in table.column_names:
            raise DataError(f"no column 'id'; there are {table.column_names}")
        source = Source(ArrowTable("batch", table), self._choice, RESULTS, keeps_types=True)
        several = self._engine.returns_several or "num_return_sequences" in table.column_names
        outputs = self._engine.answer(map(self._row, map(source.row, range(len(source)))))
        lines = {
            each.index: source.output_line(each.index, result(each, several)) for each in outputs
        }
        columns = [name for name in source.columns if name != "row"]  # the number in the batch
        kept = {"id": table.column("id"), **source.arrow()}
        ordered = [lines[index] for index in sorted(lines)]
        return arrow_table(OutputTable(columns, lambda: iter(ordered), kept, several))

    def _row(self, row: RawRow) -> RawRow:
        """The row with a seed, unless it has one or is an error."""
        if isinstance(row.raw, JaxLLMError):
            return row
        return dataclasses.replace(row, raw={"seed": row_seed(self._seed, row.row_id), **row.raw})


def result(output: BatchOutput, several: bool) -> dict[str, Any]:
    """The result of a row; with `several` of lists, even for a single sequence."""
    line = output.to_dict()
    if not several or len(output.output_ids) != 1:
        return line
    return {name: [value] if name in RESULTS else value for name, value in line.items()}


def row_seed(seed: int, row_id: str | int | None) -> int:
    """The seed of a row that has none: 32 bits of a digest of the job's seed and the row's id.

    >>> row_seed(0, "a") == row_seed(0, "a"), row_seed(0, "1") == row_seed(0, 1)
    (True, False)
    """
    digest = hashlib.sha256(json.dumps([seed, row_id], default=str).encode()).digest()
    return int.from_bytes(digest[:4], "big")


def plain(batch: Mapping[str, np.ndarray]) -> dict[str, list[Any]]:
    """Columns of numpy arrays as lists, so that Arrow infers their types.

    >>> plain({"input_ids": np.array([np.array([1, 2]), np.array([3])], object)})
    {'input_ids': [[1, 2], [3]]}
    """

    def value(x: Any) -> Any:
        return x.tolist() if isinstance(x, np.ndarray | np.generic) else x

    return {name: [value(x) for x in column] for name, column in batch.items()}
