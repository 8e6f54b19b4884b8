"""Training loop and early stopping. Metrics are read one step late, so that the device never waits
for the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxllm.checkpoint.orbax import RunCheckpoints
from jaxllm.common.errors import RunError
from jaxllm.models.decoder import GenerativeModel
from jaxllm.models.model import Model
from jaxllm.parallel.placement import put_batch
from jaxllm.parallel.sharding import use_mesh
from jaxllm.training.evaluation import (
    EvalPrompt,
    GenerationResult,
    evaluate,
    generate_and_score,
)
from jaxllm.training.losses import Batch
from jaxllm.training.monitor.flops import TokenCounts
from jaxllm.training.monitor.metrics_log import MetricsLog, MetricsRow, Sink
from jaxllm.training.monitor.progress import TrainingProgress
from jaxllm.training.monitor.report import write_samples
from jaxllm.training.run.recipe import EarlyStopping, Recipe
from jaxllm.training.run.setup import (
    Setup,
    eval_batch_size,
    is_lower_better,
    measured_on,
    predicted,
)
from jaxllm.training.state import TRAINED, TrainState
from jaxllm.training.step import Metrics

Stop = Callable[[], int | None]
"""Returns the number of the signal that ends the run, or None."""


class EvaluationStoppedError(Exception):
    """Raised to end an evaluation when a signal ends the run."""


def agreed(stop: Stop) -> Stop:
    """Makes a `stop` that agrees over all processes: each gets the signal that any received."""
    if jax.process_count() == 1:
        return stop

    def ask() -> int | None:
        received = multihost_utils.process_allgather(np.int32(stop() or 0))
        return int(received.max()) or None

    return ask


@dataclasses.dataclass(frozen=True)
class Patience:
    """The best value of the watched metric, and the evaluations since; kept in checkpoints."""

    metric: str
    best: float | None = None
    """Value that later ones have to improve by `min_delta`; None: not evaluated yet."""
    waited: int = 0
    """Number of evaluations since the last improvement."""
    measured_on: str | None = None
    """Hash of what the metric is measured on."""

    def after(self, evaluation: Mapping[str, Any], settings: EarlyStopping) -> Patience:
        """The state after an evaluation. A value that is not finite is no improvement.

        >>> state = Patience("eval_loss")
        >>> for loss in (1.0, 0.95, 0.9):
        ...     state = state.after({"eval_loss": loss}, EarlyStopping(min_delta=0.08))
        >>> state
        Patience(metric='eval_loss', best=0.9, waited=0, measured_on=None)
        """
        value = float(evaluation[self.metric])
        sign = -1 if is_lower_better(self.metric) else 1
        gain = math.inf if self.best is None else sign * (value - self.best)
        improves = math.isfinite(value) and gain > settings.min_delta
        is_best = math.isfinite(value) and gain > 0 and settings.min_delta_from == "best"
        best = value if improves or is_best else self.best
        return dataclasses.replace(self, best=best, waited=0 if improves else self.waited + 1)

    def reason(self, settings: EarlyStopping) -> str | None:
        """Says why the run ends; None: it goes on."""
        if self.waited < settings.patience:
            return None
        best = "was never finite" if self.best is None else f"has not improved on {self.best:.5g}"
        delta = f" by more than {settings.min_delta:g}" if settings.min_delta else ""
        return (
            f"{self.metric} {best}{delta} in {self.waited} evaluations (early_stopping.patience "
            f"{settings.patience})"
        )


def patience_of(
    recipe: Recipe, meta: Mapping[str, Any], measured_on: Callable[[str], str | None]
) -> Patience | None:
    """The state of a run that starts, or that resumes from a checkpoint with this metadata.

    A resumed run that watches another metric, or evaluates on other data, starts to count again.

    Args:
        measured_on: maps a metric to a hash of the data set that the metric is measured on.
    """
    if recipe.early_stopping is None:
        return None
    metric = recipe.early_stopping.metric or recipe.checkpoints.metric
    new = Patience(metric, measured_on=measured_on(metric))
    saved = Patience(**meta.get("early_stopping", {"metric": metric}))
    same = (saved.metric, saved.measured_on) == (new.metric, new.measured_on)
    return saved if same else new


class Loop:
    """Runs steps, evaluations and checkpoints, and writes their metrics.

    Args:
        log: the log of the first process; None in the others.
        sinks: further logs of the metrics.
        meta: metadata of all checkpoints: recipe, settings, and what the run started from.
        patience: state of early stopping; None: the recipe has none.
        samples_file: file for the first answers of the last evaluation; None: they are not kept.
    """

    def __init__(
        self,
        setup: Setup,
        checkpoints: RunCheckpoints,
        progress: TrainingProgress,
        log: MetricsLog | None,
        sinks: Sequence[Sink],
        meta: Mapping[str, Any],
        patience: Patience | None = None,
        samples_file: Path | None = None,
    ) -> None:
        self.setup, self.recipe = setup, setup.recipe
        self.checkpoints, self.progress, self.log, self.sinks = checkpoints, progress, log, sinks
        self.meta, self.patience, self.samples_file = meta, patience, samples_file
        self.last: MetricsRow = {}
        self._mesh = setup.mesh if setup.mesh.size > 1 else None
        metric = self.recipe.checkpoints.metric
        self._measured_on = measured_on(self.recipe, setup.eval_batches, metric)
        self._best: float | None = None
        if (best := checkpoints.best()) is not None:
            record = checkpoints.read(best)
            if record.measured_on == self._measured_on:
                self._best = record.metric
            elif self._measured_on is not None:
                progress.say(
                    "the evaluation is not that of earlier steps; the best checkpoint is chosen "
                    "among those from here on"
                )

    def run_to(
        self, last: int, state: TrainState, stop: Stop, *, evaluated: bool = False
    ) -> tuple[TrainState, int | None]:
        """Runs steps up to `last`, or until `stop` returns a signal; saves the last one.

        Args:
            evaluated: True if the state was already evaluated.
        """
        pending: tuple[int, Metrics, TokenCounts] | None = None  # a step that runs on the device
        stop = agreed(stop)
        number, signal = int(state.step), stop()
        if signal is None and not evaluated and self.evaluates_at(number, last):
            self.evaluate_at_start(number, state, stop)
            signal = stop()
        while number < last and signal is None and self.stopped_early is None:
            tokens = TokenCounts.of_lengths(self.setup.batches.next_tokens())
            batch = next(self.setup.batches)
            with use_mesh(self._mesh):
                state, metrics = self.setup.step(state, put_batch(batch, self.setup.mesh))
            if pending is not None:
                self.write(pending[0], self.measure(*pending), {})
            number, pending = number + 1, (number + 1, metrics, tokens)
            evaluates = self.evaluates_at(number, last)
            # Wait for the step before its evaluation, which is timed separately.
            measured = self.measure(*pending) if evaluates else None
            evaluation = self.evaluate(state, stop) if evaluates else {}
            signal = stop()
            metric = evaluation.get(self.recipe.checkpoints.metric)
            best = self.record_metric(metric)
            self.record_patience(evaluation)
            due = number % self.recipe.checkpoints.every == 0
            ends = number == last or signal is not None or self.stopped_early is not None
            saves = due or best or ends
            if evaluates or saves:
                self.write(number, measured or self.measure(*pending), evaluation)
                pending = None
            if saves:
                with self.progress.phase("saving", says=False):
                    self.save(number, state, metric, evaluated=bool(evaluation))
        if self.stopped_early is not None:
            self.progress.say(f"stopped at step {number}: {self.stopped_early}")
        return state, signal

    @property
    def stopped_early(self) -> str | None:
        """Why early stopping ends the run; None: it does not."""
        settings = self.recipe.early_stopping
        if settings is None or self.patience is None:
            return None
        return self.patience.reason(settings)

    def record_patience(self, evaluation: MetricsRow) -> None:
        """Counts an evaluation for early stopping; an empty one was interrupted."""
        settings = self.recipe.early_stopping
        if evaluation and settings is not None and self.patience is not None:
            self.patience = self.patience.after(evaluation, settings)

    def patience_meta(self) -> dict[str, Any]:
        """The state of early stopping, for a checkpoint."""
        state = self.patience
        return {} if state is None else {"early_stopping": dataclasses.asdict(state)}

    def evaluates_at(self, step: int, last: int) -> bool:
        """True if the recipe evaluates after this step."""
        settings = self.recipe.evaluation
        due = step == last or (settings.every is not None and step % settings.every == 0)
        if step == 0:
            due = settings.at_start
        return due and self.setup.eval_batches is not None

    def evaluate_at_start(self, step: int, state: TrainState, stop: Stop) -> None:
        """Evaluates before the first step, or after a resume if a signal ended the evaluation.

        Adds the result to the step's line and checkpoint, as in a run that was not stopped.
        """
        if not (evaluation := self.evaluate(state, stop)):
            return
        if self.log is not None:
            self.log.amend(step, evaluation)
        for sink in self.sinks:
            sink.log(step, evaluation)
        self.record_patience(evaluation)
        if step > 0:
            metric = evaluation.get(self.recipe.checkpoints.metric)
            self.record_metric(metric)
            meta = {"evaluated": True, **self.patience_meta()}
            self.checkpoints.amend(step, meta, metric=metric, measured_on=self._measured_on)

    def measure(self, step: int, metrics: Metrics, counts: TokenCounts) -> MetricsRow:
        """Waits for a step's metrics and shows them; `write` takes them.

        Args:
            counts: tokens of the batch over all processes.
        """
        numbers = {name: float(x) for name, x in jax.device_get(metrics).items()}
        tokens = int(numbers.pop("real_tokens"))
        speed = self.progress.step(
            step,
            loss=numbers["loss"],
            tokens=tokens,
            flops=self.setup.flops.of(counts),
            shown={"lr": numbers["lr"]},
        )
        labels, skipped = int(numbers.pop("tokens")), int(numbers.pop("skipped"))
        row: MetricsRow = {
            **numbers,
            "labels": labels,
            "tokens": tokens,
            "skipped": skipped,
            **speed.metrics(),
        }
        if predicted(self.recipe, self.setup.info) in ("values", "preferences"):
            row.pop("accuracy")
        return row

    def write(self, step: int, measured: MetricsRow, evaluation: MetricsRow) -> None:
        """Writes the log line of a step, with the metrics of its evaluation.

        Raises:
            RunError: too many steps in a row were skipped.
        """
        row = measured | evaluation
        in_a_row = int(row.pop("skipped_in_a_row"))
        for sink in self.sinks if self.log is None else (self.log, *self.sinks):
            sink.log(step, row)
        self.last = row
        if row["skipped"]:
            self.progress.say(f"step {step}: no finite gradient; the batch is skipped")
        if in_a_row >= self.recipe.skip_limit:
            raise RunError(
                f"step {step}: {in_a_row} batches in a row gave no finite gradient; lower "
                "optimizer.learning_rate, check the data, or resume from an earlier checkpoint"
            )

    def evaluate(self, state: TrainState, stop: Stop) -> MetricsRow:
        """Evaluates on the full set; returns fields of the step's line, empty if interrupted."""
        setup = self.setup
        assert setup.eval_batches is not None
        model = state.model if state.ema is None else state.averaged_model

        def raise_if_stopped() -> None:
            if stop() is not None:
                raise EvaluationStoppedError

        def batches() -> Iterator[Batch]:
            assert setup.eval_batches is not None
            for batch in setup.eval_batches:
                raise_if_stopped()
                yield put_batch(batch, setup.mesh)

        try:
            with self.progress.phase("evaluating"):
                with use_mesh(self._mesh):
                    result = evaluate(model, batches(), setup.eval_loss)
                metrics: MetricsRow = result.metrics(predicted(self.recipe, setup.info))
            if setup.prompts:
                with self.progress.phase("generating"):
                    answers = self.generate(model, setup.prompts, raise_if_stopped)
                if self.samples_file is not None:
                    write_samples(self.samples_file, answers.samples)
                metrics |= {f"eval_{name}": score for name, score in answers.scores.items()}
        except EvaluationStoppedError:
            self.progress.say("the evaluation is stopped; resuming the run starts with it")
            return {}
        self.progress.say(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
        return metrics

    def generate(
        self,
        model: Model[Any],
        prompts: Sequence[EvalPrompt],
        before_batch: Callable[[], None] = lambda: None,
    ) -> GenerationResult:
        """Generates and scores answers to prompts of the evaluation set."""
        settings = self.recipe.evaluation
        return generate_and_score(
            cast(GenerativeModel, model),
            self.setup.tokenizer,
            prompts,
            metrics=settings.metrics,
            batch_size=eval_batch_size(self.recipe),
            samples=settings.samples,
            before_batch=before_batch,
            **settings.fields,
        )

    def record_metric(self, metric: float | None) -> bool:
        """Records the metric of an evaluation; True if it is the best so far."""
        if metric is None or not math.isfinite(metric):
            return False
        smaller = self.recipe.checkpoints.mode == "min"
        best = self._best is None or (metric < self._best if smaller else metric > self._best)
        if best:
            self._best = metric
        return best

    def save(self, step: int, state: TrainState, metric: float | None, *, evaluated: bool) -> None:
        """Saves a checkpoint: state, data position, recipe and base."""
        if self.log is not None:
            self.log.sync()  # the steps of a checkpoint are in it, even after a power cut
        meta = {
            **self.meta,
            "data": self.setup.batches.state(),
            "evaluated": evaluated,
            **self.patience_meta(),
        }
        arrays = {name: getattr(state, name) for name in TRAINED}
        self.checkpoints.save(step, arrays, meta, metric=metric, measured_on=self._measured_on)
