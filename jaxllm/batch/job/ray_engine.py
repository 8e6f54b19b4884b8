"""`RayEngine`: answers the rows of a job in actors of a Ray cluster, through Ray Data.

The job itself (input, journal, output, report) stays in the process that runs the command. It sends
rows to the actors in batches; Ray sends a batch that was lost with its actor or node to another
actor.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import pickle
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from jaxllm.batch.counts import BatchCounts
from jaxllm.batch.job.job import RowEngine, RunWatch
from jaxllm.batch.job.report import RunCounters
from jaxllm.batch.memory import Prediction
from jaxllm.batch.rows import BatchOutput, RawRow
from jaxllm.common.compiling import CompileClock
from jaxllm.common.errors import InputError, JaxLLMError, RunError
from jaxllm.common.optional_packages import require
from jaxllm.parallel.processes import connect

BATCHES_PER_ACTOR = 8
"""Batches that each actor gets, if they are not too small, so that all have work to the end."""
MIN_BATCH_ROWS, MAX_BATCH_ROWS = 256, 4096
"""Rows of a batch. While its last rows end, slots are empty: with 16 slots, and ends that nobody
knows before, a third of the slot-steps of 64 rows, and a twelfth of those of 256. A large one is
computed again as a whole if its actor is lost."""

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
            watch, engine = RunWatch(self._clock), self._make_engine()
            outputs = list(engine.answer(rows))
            return BatchResult(self._name, outputs, watch.counters(engine))
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
        self.counts.work = len(rows)
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
        self.counts.work, self.counts.work_done = rows, self.counts.rows
        self.memory += [x for x in run.memory if x not in self.memory]
        before = max(self._compile_seconds.values(), default=0.0)
        of_actor = self._compile_seconds.get(result.actor, 0.0)
        self._compile_seconds[result.actor] = of_actor + run.compile_seconds
        self._clock.seconds += max(self._compile_seconds.values()) - before
        self._clock.programs += run.programs
        self._clock.cached += run.programs_from_cache
