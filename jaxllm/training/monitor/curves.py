"""Curves of a run, taken from its metrics and thinned out for drawing."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

MOST_POINTS = 400
"""More than a chart of a page's width can show."""
SMOOTHED_FROM = 40
"""Shorter curves are drawn as they are."""


@dataclasses.dataclass(frozen=True)
class Curve:
    """Steps and values, finite, in order."""

    name: str
    points: list[tuple[float, float]]
    nonfinite: tuple[int, ...] = ()
    """Steps whose value was NaN or infinite."""


def curve(rows: Sequence[Mapping[str, Any]], field: str, name: str | None = None) -> Curve | None:
    """One field over the steps that have it; None if no step has a number there.

    >>> curve([{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("nan")}], "loss")
    Curve(name='loss', points=[(1.0, 2.0)], nonfinite=(3,))
    """
    found = [(row["step"], row[field]) for row in rows if _is_number(row.get(field))]
    if not found:
        return None
    return Curve(
        name=name or field,
        points=[(float(step), float(y)) for step, y in found if math.isfinite(y)],
        nonfinite=tuple(int(step) for step, y in found if not math.isfinite(y)),
    )


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most `MOST_POINTS`: means of neighbours."""
    size = math.ceil(len(points) / MOST_POINTS)
    if size <= 1:
        return list(points)
    bins = [points[i : i + size] for i in range(0, len(points), size)]
    return [tuple(math.fsum(axis) / len(axis) for axis in zip(*b, strict=True)) for b in bins]  # type: ignore[misc]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]] | None:
    """Means over a twentieth of the curve around each point; None for a short curve."""
    if len(points) < SMOOTHED_FROM:
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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
