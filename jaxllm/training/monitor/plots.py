"""OUTPUT/loss.png: loss and learning rate over the steps, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.optional_deps import require
from jaxllm.training.monitor.curves import curve, smoothed
from jaxllm.training.output_files import replacing

LEARNING_RATES = ("lr", "learning_rate")


def save_plot(rows: Sequence[Mapping[str, Any]], path: str | PathLike[str]) -> None:
    """Draws the rows of a metrics log; see `metrics_log.read_metrics`.

    Raises:
        MissingExtraError: matplotlib is not installed.
        RunError: the file cannot be written.
    """
    # The object interface: no window system, and no state of the caller's pyplot is touched.
    figure_module = require("matplotlib.figure", extra="plot", purpose="plots")
    figure = figure_module.Figure(figsize=(8, 6), dpi=120, layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    trained, evaluated = curve(rows, "loss"), curve(rows, "eval_loss")
    if trained is not None:
        smooth = smoothed(trained.points)
        faint: dict[str, Any] = {"linewidth": 0.8, "alpha": 0.35} if smooth else {}
        top.plot(*_axes(trained.points), color="C0", label=None if smooth else "train", **faint)
        if smooth:
            top.plot(*_axes(smooth), color="C0", label="train (running mean)")
    if evaluated is not None:
        top.plot(*_axes(evaluated.points), color="C1", marker="o", markersize=4, label="eval")
    top.set_ylabel("loss")
    if top.get_legend_handles_labels()[0]:
        top.legend(frameon=False)
    for name in LEARNING_RATES:
        rate = curve(rows, name)
        if rate is not None:
            bottom.plot(*_axes(rate.points), color="C2")
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(Path(path)) as half:
        figure.savefig(half, format="png")


def _axes(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
