"""Writes OUTPUT/report.html, a self-contained report of a run without network or scripts, and
OUTPUT/loss.png.

The curves are drawn with matplotlib, an optional package that only this module needs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from io import StringIO
from os import PathLike
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from jinja2 import Environment, StrictUndefined

from jaxllm.common.errors import MissingExtraError, RunError, naming_file
from jaxllm.common.files import replacing, write_whole
from jaxllm.common.optional_packages import require
from jaxllm.training.evaluation import EvalSample
from jaxllm.training.monitor.flops import Peak
from jaxllm.training.monitor.metrics_log import read_metrics
from jaxllm.training.monitor.run_card import RunCard, flat, start_rows

BEFORE, AFTER = "samples_before.json", "samples_after.json"
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
LEARNING_RATE = "Learning rate"
# Charts: title, and fields with their names in the legend.
CHARTS: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", (("loss", "train"), ("eval_loss", "eval"))),
    (LEARNING_RATE, tuple((name, "learning rate") for name in LEARNING_RATES)),
    ("Rewards", (("rewards/chosen", "chosen"), ("rewards/rejected", "rejected"))),
    ("Margin", (("rewards/margins", "train"), ("eval_rewards/margins", "eval"))),
    (
        "Chosen answer preferred",
        (("rewards/accuracies", "train"), ("eval_rewards/accuracies", "eval")),
    ),
    ("Gradient norm", (("grad_norm", "gradient norm"),)),
    ("Tokens a second", (("tokens_per_second", "tokens a second"),)),
    ("MFU", (("mfu", "MFU"),)),
)

CSS = """
:root{color-scheme:light dark;--bg:#f7f7f5;--card:#fff;--text:#1c1c1a;--muted:#6b6b66;
--line:#e4e4df;--s0:#2563eb;--s1:#d97706;--bad:#dc2626;--good:#15803d}
@media(prefers-color-scheme:dark){:root{--bg:#161615;--card:#1f1f1d;--text:#ececea;--muted:#a0a09a;
--line:#34342f;--s0:#7aa2ff;--s1:#f0a94a;--bad:#f87171;--good:#4ade80}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--text);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 20px 64px}
h1{font-size:28px;margin:0 0 4px} h2{font-size:19px;margin:40px 0 12px}
h3{font-size:15px;margin:0 0 8px} p.sub{margin:0;color:var(--muted)}
.grid{display:grid;gap:14px;grid-template-columns:repeat(auto-fit,minmax(min(100%,480px),1fr))}
.tiles{display:grid;gap:12px;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));
margin-top:24px}
.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:14px 16px;
min-width:0}
.tile b{display:block;font-size:23px;font-variant-numeric:tabular-nums}
.tile span{color:var(--muted);font-size:13px}
.legend{color:var(--muted);font-size:13px;font-weight:400;margin-left:12px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:50%;margin:0 5px 0 8px}
.legend .k0{background:var(--s0)} .legend .k1{background:var(--s1)}
table{border-collapse:collapse;width:100%;font-size:14px}
th,td{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-top:1px solid var(--line);
overflow-wrap:anywhere}
tr:first-child>*{border-top:0} th{font-weight:500;color:var(--muted);width:38%}
svg.chart{width:100%;height:auto;display:block}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:0;font:13px/1.5 ui-monospace,Menlo,monospace}
.sample{margin-bottom:14px} .sample dl{margin:0}
.sample dt{color:var(--muted);font-size:13px;margin-top:10px} .sample dd{margin:0}
.sample dd.after{border-left:3px solid var(--good);padding-left:10px}
.sample dd.before{border-left:3px solid var(--line);padding-left:10px}
"""
# The page loads nothing, regardless of its content. All text is escaped.
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{{ title }}</title><style>{{ css|safe }}</style></head>
{% macro table(rows) %}<div class="card"><table>{% for name, text in rows %}
<tr><th>{{ name }}</th><td>{{ text }}</td></tr>{% endfor %}</table></div>{% endmacro %}
<body><main>
<h1>{{ title }}</h1>
<p class="sub">Started {{ started }}, {{ "{:,}".format(steps) }} steps recorded</p>
{% if ended %}<p class="sub">Stopped early: {{ ended }}</p>{% endif %}
<div class="tiles">{% for name, value in highlights %}
<div class="card tile"><b>{{ value }}</b><span>{{ name }}</span></div>{% endfor %}</div>
<h2>Curves</h2>
{% if hint %}<p class="sub">{{ hint }}</p>{% else %}<div class="grid">
{% for title, names, svg in charts %}<div class="card"><h3>{{ title }}{% if names|length > 1 -%}
<span class="legend">{% for name in names %}<i class="k{{ loop.index0 }}"></i>{{ name }}
{% endfor %}</span>{% endif %}</h3>{{ svg|safe }}</div>{% endfor %}</div>{% endif %}
{% if samples %}<h2>Samples</h2>{% endif %}
{% for sample in samples %}<div class="card sample"><dl>
{% for kind, name, text in sample if text is not none %}<dt>{{ name }}</dt>
<dd class="{{ kind }}"><pre>{{ text }}</pre></dd>{% endfor %}</dl></div>{% endfor %}
<h2>Last values</h2>{{ table(last_values) }}
<h2>Config</h2>{{ table(config) }}
<h2>Run card</h2>{{ table(run_card) }}
</main></body></html>
"""


def finish_report(
    folder: str | PathLike[str],
    card: RunCard,
    *,
    peak: Peak | None = None,
    ended: str | None = None,
    say: Callable[[str], None] = print,
) -> list[Path]:
    """Writes report.html and loss.png from metrics.jsonl and the samples.

    `peak` is that of the MFU; `ended` says why the run ended before its last step, if it did.

    Without matplotlib there is no loss.png and no chart in the report; `say` and the report explain
    how to install it.

    Returns:
        The files written.

    Raises:
        RunError: metrics.jsonl or a file of samples is invalid, or a file cannot be written.
    """
    folder = Path(folder)
    rows = read_metrics(folder / "metrics.jsonl")
    report, plot = folder / "report.html", folder / "loss.png"
    before, after = (read_samples(folder / name) for name in (BEFORE, AFTER))
    page = html_report(folder.resolve().name, rows, card, before, after, peak, ended)
    with naming_file(report, RunError, "written"):
        write_whole(report, page.encode())
    try:
        save_plot(rows, plot)
    except MissingExtraError as error:
        say(f"no {plot.name}: {error}")
        return [report]
    return [report, plot]


def html_report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    card: RunCard,
    before: Sequence[EvalSample] = (),
    after: Sequence[EvalSample] = (),
    peak: Peak | None = None,
    ended: str | None = None,
) -> str:
    """Renders the report as HTML, with charts as inline SVG.

    Args:
        before, after: answers of the model before and after training.
    """
    counts, earlier = card.parameters, {sample.prompt: sample.prediction for sample in before}
    share = counts["trainable"] / counts["total"] if counts["total"] else 0.0
    hint, charts = None, []
    try:
        for name, curves in _curves(rows, card.config.get("checkpoints", {}).get("metric")):
            svg = svg_chart(curves, label=f"{name} over the steps", noisy=name != LEARNING_RATE)
            charts.append((name, [each.name for each in curves], svg))
    except MissingExtraError as error:
        hint = str(error)
    last: dict[str, Any] = {}
    for row in rows:
        last |= {name: value for name, value in row.items() if value is not None}
    run_card = [
        ("parameters", f"{counts['total']:,}"),
        ("trainable", f"{counts['trainable']:,} ({share:.2%})"),
        *(
            (name, f"{file.path}, {file.bytes:,} bytes, SHA-256 {file.sha256}")
            for name, file in card.data.items()
        ),
        *start_rows(card.starts[-1]),
        *([] if peak is None else [("peak speed of the devices", str(peak))]),
        *(
            (
                start.time
                + ("" if start.resumed_at is None else f", from step {start.resumed_at}"),
                " ".join(start.command),
            )
            for start in card.starts
        ),
    ]
    samples = [
        (
            ("prompt", "Prompt", sample.prompt),
            ("reference", "Reference", sample.reference),
            ("before", "Before training", earlier.get(sample.prompt)),
            ("after", "After training", sample.prediction),
        )
        for sample in after
    ]
    page = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    return page.render(
        title=title,
        css=CSS,
        started=card.starts[0].time,
        steps=sum(row["step"] > 0 for row in rows),
        ended=ended,
        highlights=_highlights(rows, last),
        hint=hint,
        charts=charts,
        samples=samples,
        last_values=[(name, _number(value)) for name, value in last.items()],
        config=[
            (name, value if isinstance(value, str) else json.dumps(value))
            for name, value in flat(card.config).items()
        ],
        run_card=run_card,
    )


def _curves(
    rows: Sequence[Mapping[str, Any]], metric: str | None
) -> Iterable[tuple[str, list[Curve]]]:
    """Yields titles and curves of the charts for which the rows have numbers, that of the metric
    that chose the checkpoint first."""
    shown = {name for _, fields in CHARTS for name, _ in fields}
    others = dict.fromkeys(name for row in rows for name in row if name.startswith("eval_"))
    more = [
        (f"Evaluation: {name.removeprefix('eval_')}", ((name, name),))
        for name in others
        if name not in shown
    ]
    charts = sorted((*CHARTS, *more), key=lambda chart: metric not in dict(chart[1]))
    for title, fields in charts:
        drawn = (curve(rows, field, name) for field, name in fields)
        curves = [each for each in drawn if each is not None]
        if curves:
            yield title, curves


def _highlights(
    rows: Sequence[Mapping[str, Any]], last: Mapping[str, Any]
) -> Iterable[tuple[str, str]]:
    """Yields names and values of the tiles at the top."""
    if "loss" in last:
        yield "last training loss", _number(last["loss"])
    evaluated = curve(rows, "eval_loss")
    if evaluated is not None and evaluated.points:
        step, best = min(evaluated.points, key=lambda point: point[1])
        yield f"lowest evaluation loss, step {step:,.0f}", _number(best)
    for field, name in (
        ("eval_perplexity", "perplexity"),
        ("eval_accuracy", "accuracy"),
        ("eval_rewards/accuracies", "share of pairs with the chosen answer preferred"),
    ):
        if field in last:
            yield f"last evaluation {name}", _number(last[field])
    speeds = curve(rows, "tokens_per_second")
    if speeds is not None and speeds.points:
        ordered = sorted(y for _, y in speeds.points)
        yield "tokens a second, median", f"{ordered[len(ordered) // 2]:,.0f}"
    if rows:
        yield "last step", f"{rows[-1]['step']:,}"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.5g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def write_samples(path: Path, samples: Sequence[EvalSample]) -> None:
    """Saves answers for a later report, possibly written by another process."""
    text = json.dumps([dataclasses.asdict(sample) for sample in samples], indent=1)
    with naming_file(path, RunError, "written"):
        write_whole(path, text.encode())


def read_samples(path: Path) -> list[EvalSample]:
    """Reads what `write_samples` wrote; an empty list if there is no file.

    Raises:
        RunError: the file is invalid.
    """
    if not path.exists():
        return []
    try:
        return [EvalSample(**sample) for sample in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{path}: cannot be read ({error}); move it away") from None


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
    found = [(row["step"], row[field]) for row in rows if field in row]
    values = [(step, y) for step, y in found if type(y) in (int, float)]
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
    return [(fmean(x for x, _ in each), fmean(y for _, y in each)) for each in bins]


def smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]] | None:
    """Running mean over a twentieth of the curve; None for a short curve."""
    if len(points) < MIN_SMOOTHED:
        return None
    reach, steps = max(len(points) // 40, 1), np.arange(len(points))
    sums = np.cumsum([0.0, *(y for _, y in points)])
    first, last = np.maximum(steps - reach, 0), np.minimum(steps + reach + 1, len(points))
    means = (sums[last] - sums[first]) / (last - first)
    return [(x, float(mean)) for (x, _), mean in zip(points, means, strict=True)]


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
    values = [y for each in curves for _, y in each.points]
    if values and max(values) - min(values) <= FLAT * max(map(abs, values)):
        # The axis of values that hardly differ begins at zero.
        bottom, top = 1.05 * min(0.0, *values), 1.05 * max(0.0, *values)
        axes.set_ylim(bottom, top if top > bottom else 1.0)
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
    with naming_file(Path(path), RunError, "written"), replacing(Path(path)) as partial:
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
