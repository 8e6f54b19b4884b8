"""The report: one valid file, nothing to load, every text escaped; and the plot."""

from __future__ import annotations

import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from jaxllm.training.evaluation import EvalSample
from jaxllm.training.monitor.metrics_log import MetricsLog
from jaxllm.training.monitor.report import (
    AFTER,
    BEFORE,
    MAX_POINTS,
    Curve,
    curve,
    finish_report,
    html_report,
    save_plot,
    smoothed,
    svg_chart,
    thinned,
    write_samples,
)
from jaxllm.training.monitor.run_card import make_run_card

EVIL = "<script>alert(1)</script>\"'&<img src=http://example.com/x.png>"
VOID = {"meta", "br", "img", "link", "input"}


class Page(HTMLParser):
    """Checks that tags close in order; keeps texts and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"an attribute of {tag} twice"
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)

    def text(self) -> str:
        return " ".join(self.texts)


def run(folder: Path, steps: int = 60):
    with MetricsLog(folder) as log:
        for step in range(1, steps + 1):
            metrics = {
                "loss": float("nan") if step == 7 else 2.0 + 3.0 / step,
                "lr": 1e-4 * step,
                "grad_norm": 1.0 / step,
                "tokens_per_second": 1000.0 + step,
            }
            if step % 20 == 0:
                metrics |= {"eval_loss": 2.0 + 10 / step, "eval_rouge1": step / 100}
            log.log(step, metrics)
    return make_run_card(
        config={"model": EVIL, "optimizer": {"lr": 1e-4}, EVIL: "x"},
        total_parameters=2_000_000,
        trainable_parameters=20_000,
        command=["train.py", EVIL],
    )


@pytest.fixture
def page(tmp_path: Path) -> Page:
    folder = tmp_path / "my <run>"
    card = run(folder)
    for name, answer in ((BEFORE, "unsinn"), (AFTER, EVIL)):
        write_samples(folder / name, [EvalSample(EVIL, "sense", answer)])
    written = finish_report(folder, card)
    assert [path.name for path in written] == ["report.html", "loss.png"]
    return Page(written[0].read_text(encoding="utf-8"))


@pytest.mark.ci
def test_it_shows_the_run(page: Page) -> None:
    text = page.text()
    for expected in ("my <run>", "optimizer.lr", "20,000 (1.00%)", "unsinn", "sense", "60 steps"):
        assert expected in text
    titles = [
        "Loss", "Learning rate", "Gradient norm", "Tokens a second", "Evaluation: rouge1",
    ]  # fmt: skip
    assert [title for title in titles if title not in page.texts] == []
    assert sum(tag == "svg" for tag, _ in page.tags) == len(titles)
    tiles = dict(zip(page.texts[1:], page.texts, strict=False))
    assert tiles["last training loss"] == "2.05"
    assert tiles["lowest evaluation loss, step 60"] == "2.1667"
    assert tiles["tokens a second, median"] == "1,031"


@pytest.mark.ci
def test_nothing_is_loaded_or_run(page: Page) -> None:
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            assert not name.startswith("on"), tag
            assert name not in ("src", "xlink:href", "srcset", "action"), tag
            # A chart refers to its own parts: markers, the frame that cuts curves off.
            assert name != "href" or (tag == "use" and (value or "").startswith("#")), (tag, value)
            assert not re.search(r"//|url\((?!#)", value or ""), (tag, name, value)
    assert EVIL in page.text(), "shown as it is"


def test_styles_load_nothing(tmp_path: Path) -> None:
    html = html_report("run", [], run(tmp_path))
    style = html[html.index("<style>") : html.index("</style>")]
    assert not re.search(r"@import|url\(|//", style)
    Page(html)


def test_without_matplotlib_there_is_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said: list[str] = []
    (report,) = finish_report(tmp_path, run(tmp_path), say=said.append)
    assert said == ["no loss.png: plots need the package matplotlib: pip install -e '.[plot]'"]
    page = Page(report.read_text(encoding="utf-8"))
    assert "charts need the package matplotlib: pip install -e '.[plot]'" in page.texts
    assert "svg" not in dict(page.tags)
    assert "20,000 (1.00%)" in page.text()


@pytest.mark.ci
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 1, "loss": 2.0}],
        [{"step": 1, "loss": math.nan}, {"step": 2, "loss": math.inf}],
        [{"step": s, "loss": 3 / s, "lr": 0.1, "eval_loss": 1.0} for s in range(1, 1000)],
    ],
    ids=["none", "one", "not finite", "many"],
)
def test_any_rows_can_be_drawn(tmp_path: Path, rows: list) -> None:
    save_plot(rows, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    card = make_run_card(config={}, total_parameters=0, trainable_parameters=0)
    Page(html_report("run", rows, card))


@pytest.mark.ci
def test_a_chart_stays_in_its_frame() -> None:
    points = [(float(s), 5.0 / s) for s in range(1, 3001)]
    chart = svg_chart([Curve("loss", points, nonfinite=(7,))], label="loss")
    width, height = map(float, re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', chart)[0])
    drawn = [
        [tuple(map(float, pair.split())) for pair in path.split("L")]
        for path in re.findall(r'd="M([^"z]+)"[^>]*stroke: var\(--s0\)', chart)
    ]
    assert len(drawn) == 2, "as it is and smoothed"
    for line in drawn:
        assert all(0 <= x <= width and 0 <= y <= height for x, y in line)
        ys = [y for _, y in line]
        assert ys == sorted(ys), "a falling loss goes down"
    assert "step 7: not finite" in chart


def test_long_curves_are_thinned() -> None:
    points = [(float(s), 5.0 / s) for s in range(1, 3001)]
    assert len(thinned(points)) == 375, "3000 points in eights"


def test_thinning_and_smoothing_keep_the_mean() -> None:
    points = [(float(i), float(i % 2)) for i in range(1200)]
    thin = thinned(points)
    assert len(thin) <= MAX_POINTS
    assert sum(y for _, y in thin) / len(thin) == pytest.approx(0.5, abs=0.2)
    smooth = smoothed(points)
    assert smooth is not None
    assert all(abs(y - 0.5) < 0.02 for _, y in smooth)
    assert [x for x, _ in smooth] == [x for x, _ in points]
    assert smoothed(points[:10]) is None


def test_curves_skip_steps_without_the_field() -> None:
    rows = [{"step": 1, "a": 1}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "a": math.inf}]
    assert curve(rows, "a") == Curve("a", [(1.0, 1.0)], nonfinite=(4,))
    assert curve(rows, "b") is None
