"""Makes optax optimizers by name, with learning-rate schedule, clipping and weight decay.

`labels` names parameters for an optax loop of one's own, for example to freeze some of them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Hashable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxllm.common.arguments import checked
from jaxllm.common.errors import ConfigError, InputError
from jaxllm.models.model import Model
from jaxllm.models.weights import parameters
from jaxllm.parallel.sharding import parameter_path
from jaxllm.training.state import Params, global_norm

OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("b1", "b2", "eps"),
    "adafactor": ("momentum",),
    "lion": ("b1", "b2"),
    "sgd": ("momentum",),
    "muon": ("b1", "b2", "eps"),
}
"""Optimizers, and the fields of their own that they take."""
SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer and schedule. A field that the chosen optimizer or schedule lacks is an error.

    Args:
        name: adamw, adafactor, lion, sgd or muon.
        learning_rate: peak learning rate. With adamw, lion and muon a step changes each element by
            about the rate. With adafactor the root mean square of a step is the rate times the
            root mean square of the parameter; with `scale_parameter` false it is the rate itself.
            With sgd the rate multiplies the gradient.
        schedule: constant, linear or cosine (down to `final_factor` at step `schedule_steps`), or
            inverse_sqrt.
        warmup_steps: steps of a linear warmup from 0 to the peak.
        schedule_steps: optimizer steps to the end of a linear or cosine schedule, warmup included,
            wherever the run stops.
        final_factor: learning rate at the end of the schedule, as a share of the peak.
        b1, b2, eps: decay rates of the moments, and epsilon (adamw, muon; lion has b1 and b2).
            None: optax's defaults.
        momentum: momentum of sgd (Nesterov) and adafactor; None: no momentum.
        scale_parameter: multiply adafactor's steps by the root mean square of each parameter;
            false: as ``optim="adafactor"`` of transformers' Trainer.
        weight_decay: decoupled weight decay, times the learning rate; None: none. With muon it
            applies only to the parameters that Muon itself trains.
        no_decay: regexes of parameter paths without weight decay. Vectors (norms, biases) never
            have any.
        clip_norm: maximum global norm of the gradient; larger gradients are scaled down. None: no
            clipping.
    """

    name: str = "adamw"
    learning_rate: float = 1e-4
    schedule: str = "constant"
    warmup_steps: int = 0
    schedule_steps: int | None = None
    final_factor: float | None = None
    b1: float | None = None
    b2: float | None = None
    eps: float | None = None
    momentum: float | None = None
    scale_parameter: bool = True
    weight_decay: float | None = None
    no_decay: tuple[str, ...] = (r"position_bias",)
    clip_norm: float | None = 1.0

    def __post_init__(self):
        for name, choices in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            if (value := getattr(self, name)) not in choices:
                raise ConfigError(f"{name}: unknown {value!r}; known: {', '.join(choices)}")
        known = OPTIMIZERS[self.name]
        for name in ("b1", "b2", "eps", "momentum"):
            value = getattr(self, name)
            if value is None:
                continue
            if name not in known:
                raise ConfigError(f"{name}: {self.name} has none; it has {', '.join(known)}")
            if not 0 <= value < (math.inf if name == "eps" else 1):
                raise ConfigError(f"{name}: expected 0 to 1, found {value}")
        if not self.scale_parameter and self.name != "adafactor":
            raise ConfigError(f"scale_parameter: false has no effect on {self.name}")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate: expected more than 0, found {self.learning_rate}")
        if self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps: expected 0 or more, found {self.warmup_steps}")
        ends = self.schedule in ("linear", "cosine")
        if ends != (self.schedule_steps is not None):
            raise ConfigError(
                f"schedule_steps: {'needed by' if ends else 'has no effect on'} schedule "
                f"{self.schedule!r}, found {self.schedule_steps}"
            )
        if self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ConfigError(
                f"schedule_steps: {self.schedule_steps} do not go beyond warmup_steps, "
                f"{self.warmup_steps}"
            )
        if self.final_factor is not None and not (ends and 0 <= self.final_factor <= 1):
            raise ConfigError(
                "final_factor: expected 0 to 1, with a linear or cosine schedule; found "
                f"{self.final_factor} with {self.schedule}"
            )
        for name in ("weight_decay", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name}: expected more than 0, or none; found {value}")
        if self.weight_decay is None and self.no_decay != OptimizerConfig.no_decay:
            raise ConfigError("no_decay: has no effect without weight_decay")
        for pattern in self.no_decay:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"no_decay: {pattern!r} is not a regex: {error}") from None

    def decays(self, path: str, ndim: int) -> bool:
        """True if weight decay applies to a parameter."""
        if ndim < 2 or path.endswith("bias"):  # BART's constant of the logits is [1, V]
            return False
        return not any(re.search(pattern, path) for pattern in self.no_decay)


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Makes the learning-rate schedule, a function of the optimizer step.

    The inverse square root is the peak times sqrt(w / step) from step w on, the end of the warmup
    (Raffel et al. 2019). Without warmup w is 10,000, T5's, and the steps count from it, as in
    transformers.

    >>> schedule = make_schedule(OptimizerConfig(learning_rate=1.0, warmup_steps=2,
    ...                                          schedule="linear", schedule_steps=6))
    >>> [round(float(schedule(step)), 2) for step in (0, 1, 2, 4, 6, 9)]
    [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """
    peak, end, warmup = config.learning_rate, config.final_factor or 0.0, config.warmup_steps
    steps, start = (config.schedule_steps or 0) - warmup, warmup or 10_000
    schedules: Mapping[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        # optax's linear schedule misses its end value by a rounding error, and may be below 0.
        "linear": lambda: (
            lambda step: peak * (end + (1 - end) * jnp.maximum(steps - step, 0) / steps)
        ),
        "cosine": lambda: optax.cosine_decay_schedule(peak, steps, end),
        # Steps are negative during the warmup, which has its own schedule.
        "inverse_sqrt": lambda: lambda step: peak * (start / (jnp.maximum(step, 0) + start)) ** 0.5,
    }
    after = schedules[config.schedule]()
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Makes gradient clipping, then the optimizer with its schedule and weight decay.

    - AdamW: Loshchilov & Hutter 2017, arXiv:1711.05101.
    - Adafactor with T5's settings (Shazeer & Stern 2018, arXiv:1804.04235; Raffel et al. 2019):
      updates relative to each parameter's size and clipped, factored second moments (of matrices
      with both sides above 127, as in T5X) that decay as 1 - t^-0.8. T5 was fine-tuned at a
      constant 1e-3. Without `scale_parameter` updates are not relative to the parameter's size.
    - Lion: Chen et al. 2023, arXiv:2302.06675. Its learning rate is 3 to 10 times below AdamW's.
    - Muon (Jordan et al. 2024) for the matrices of the blocks, each expert's alone; Adam with
      Nesterov momentum for embeddings, head and vectors. Muon's updates are scaled to the size of
      AdamW's, so that one learning rate suits both (Liu et al. 2025, arXiv:2502.16982).
    """
    schedule, mask = make_schedule(config), partial(decay_mask, config)
    values = {name: getattr(config, name) for name in OPTIMIZERS[config.name]}
    options = {name: value for name, value in values.items() if value is not None}
    decay = config.weight_decay or 0.0
    match config.name:
        case "adamw":
            optimizer = optax.adamw(schedule, weight_decay=decay, mask=mask, **options)
        case "adafactor":
            # optax does not multiply this rate by the learning rate; the other optimizers do.
            rate = (lambda step: decay * schedule(step)) if decay else None
            optimizer = optax.adafactor(
                schedule,
                multiply_by_parameter_scale=config.scale_parameter,
                weight_decay_rate=rate,
                weight_decay_mask=mask,
                **options,
            )
        case "lion":
            optimizer = optax.lion(schedule, weight_decay=decay, mask=mask, **options)
        case "sgd":
            steps = [optax.sgd(schedule, nesterov="momentum" in options, **options)]
            if decay:
                steps += [optax.add_decayed_weights(lambda step: -decay * schedule(step), mask)]
            optimizer = optax.chain(*steps)  # even of one: saved states have its structure
        case _:
            adam = {f"adam_{name}": options[name] for name in ("b1", "b2") if name in options}
            optimizer = optax.contrib.muon(
                schedule,
                weight_decay=decay,
                weight_decay_mask=mask,
                muon_weight_dimension_numbers=muon_axes,
                consistent_rms=0.2,
                **adam,
                **({"eps": options["eps"]} if "eps" in options else {}),
            )
    if config.clip_norm is None:
        return optimizer
    return optax.chain(clip_by_norm(config.clip_norm), optimizer)


def decay_mask(config: OptimizerConfig, params: Params) -> Any:
    """True for parameters with weight decay; those masked by muon have no leaf."""
    return {
        path: jax.tree.map(lambda x, path=path: config.decays(path, x.ndim), subtree)
        for path, subtree in params.items()
    }


def muon_axes(params: Any) -> Any:
    """Axes of the parameters that Muon itself trains; None for the others."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)
    stack = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)
    by_axes = {2: matrix, 3: stack}
    return {
        path: by_axes.get(getattr(x, "ndim", 0)) if "blocks" in path else None
        for path, x in params.items()
    }


def clip_by_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that can reuse a norm computed by the caller.

    PERF(cpu): recomputing it costs three passes over all gradients; benchmarks/train.py.
    `measured` is a pytree and its norm, used only if the updates are the same arrays, unchanged by
    earlier transformations.
    """

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        measured: tuple[Any, jax.Array | None] = (None, None),
        **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        (gradients, norm), leaves = measured, jax.tree.leaves(updates)
        own = jax.tree.leaves(gradients)
        if norm is None or len(own) != len(leaves) or not all(map(operator.is_, own, leaves)):
            norm = global_norm(updates)
        scale = jnp.minimum(1.0, max_norm / norm)
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def labels(
    model: Model[Any], patterns: Mapping[str, Hashable], default: Hashable = None
) -> Callable[[Any], Any]:
    """Labels of a model's parameters by path, for `optax.multi_transform` and `optax.masked`.

    The result is a function, as both accept: models are callable, and optax would call a label tree
    that is a model.

    Args:
        model: its paths are matched; the function takes trees of the same paths, such as gradients.
        patterns: labels by regexes, searched in each path; the first that matches counts.
        default: label of parameters that no pattern matches; None: an error.

    Raises:
        InputError: a pattern matches no parameter, or no pattern matches a parameter and there is
            no default.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> from jaxllm.nn.linear import Linear
    >>> layer = Linear(2, 3, use_bias=True, dtype=jnp.float32, param_dtype=jnp.float32, rngs=None)
    >>> layer = jax.tree.map(jnp.ones_like, layer)
    >>> label = labels(layer, {"bias": "train"}, default="freeze")
    >>> optimizer = optax.multi_transform(
    ...     {"train": optax.sgd(0.5), "freeze": optax.set_to_zero()}, label)
    >>> updates, _ = optimizer.update(layer, optimizer.init(layer))
    >>> parameters(updates)["bias"].tolist(), float(parameters(updates)["weight"].max())
    ([-0.5, -0.5, -0.5], 0.0)
    """
    example = "a dictionary such as {'lora_': 'train'}, of labels by regexes"
    checked(patterns, (Mapping,), "labels: patterns", example)
    paths = parameters(model)

    def label_of(path: str) -> Hashable:
        return next((value for key, value in patterns.items() if re.search(key, path)), default)

    for pattern in patterns:
        if not any(re.search(pattern, path) for path in paths):
            raise InputError(
                f"labels: {pattern!r} matches no parameter, such as {next(iter(paths))}"
            )
    if (bare := next((path for path in paths if label_of(path) is None), None)) is not None:
        raise InputError(f"labels: no pattern matches {bare}; give a default")

    def label_tree(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, _: label_of(parameter_path(path)), tree
        )

    return label_tree
