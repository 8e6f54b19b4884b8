"""Models in the actors of a Ray cluster: `RayEngine` for jobs, `JaxLLMStage` for Ray Data.

With `RayEngine` the job itself (input, journal, output, report) stays in the process that runs the
command. It sends rows to the actors in batches; Ray sends a batch that was lost with its actor or
node to another actor. A `JaxLLMStage` needs pyarrow; Ray itself calls it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from typing import Any, Literal

import jax
import numpy as np

from jaxllm.batch.generator import BatchGenerator
from jaxllm.batch.job.job import RowEngine, RunCounters, run_counters
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow, checked_seed
from jaxllm.batch.slot_pool import BatchCounts
from jaxllm.batch.tables.columns import ColumnChoice
from jaxllm.batch.tables.read import RESULTS
from jaxllm.batch.tables.source import OutputTable, Source, arrow_table
from jaxllm.batch.tables.table import ArrowTable
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import DataError, InputError, JaxLLMError, RunError
from jaxllm.common.optional_packages import require
from jaxllm.loading import load
from jaxllm.parallel.processes import connect
from jaxllm.parallel.sharding import make_mesh

BATCHES_PER_ACTOR = 8
"""Batches that each actor gets, if they are not too small, so that all have work to the end."""
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 256, 4096
"""Rows of a batch. While its last rows end, slots are empty: with 16 slots, and ends that nobody
knows before, a third of the slot-steps of 64 rows are empty, and a twelfth of the slot-steps of 256
rows. A large batch is computed again as a whole if its actor is lost."""

LoadEngine = Callable[[], Callable[[], RowEngine]]
"""Loads a model, and returns a function that makes an engine for the rows of one batch."""


@dataclasses.dataclass(frozen=True)
class BatchResult:
    """Outputs of one batch of rows."""

    actor: str
    """Name of the actor that answered it."""
    outputs: Sequence[BatchOutput]
    run: RunCounters


class EngineActor:
    """Holds a model, and answers pickled batches of rows: a callable class of Ray Data.

    Args:
        load: called here, in the actor.
    """

    def __init__(self, load: LoadEngine) -> None:
        self._name = uuid.uuid4().hex
        self._clock = CompileClock()
        try:
            self._make_engine = load()
            self._failure = None
        except JaxLLMError as error:  # Ray would keep its text only, and load again
            self._failure = error

    def __call__(self, batch: Mapping[str, Iterable[bytes]]) -> dict[str, list[bytes]]:
        """Answers lists of `RawRow` (`rows`) with a `BatchResult` or a JaxLLMError each."""
        results = [self._answer(pickle.loads(rows)) for rows in batch["rows"]]
        return {"result": [pickle.dumps(result) for result in results]}

    def _answer(self, rows: Sequence[RawRow]) -> BatchResult | JaxLLMError:
        if self._failure is not None:
            return self._failure
        try:
            counters, engine = run_counters(self._clock), self._make_engine()
            outputs = list(engine.answer(rows))
            return BatchResult(self._name, outputs, counters(engine))
        except JaxLLMError as error:
            return error


class RayEngine:
    """Answers rows in actors of a Ray cluster; a `RowEngine`.

    Args:
        load: loads the model in each actor; pickled, so its module is installed on all nodes.
        clock: gets the actors' compilations.
        actors: number of actors.
        resources: what each takes of the cluster: CPU, GPU, TPU, or another of its resources.
        address: as `connect`.

    Raises:
        JaxLLMError: as `connect`.
    """

    def __init__(
        self,
        load: LoadEngine,
        clock: CompileClock,
        *,
        actors: int,
        resources: Mapping[str, float],
        address: str | None = None,
    ) -> None:
        if actors < 1:
            raise InputError(f"--actors: expected 1 or more, found {actors}")
        self._load, self._clock, self._actors = load, clock, actors
        self._resources = resources
        self._ray = connect(address, resources, actors)
        self._compile_seconds: dict[str, float] = {}
        self.counts = BatchCounts()
        self.memory: list[Prediction] = []

    def answer(self, rows: Iterable[RawRow]) -> Iterator[BatchOutput]:
        """Outputs in the order in which batches end.

        Raises:
            JaxLLMError: an actor cannot load the model, or Ray has given up a batch.
        """
        self.counts, self.memory = BatchCounts(), []
        rows = list(rows)
        if not rows:
            return
        self.counts.rows_read = self.counts.work = len(rows)
        unanswered = {row.index for row in rows}
        try:
            for record in self._results(rows):
                result = pickle.loads(record["result"])
                if isinstance(result, JaxLLMError):
                    raise result
                self._add(result, len(rows))
                for output in result.outputs:
                    unanswered.remove(output.index)
                    yield output
        except self._ray.exceptions.RayError as failure:
            reason = str(failure).strip().split("\n")[-1]
            raise RunError(f"Ray: {reason}; continue with --resume") from failure

    def _results(self, rows: Sequence[RawRow]) -> Iterator[Mapping[str, bytes]]:
        """Pickled results, as batches end."""
        data = require("ray.data", extra="ray", purpose="clusters")
        logging.getLogger("ray.data").setLevel(logging.ERROR)
        data.DataContext.get_current().enable_progress_bars = False
        even = math.ceil(len(rows) / (self._actors * BATCHES_PER_ACTOR))
        one_each = math.ceil(len(rows) / self._actors)
        size = min(max(even, MIN_BATCH_ROWS), MAX_BATCH_ROWS, one_each)
        batches = [
            {"rows": pickle.dumps(rows[start : start + size])}
            for start in range(0, len(rows), size)
        ]
        resources = dict(self._resources)
        dataset = data.from_items(batches, override_num_blocks=len(batches)).map_batches(
            EngineActor,
            fn_constructor_args=(self._load,),
            compute=data.ActorPoolStrategy(size=self._actors),
            batch_size=None,  # a block, and so one of `batches`
            num_cpus=resources.pop("CPU", None),
            num_gpus=resources.pop("GPU", None),
            resources=resources,
        )
        return iter(dataset.iter_rows())

    def _add(self, result: BatchResult, rows: int) -> None:
        """Adds the counters of a batch. Actors compile at the same time: the longest counts."""
        run = result.run
        self.counts = BatchCounts.total([self.counts, run.counts])
        self.counts.rows_read = self.counts.work = rows
        self.counts.work_done = self.counts.rows
        self.memory += [x for x in run.memory if x not in self.memory]
        before = max(self._compile_seconds.values(), default=0.0)
        of_actor = self._compile_seconds.get(result.actor, 0.0)
        self._compile_seconds[result.actor] = of_actor + run.compile_seconds
        self._clock.seconds += max(self._compile_seconds.values()) - before
        self._clock.programs += run.programs
        self._clock.cached += run.programs_from_cache


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
    and `input_ids`, perhaps a `seed`, and generation fields; other columns are not read. The result
    of a row is the one of `jaxllm.generate` for this row alone. The seed of a row that names none
    is derived from `seed` and the row's `id` (`row_seed`), so that the result does not depend on
    batches and actors.

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
        lines: dict[int, dict[str, Any]] = {}
        for output in self._engine.answer(map(self._row, map(source.row, range(len(source))))):
            result = output.to_dict()
            if several and len(output.output_ids) == 1:  # a list, even for a single sequence
                result |= {name: [result[name]] for name in RESULTS}
            lines[output.index] = source.output_line(output.index, result)
        columns = [name for name in source.columns if name != "row"]  # the number in the batch
        kept = {"id": table.column("id"), **source.arrow()}
        ordered = [lines[index] for index in sorted(lines)]
        return arrow_table(OutputTable(columns, lambda: iter(ordered), kept, several))

    def _row(self, row: RawRow) -> RawRow:
        """The row with a seed, unless it has one or is an error."""
        if isinstance(row.raw, JaxLLMError):
            return row
        return dataclasses.replace(row, raw={"seed": row_seed(self._seed, row.row_id), **row.raw})


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
