"""`JaxLLMStage`: generation as a stage of Ray Data. Needs pyarrow; Ray itself calls it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.row_reader import checked_seed
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.table import without_nulls
from jaxllm.common.errors import DataError, InputError, JaxLLMError
from jaxllm.common.optional_packages import require
from jaxllm.loading import load
from jaxllm.parallel.mesh import make_mesh

RESULTS = ("text", "output_ids", "finish_reason", "error", "error_kind")
"""Columns of the results, beside `id`."""


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
        prompt_column: the column of the prompts, if it has another name.
        keep: columns that the results have too.
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
        keep: Sequence[str] = (),
        seed: int = 0,
        **options: Any,
    ) -> None:
        self._arrow = require("pyarrow", extra="ray", purpose="clusters")
        if taken := {"id", *RESULTS}.intersection(keep):
            raise InputError(f"keep: the results have a column {min(taken)!r} of their own")
        self._choice, self._keep = ColumnChoice(prompt=prompt_column), tuple(keep)
        self._seed = checked_seed(seed)
        self._returns_several = options.get("num_return_sequences", 1) > 1
        mesh = make_mesh() if jax.device_count() > 1 else None
        loaded = load(model, **{"mesh": mesh, **(load_options or {})})
        self._engine = BatchGenerator(*loaded, **options)

    def __call__(self, batch: Any) -> Any:
        """Generates for the rows of a batch.

        Args:
            batch: a `pyarrow.Table`, or a dict of numpy arrays.

        Returns:
            A `pyarrow.Table` with the columns `id`, `text`, `output_ids` and `finish_reason` (lists
            of them if `num_return_sequences` is a column, or an option above 1), and `error` and
            `error_kind` of rows that have one.

        Raises:
            DataError: a column is missing.
        """
        table = batch if isinstance(batch, self._arrow.Table) else self._arrow.table(plain(batch))
        if missing := {"id", *self._keep}.difference(table.column_names):
            raise DataError(f"no column {min(missing)!r}; there are {table.column_names}")
        columns = self._choice.used(table.column_names)
        ids = table.column("id").to_pylist()
        rows = [
            RawRow(index, ids[index], self._row(row))
            for index, row in enumerate(table.select(columns).to_pylist())
        ]
        outputs = sorted(self._engine.answer(rows), key=lambda output: output.index)
        is_list = self._returns_several or "num_return_sequences" in columns
        results = {"id": table.column("id"), **{name: table.column(name) for name in self._keep}}
        return self._arrow.table({**results, **self._columns(outputs, is_list)})

    def _row(self, cells: Mapping[str, Any]) -> Mapping[str, Any] | JaxLLMError:
        """The row of some cells, with a seed; an error if the prompt is missing."""
        try:
            row = self._choice.row(without_nulls(cells), are_texts=False)
        except DataError as error:
            return error
        return {"seed": row_seed(self._seed, row.get("id")), **row}

    def _columns(self, outputs: Sequence[BatchOutput], is_list: bool) -> dict[str, Any]:
        """The columns of the results, of the same types for every batch."""
        arrow = self._arrow
        text, ids = arrow.string(), arrow.list_(arrow.int64())
        types = {"text": text, "output_ids": ids, "finish_reason": text}
        names = {"text": "texts", "output_ids": "output_ids", "finish_reason": "finish_reasons"}
        columns: dict[str, Any] = {}
        for name, type_ in types.items():
            values: list[Any] = []
            for output in outputs:
                several = getattr(output, names[name])
                if output.error is not None or several is None:
                    values.append(None)
                else:
                    values.append(list(several) if is_list else several[0])
            columns[name] = arrow.array(values, arrow.list_(type_) if is_list else type_)
        for name in ("error", "error_kind"):
            columns[name] = arrow.array([getattr(output, name) for output in outputs], text)
        return columns


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
