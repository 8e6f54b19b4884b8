"""Step after step: numbers are read a step late, so that the device never waits for the host."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxllm.checkpoint.runs import RunCheckpoints
from jaxllm.errors import RunError
from jaxllm.sharding import put_batch
from jaxllm.training.evaluation import GenerationResult, Prompt, evaluate, generate_and_score
from jaxllm.training.flops import TokenCounts, count_tokens
from jaxllm.training.metrics_log import MetricsLog
from jaxllm.training.progress import TrainingProgress
from jaxllm.training.recipe_file import to_plain
from jaxllm.training.setup import Setup
from jaxllm.training.sinks import Sink
from jaxllm.training.state import TrainState
from jaxllm.training.step import TRAINED, Metrics

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Pending:
    """A step that is under way on the device."""

    step: int
    metrics: Metrics
    tokens: TokenCounts


class Loop:
    """The steps of one run; the host's side of them.

    Args:
        base: digests of the parameters that checkpoints leave out.
        sinks: get every step's metrics after `log`.
    """

    def __init__(
        self,
        setup: Setup,
        checkpoints: RunCheckpoints,
        progress: TrainingProgress,
        log: MetricsLog,
        sinks: Sequence[Sink],
        base: Mapping[str, str],
    ) -> None:
        self.setup, self.recipe = setup, setup.recipe
        self.checkpoints, self.progress, self.log, self.sinks = checkpoints, progress, log, sinks
        self.base = base
        self.last: Row = {}
        self.answers: GenerationResult | None = None
        self._best: float | None = None
        if (best := checkpoints.best()) is not None:
            self._best = checkpoints.read(best).metric

    def until(
        self, last: int, state: TrainState, stop: Callable[[], int | None]
    ) -> tuple[TrainState, int | None]:
        """Steps up to number `last`, or until `stop` gives a signal; what is done is saved."""
        pending: Pending | None = None
        saved = number = int(state.step)
        signal = stop()
        while number < last and signal is None:
            batch = next(self.setup.batches)
            tokens = count_tokens(batch, is_encoder_decoder=self.setup.info.kind == "seq2seq")
            state, metrics = self.setup.step(state, put_batch(batch, self.setup.mesh))
            if pending is not None:
                self.write(pending)
            number, pending = number + 1, Pending(number + 1, metrics, tokens)
            signal = stop()
            ends = number == last or signal is not None
            evaluation = self.recipe.evaluation.every
            found = None
            if self.setup.eval_batches is not None and (
                number == last or (evaluation is not None and number % evaluation == 0)
            ):
                found = self.evaluate(state)
            if found is not None or ends or number % self.recipe.checkpoints.every == 0:
                self.write(pending, found)
                pending = None
                metric = None if found is None else found.get(self.recipe.checkpoints.metric)
                if ends or number % self.recipe.checkpoints.every == 0 or self.is_best(metric):
                    self.save(number, state, metric)
                    saved = number
        if saved != number:
            raise AssertionError("the last step was not saved")
        return state, signal

    def write(self, done: Pending, found: Mapping[str, Any] | None = None) -> None:
        """Waits for a step's numbers, shows them, and writes its line.

        Raises:
            RunError: too many steps in a row were skipped.
        """
        numbers = {name: float(x) for name, x in jax.device_get(done.metrics).items()}
        in_a_row = int(numbers.pop("skipped_in_a_row"))
        speed = self.progress.step(
            done.step,
            loss=numbers["loss"],
            tokens=done.tokens.total,
            flops=self.setup.flops.of(done.tokens),
            shown={"lr": numbers["lr"]},
        )
        labels, skipped = int(numbers.pop("tokens")), int(numbers.pop("skipped"))
        row: Row = {
            **numbers,
            "labels": labels,
            "tokens": done.tokens.total,
            "skipped": skipped,
            **speed.metrics(),
            **(found or {}),
        }
        if self.setup.info.problem_type == "regression":
            row.pop("accuracy")
        self.log.log(done.step, row)
        for sink in self.sinks:
            sink.log(done.step, row)
        self.last = row
        if skipped:
            self.progress.say(f"step {done.step}: no finite gradient; the batch is skipped")
        if in_a_row >= self.recipe.skip_limit:
            raise RunError(
                f"step {done.step}: {in_a_row} batches in a row gave no finite gradient; lower "
                "optimizer.learning_rate, look at the data, or go on from an earlier checkpoint"
            )

    def evaluate(self, state: TrainState) -> Row:
        """Loss and scores of the full set, as fields of the step's line."""
        setup = self.setup
        assert setup.eval_batches is not None
        model = state.model if state.ema is None else state.averaged_model
        with self.progress.phase("evaluating"):
            batches = (put_batch(batch, setup.mesh) for batch in setup.eval_batches)
            kind = "values" if setup.info.problem_type == "regression" else "tokens"
            if setup.info.kind == "classification" and kind == "tokens":
                kind = "labels"
            found: Row = evaluate(model, batches, setup.eval_loss).metrics(kind)
        if setup.prompts:
            with self.progress.phase("generating"):
                self.answers = self.generate(model, setup.prompts)
            found |= {f"eval_{name}": score for name, score in self.answers.scores.items()}
        said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
        self.progress.say(said)
        return found

    def generate(self, model: Any, prompts: Sequence[Prompt]) -> GenerationResult:
        """Answers to prompts of the evaluation set."""
        settings = self.recipe.evaluation
        return generate_and_score(
            model,
            self.setup.tokenizer,
            prompts,
            metrics=settings.metrics,
            batch_size=settings.batch_size or self.recipe.batch_size // self.recipe.accumulation,
            samples=settings.samples,
            **settings.fields,
        )

    def is_best(self, metric: float | None) -> bool:
        """Whether a metric beats those before it, which it then replaces."""
        if metric is None or not math.isfinite(metric):
            return False
        smaller = self.recipe.checkpoints.mode == "min"
        best = self._best is None or (metric < self._best if smaller else metric > self._best)
        if best:
            self._best = metric
        return best

    def save(self, step: int, state: TrainState, metric: float | None) -> None:
        """One checkpoint: the state, the data's position, and what they belong to."""
        self.is_best(metric)
        self.log.sync()  # a checkpoint's steps are in the log, whatever happens next
        meta = {
            "recipe": to_plain(self.recipe),
            "data": self.setup.batches.state(),
            "base": dict(self.base),
        }
        arrays = {name: getattr(state, name) for name in TRAINED}
        self.checkpoints.save(step, arrays, meta, metric=metric)
