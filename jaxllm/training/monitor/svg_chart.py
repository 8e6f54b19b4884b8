"""A line chart as SVG, to stand inside an HTML page that defines its colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from jaxllm.training.monitor.curves import Curve, smoothed, thinned

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 12, 30

CSS = """
svg.chart{width:100%;height:auto;display:block}
svg.chart text{font-size:12px;fill:var(--muted)}
svg.chart .grid{stroke:var(--line);stroke-width:1}
svg.chart path{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
svg.chart .s0{stroke:var(--s0)} svg.chart .s1{stroke:var(--s1)}
svg.chart .faint{stroke-width:1;opacity:.35}
svg.chart circle.s0{fill:var(--s0)} svg.chart circle.s1{fill:var(--s1)}
svg.chart .bad{stroke:var(--bad);stroke-width:2}
"""


def line_chart(curves: Sequence[Curve], *, label: str, noisy: bool = True) -> str:
    """At most two curves over the same steps; long noisy ones smoothed, short ones with dots."""
    points = [point for curve in curves for point in curve.points]
    bad = sorted({step for curve in curves for step in curve.nonfinite})
    steps = [x for x, _ in points] + [float(step) for step in bad]
    x_low, x_high = _widened(min(steps), max(steps))
    y_low, y_high = _widened(*_extent([y for _, y in points]))
    margin = 0.05 * (y_high - y_low)
    y_low, y_high = y_low - margin, y_high + margin

    def x_at(step: float) -> float:
        return LEFT + (step - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)

    def y_at(value: float) -> float:
        return HEIGHT - BOTTOM - (value - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">'
    ]
    for tick in ticks(y_low, y_high):
        y = y_at(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    for tick in ticks(x_low, x_high, whole=True):
        parts.append(
            f'<text x="{x_at(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick:,.0f}</text>'
        )
    for step in bad[:100]:
        x = x_at(step)
        parts.append(
            f'<line class="bad" x1="{x:.1f}" x2="{x:.1f}" y1="{HEIGHT - BOTTOM - 10}" '
            f'y2="{HEIGHT - BOTTOM}"><title>step {step}: not finite</title></line>'
        )
    for number, curve in enumerate(curves):
        drawn = thinned(curve.points)
        smooth = smoothed(curve.points) if noisy else None
        for kind, line in (("faint", drawn if smooth else None), ("", thinned(smooth or drawn))):
            if line:
                path = "L".join(f"{x_at(x):.1f} {y_at(y):.1f}" for x, y in line)
                parts.append(f'<path class="s{number} {kind}" d="M{path}"/>')
        if len(drawn) <= 30:
            parts += [
                f'<circle class="s{number}" cx="{x_at(x):.1f}" cy="{y_at(y):.1f}" r="3">'
                f"<title>{escape(curve.name)}, step {x:,.0f}: {y:.6g}</title></circle>"
                for x, y in drawn
            ]
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, *, whole: bool = False) -> list[float]:
    """Four to eight round numbers between low and high.

    >>> ticks(0.3, 4.1), ticks(1, 4, whole=True)
    ([0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0], [1, 2, 3, 4])
    """
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    unit = next(power * m for m in (1, 2, 5, 10) if (high - low) / (power * m) <= 8)
    if whole:
        unit = max(round(unit), 1)
    first, last = math.ceil(low / unit - 1e-9), math.floor(high / unit + 1e-9)
    return [i * unit for i in range(first, last + 1)]


def short(value: float) -> str:
    """A number in few characters.

    >>> short(12500), short(3e-05), short(0.30000000000000004), short(2.5e6), short(0)
    ('12.5k', '3e-5', '0.3', '2.5M', '0')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):.4g}{letter}"
    text = f"{value:.4g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        return f"{mantissa}e{int(exponent)}"
    return text


def _extent(values: Sequence[float]) -> tuple[float, float]:
    return (min(values), max(values)) if values else (0.0, 1.0)


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range of some width, also around a single number."""
    if high > low:
        return low, high
    room = abs(low) * 0.1 or 1.0
    return low - room, low + room
