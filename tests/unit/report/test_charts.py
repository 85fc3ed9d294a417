"""Pictures of runs, by what is on their axes."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from effloop.report.charts import plot_curves, plot_sweep, save_png, style, to_svg
from effloop.report.comparison import compare_runs
from effloop.runs.reader import RunRecord


@pytest.fixture(autouse=True)
def _styled() -> Iterator[None]:
    with style():
        yield


def jobs(*overrides: str, top1: list[float | None] | None = None, state: str = "done") -> list[RunRecord]:
    scores = top1 or [0.1 * (number + 1) for number in range(len(overrides))]
    return [
        RunRecord(
            path=Path(f"/sweep/{number}"),
            metrics=[{"split": "val", "epoch": 0, "step": 5, "top1": score, "loss": 1.0}],
            summary={"images_per_s": 100.0 + number},
            job={"number": number, "overrides": words.split(), "state": state},
        )
        for number, (words, score) in enumerate(zip(overrides, scores, strict=True))
    ]


def points(axes: Any) -> dict[int, tuple[float, float]]:
    """{run: x and y} of the marks that are drawn."""
    marks = [line for line in axes.lines if str(line.get_gid()).startswith("run-")]
    return {int(line.get_gid()[4:]): tuple(float(v[0]) for v in line.get_data()) for line in marks}


def legend(figure: Any) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()] if figure.legends else []


class TestAgainst:
    def test_one_key_of_numbers(self):
        left, right = plot_sweep(compare_runs(jobs("lr=0.01", "lr=1", "lr=0.1"), "val/top1"), "a title").axes
        assert points(left) == {0: (0.01, 0.1), 1: (1.0, 0.2), 2: (0.1, pytest.approx(0.3))}
        assert points(right) == {0: (0.01, 100), 1: (1.0, 101), 2: (0.1, 102)}
        assert (left.get_xscale(), left.get_xlabel()) == ("log", "lr")
        assert [text.get_text() for text in left.get_xticklabels()] == ["0.01", "0.1", "1"]
        line = left.lines[0]
        assert (line.get_linestyle(), list(line.get_xdata())) == ("-", [0.01, 0.1, 1.0])

    @pytest.mark.parametrize(
        ("values", "scale"),
        [("0.001 0.003 0.01", "log"), ("16 32 64", "log"), ("1 2 3 4", "linear"), ("0 1 2 4", "linear")],
    )
    def test_what_grows_by_factors_has_a_logarithmic_axis(self, values, scale):
        axes = plot_sweep(compare_runs(jobs(*(f"lr={value}" for value in values.split())), "val/top1")).axes[0]
        assert axes.get_xscale() == scale
        assert [text.get_text() for text in axes.get_xticklabels()] == values.split()

    def test_seeds_are_one_point(self):
        words = [f"lr={lr} seed={seed}" for lr in (0.1, 0.2) for seed in (1, 2)]
        figure = plot_sweep(compare_runs(jobs(*words, top1=[0.1, 0.3, 0.2, 0.6]), "val/top1"))
        axes = figure.axes[0]
        assert (axes.get_xlabel(), legend(figure), len(points(axes))) == ("lr", [], 4)
        assert list(axes.lines[0].get_ydata()) == [pytest.approx(0.2), pytest.approx(0.4)]

    def test_a_grid_is_lines(self):
        words = [f"num_workers={workers} batch_size={size}" for workers in (0, 1, 2) for size in (32, 64)]
        figure = plot_sweep(compare_runs(jobs(*words), "images/s"))
        assert [axes.get_title(loc="left") for axes in figure.axes] == ["images/s", "val/top1"]
        assert (figure.axes[0].get_xscale(), figure.axes[0].get_xlabel()) == ("linear", "num_workers")
        assert legend(figure) == ["32", "64"]
        assert figure.axes[0].get_ylim()[0] == 0

    def test_runs_without_numbers_are_named(self):
        figure = plot_sweep(compare_runs(jobs("model=a", "model=b", "model=c", top1=[0.1, None, 0.3]), "val/top1"))
        assert [text.get_text() for text in figure.axes[0].get_xticklabels()] == ["0: model=a", "2: model=c"]
        assert points(figure.axes[0]) == {0: (0, 0.1), 2: (2, pytest.approx(0.3))}

    def test_hundred_runs_are_numbered(self):
        axes = plot_sweep(compare_runs(jobs(*(f"lr={n} wd={n % 60}" for n in range(100))), "val/top1")).axes[0]
        assert axes.get_xlabel() == "run"
        assert len(points(axes)) == 100

    def test_what_failed_is_counted_and_left_out(self, tmp_path):
        figure = plot_sweep(compare_runs(jobs("lr=1", "lr=2", "lr=3", top1=[0.1, 0.2, None]), "val/top1"), "a title")
        assert figure.get_suptitle() == "a title\n3 runs: 3 done; 1 without val/top1; best, ringed: 1: lr=2"
        figure = plot_sweep(compare_runs(jobs("lr=1", "lr=2", state="failed"), "val/top1"), "$ \\nothing")
        assert figure.get_suptitle() == "$ \\nothing\n2 runs: 2 failed"
        assert not points(figure.axes[0])
        save_png(figure, tmp_path / "a.png")
        with Image.open(tmp_path / "a.png") as image:
            assert image.size[0] == 1500


def trained(epochs: int, per_epoch: int, **facts: Any) -> RunRecord:
    steps = range(1, epochs * per_epoch + 1)
    metrics: list[dict[str, Any]] = [
        {"split": "train", "epoch": (s - 1) // per_epoch, "step": s, "loss": 1 / s} for s in steps
    ]
    metrics += [
        {"split": "val", "epoch": e, "step": (e + 1) * per_epoch, "loss": 1.0, "top1": 0.5} for e in range(epochs)
    ]
    return RunRecord(path=Path("/run"), metrics=metrics, **facts)


def curves_of(runs: list[RunRecord]) -> dict[str, Any]:
    return plot_curves(compare_runs(runs, "val/loss"))


class TestCurves:
    def test_over_epochs_whatever_their_length(self):
        figures = curves_of([trained(2, 5), trained(2, 10)])
        assert list(figures) == ["train/loss", "val/loss", "val/top1"]  # no perf.jsonl, no images/s
        first, other = figures["train/loss"].axes[0].lines
        assert first.get_xdata() == pytest.approx(np.arange(1, 11) / 5)
        assert other.get_xdata() == pytest.approx(np.arange(1, 21) / 10)
        assert list(figures["val/loss"].axes[0].lines[0].get_xdata()) == [1, 2]

    def test_goes_on_behind_the_last_evaluation(self):
        run = trained(2, 4)
        more = [{"split": "train", "epoch": 2, "step": 10, "loss": 1.0}]
        longer = RunRecord(path=Path("/run"), metrics=[*run.metrics, *more])
        x = curves_of([longer])["train/loss"].axes[0].lines[0].get_xdata()
        assert x[-1] == 2.5

    def test_long_ones_are_thinned_and_gaps_stay(self):
        run = trained(10, 2000)
        metrics = [{**row, "loss": None} if row["step"] == 1 else row for row in run.metrics]
        (line,) = curves_of([RunRecord(path=Path("/run"), metrics=metrics)])["train/loss"].axes[0].lines
        assert len(line.get_xdata()) <= 8000
        assert math.isnan(line.get_ydata()[0])
        assert line.get_ydata()[-1] == pytest.approx(1 / 20000, rel=1e-3)

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("worst", [1e28, pytest.param(math.inf, marks=pytest.mark.nightly)])
    def test_one_that_diverges_flattens_no_other(self, tmp_path, worst):
        """Neither in the curves, nor against what was swept; and matplotlib warns of nothing."""
        runs = [trained(3, 5, job={"number": n, "overrides": [f"lr={n + 1}"], "state": "done"}) for n in range(3)]
        rows = [{**row, "loss": worst} if row["step"] > 9 else row for row in runs[2].metrics]
        speed = [{"span": "train", "epoch": 0, "step": step, "images_per_s": 10.0**step} for step in (1, 2, 3)]
        diverged = RunRecord(path=Path("/run"), metrics=rows, perf=speed, job=runs[2].job)
        comparison = compare_runs([*runs[:2], diverged], "val/loss")
        for figure in (plot_sweep(comparison), *plot_curves(comparison).values()):
            save_png(figure, tmp_path / "a.png")
        assert plot_curves(comparison)["val/loss"].axes[0].get_ylim()[1] < 1.2
        assert plot_curves(comparison)["train/loss"].axes[0].get_ylim()[1] < 1.2


class TestSvg:
    def test_is_an_element_with_runs(self):
        text = to_svg(curves_of([trained(2, 5), trained(2, 5)])["val/top1"], "scores")
        root = ElementTree.fromstring(text.replace("xlink:href", "href"))
        assert root.get("aria-label") == "scores"
        assert [each.get("data-run") for each in root.iter() if each.get("data-run")] == ["0", "1"]
        assert "currentColor" in text
        ids = re.findall(r' id="([^"]*)"', text)
        assert all(f"#{name}" in text for name in ids)  # none but those that are pointed at
        assert text == to_svg(curves_of([trained(2, 5), trained(2, 5)])["val/top1"], "scores")

    def test_names_are_text(self):
        hostile = "model=<script>alert(1)</script>&$x^2$"
        text = to_svg(plot_sweep(compare_runs(jobs(hostile, "model=b"), "val/top1")), "scores")
        assert "<script" not in text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;&amp;$x^2$" in text
