"""Tolerances of the comparison of training, which follow from float32's arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from training_cases import (
    STEPS,
    Arrays,
    Combination,
    family_of,
    parameters_and_gradients,
)
from training_ours import joined, load

from jaxllm.models.weights import parameters

UNIT = 2.0**-24
"""Largest relative error of one rounding to float32."""
MODEL = 128 * UNIT
"""Relative error of outputs and gradients of the small models, 8e-6: 2 or 3 layers of some 20
operations each, with sums over at most 60 terms. The reference computes in float64."""
UNSCALED = 4
"""T5 does not scale its attention scores, so that softmax makes their rounding errors larger."""


def difference(combination: Combination, ours: Arrays, theirs: Arrays) -> str | None:
    """What differs most between two results of a combination; None if nothing differs."""
    if ours.keys() != theirs.keys():
        return f"only on one side: {', '.join(sorted(ours.keys() ^ theirs.keys()))}"
    shapes = {name: (x.shape, theirs[name].shape) for name, x in ours.items()}
    if wrong := [f"{name}: {a} and {b}" for name, (a, b) in shapes.items() if a != b]:
        return f"shapes: {', '.join(wrong)}"
    shares = errors(combination, ours, theirs)
    worst = max(shares, key=shares.__getitem__)
    if shares[worst] <= 1:  # False for NaN
        return None
    pair = [np.array2string(x, threshold=4, edgeitems=1) for x in (ours[worst], theirs[worst])]
    return f"{worst}: {shares[worst]:.2g} times the tolerance; {' and '.join(pair)}"


def errors(combination: Combination, ours: Arrays, theirs: Arrays) -> dict[str, float]:
    """Distance of every array from the reference's, as a share of its tolerance."""
    limits = LIMITS[combination["area"]](combination, theirs)
    return {name: norm(x - theirs[name].astype(float)) / limits[name] for name, x in ours.items()}


def norm(x: Any) -> float:
    value = float(np.linalg.norm(np.ravel(np.asarray(x, np.float64))))
    return np.inf if np.isnan(value) else value


def of_model(combination: Combination, theirs: Arrays) -> dict[str, float]:
    """Gradients: relative to the norm of the tensor, and a part of the norm of all of them."""
    relative = MODEL * (UNSCALED if family_of(combination["model"]) == "t5" else 1)
    whole = norm([norm(x) for name, x in theirs.items() if name.startswith("grad:")])
    limits = {name: relative * norm(x) for name, x in theirs.items()}
    for name in limits:
        if name.startswith("grad:"):
            limits[name] += relative / 8 * whole
    return {name: x + 1e-30 for name, x in limits.items()}


def of_dpo(combination: Combination, theirs: Arrays) -> dict[str, float]:
    """Rewards and the loss's argument are differences of log-probabilities, which set the scale."""
    limits = of_model(combination, theirs)
    relative = MODEL * (UNSCALED if family_of(combination["model"]) == "t5" else 1)
    scale = relative * np.abs(theirs["reference"]).max()
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        limits[name] = combination["beta"] * scale
    limits["loss"] += scale * loss_slope(combination, float(theirs["loss"]))
    limits["rewards/accuracies"] = 1e-6
    return limits


def loss_slope(combination: Combination, loss: float) -> float:
    """Bound of the mean derivative of the losses by their margins: beta; of IPO's, which are the
    squares of distances, twice the root of the mean."""
    if combination["loss_type"] == "ipo":
        return 2 * np.sqrt(loss)
    return combination["beta"]


def of_optimizers(combination: Combination, theirs: Arrays) -> dict[str, float]:
    """Each step rounds the parameter once, and its update some twenty times.

    AdamW divides by 1 - beta^t, which in float32 has the rounding error of beta.
    """
    start, settings = parameters_and_gradients(combination)[0], combination["settings"]
    relative = 32 * UNIT
    if settings["name"] == "adamw":
        relative += (
            UNIT / (1 - settings.get("b1", 0.9)) + UNIT / (1 - settings.get("b2", 0.999)) / 2
        )
    sizes = {name: size_of(x, start[name.split(":")[1]]) for name, x in theirs.items()}
    return {
        name: relative * norm(x) + STEPS * UNIT * (sizes[name] + norm(x))
        for name, x in theirs.items()
    }


def size_of(x: np.ndarray, start: np.ndarray) -> float:
    """Norm of a parameter at the start, of as many elements as its change has."""
    return norm(start) * float(np.sqrt(x.size / start.size))


def of_schedules(combination: Combination, theirs: Arrays) -> dict[str, float]:
    """Rates as shares of the peak: a few roundings each."""
    return {name: 16 * UNIT * np.sqrt(x.size) for name, x in theirs.items()}


def of_averages(combination: Combination, theirs: Arrays) -> dict[str, float]:
    """Each step rounds parameter and average; changes have the relative error of gradients."""
    model = load(combination["model"])
    start = joined(model, parameters(model))
    relative = MODEL * (UNSCALED if family_of(combination["model"]) == "t5" else 1)
    whole = norm([norm(x) for name, x in theirs.items() if name.startswith("param:")])
    rounding = 3 * combination["steps"] * UNIT
    return {
        name: relative * (norm(x) + whole / 8) + rounding * size_of(x, start[name.split(":")[1]])
        for name, x in theirs.items()
    }


LIMITS = {
    "gradients": of_model,
    "lora": of_model,
    "dpo": of_dpo,
    "optimizers": of_optimizers,
    "schedules": of_schedules,
    "averages": of_averages,
}
