"""Draws the curves of a run with matplotlib: SVG inside report.html, and OUTPUT/loss.png.

The only module that needs matplotlib, an optional package.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from os import PathLike
from pathlib import Path
from typing import Any

from jaxllm.common.optional_packages import require
from jaxllm.training.output_files import replacing_file

MAX_POINTS = 400
"""Most points of a drawn curve; a chart of a page's width cannot show more."""
MIN_SMOOTHED = 40
"""Fewest points of a curve that is smoothed."""
MAX_DOTS = 30
"""Most points of a curve that is drawn with a dot at each point."""
FLAT = 0.01
"""Share of the largest value up to which differences of a curve are not shown large."""
LEARNING_RATES = ("lr", "learning_rate")
# Colours that matplotlib draws with, and the variables of the page's style that replace them.
COLOURS = {
    "#010101": "var(--s0)",
    "#020202": "var(--s1)",
    "#030303": "var(--bad)",
    "#040404": "var(--muted)",
    "#050505": "var(--line)",
}
TRAINED, EVALUATED, NONFINITE, TEXT, GRID = COLOURS
# No metadata, so that equal runs give equal files.
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclasses.dataclass(frozen=True)
class Curve:
    """Finite values by step, in order."""

    name: str
    points: list[tuple[float, float]]
    nonfinite: tuple[int, ...] = ()
    """Steps whose value was NaN or infinite."""


def curve(rows: Sequence[Mapping[str, Any]], field: str, name: str | None = None) -> Curve | None:
    """Curve of one field over the steps that have it; None if no step has a number there.

    >>> curve([{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("nan")}], "loss")
    Curve(name='loss', points=[(1.0, 2.0)], nonfinite=(3,))
    """
    values = [(row["step"], row[field]) for row in rows if _is_number(row.get(field))]
    if not values:
        return None
    return Curve(
        name=name or field,
        points=[(float(step), float(y)) for step, y in values if math.isfinite(y)],
        nonfinite=tuple(int(step) for step, y in values if not math.isfinite(y)),
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Reduces a curve to at most `MAX_POINTS` points by averaging neighbours."""
    size = math.ceil(len(points) / MAX_POINTS)
    if size <= 1:
        return list(points)
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [(_mean([x for x, _ in each]), _mean([y for _, y in each])) for each in bins]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]] | None:
    """Running mean over a twentieth of the curve; None for a short curve."""
    if len(points) < MIN_SMOOTHED:
        return None
    reach = max(len(points) // 40, 1)
    sums = [0.0]
    for _, y in points:
        sums.append(sums[-1] + y)
    result = []
    for i, (x, _) in enumerate(points):
        first, last = max(i - reach, 0), min(i + reach + 1, len(points))
        result.append((x, (sums[last] - sums[first]) / (last - first)))
    return result


def svg_chart(curves: Sequence[Curve], *, label: str, noisy: bool = True) -> str:
    """Draws at most two curves over the same steps as an SVG element in the colours of the page.

    Args:
        label: alternative text of the picture.
        noisy: smooth long curves, and draw their points faintly.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    matplotlib = require("matplotlib", extra="plot", purpose="charts")
    figure = _figure((6.4, 2.6))
    axes = figure.subplots()
    for each, colour in zip(curves, (TRAINED, EVALUATED), strict=False):
        _draw(axes, each, colour, noisy=noisy)
    _fit(axes, curves)
    bad = sorted({step for each in curves for step in each.nonfinite})[:100]
    # Markers on the x axis, at height 0 of the frame.
    axes.plot(bad, [0] * len(bad), "|", color=NONFINITE, transform=axes.get_xaxis_transform())
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(colors=TEXT, length=0)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.spines[:].set_visible(False)
    text = StringIO()
    # Keep text as text; the label as salt makes ids differ between the charts of a page.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": label}):
        figure.savefig(text, format="svg", transparent=True, metadata=NO_METADATA)
    notes = "".join(f"; step {step}: not finite" for step in bad)
    return _inline(text.getvalue(), label + notes)


def _fit(axes: Any, curves: Sequence[Curve]) -> None:
    """Begins the axis at zero for values that hardly differ."""
    values = [y for each in curves for _, y in each.points]
    if values and max(values) - min(values) <= FLAT * max(map(abs, values)):
        bottom, top = 1.05 * min(0.0, *values), 1.05 * max(0.0, *values)
        axes.set_ylim(bottom, top if top > bottom else 1.0)


def save_plot(rows: Sequence[Mapping[str, Any]], path: str | PathLike[str]) -> None:
    """Draws loss and learning rate from the rows of a metrics log (`metrics_log.read_metrics`).

    Raises:
        MissingExtraError: matplotlib is not installed.
        RunError: the file cannot be written.
    """
    figure = _figure((8, 6))
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    for field, name, colour in (("loss", "train", "C0"), ("eval_loss", "eval", "C1")):
        if (each := curve(rows, field, name)) is not None:
            _draw(top, each, colour, noisy=field == "loss")
    for name in LEARNING_RATES:
        if (each := curve(rows, name)) is not None:
            _draw(bottom, each, "C2", noisy=False)
    top.set_ylabel("loss")
    if top.get_legend_handles_labels()[0]:
        top.legend(frameon=False)
    bottom.set_ylabel("learning rate")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    with replacing_file(Path(path)) as partial:
        figure.savefig(partial, format="png")


def _figure(size: tuple[float, float]) -> Any:
    """Makes a figure without pyplot: no window, and no change of the caller's pyplot state."""
    module = require("matplotlib.figure", extra="plot", purpose="plots")
    return module.Figure(figsize=size, dpi=120, layout="constrained")


def _draw(axes: Any, curve: Curve, colour: str, *, noisy: bool) -> None:
    smooth = smoothed(curve.points) if noisy else None
    points = thinned(curve.points)
    marker = {"marker": "o", "markersize": 4} if len(points) <= MAX_DOTS else {}
    if smooth:
        axes.plot(*_columns(points), color=colour, linewidth=0.8, alpha=0.35)
        name = f"{curve.name} (running mean)"
        axes.plot(*_columns(thinned(smooth)), color=colour, label=name)
    else:
        axes.plot(*_columns(points), color=colour, label=curve.name, **marker)


def _inline(svg: str, label: str) -> str:
    """Converts matplotlib's SVG file to an inline element: no prolog, namespaces or group ids."""
    svg_match = re.search(r'<svg [^>]*viewBox="([^"]*)"[^>]*>(.*)</svg>', svg, re.DOTALL)
    assert svg_match is not None
    box, body = svg_match.groups()
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body).replace("xlink:href", "href")
    for colour, variable in COLOURS.items():
        body = body.replace(colour, variable)
    label = escape(label)
    return (
        f'<svg class="chart" viewBox="{box}" role="img" aria-label="{label}">'
        f"<title>{label}</title>{body}</svg>"
    )


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
