from __future__ import annotations

import csv
from pathlib import Path

from PIL import Image

from effloop.report.figures import Bar, BarPanel, plot_bars, write_csv

BARS = [Bar("1", "a", (2.0, 1.0, 3.0)), Bar("1", "b", (1.0, 1.0, 1.0)), Bar("32", "b", (1.0, 1.0, 1.0))]
PANEL = BarPanel("a title", "ms", "batch", BARS)


def test_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"name": "ä, b", "s": 1.5, "told": None}, {"name": "c", "s": 2, "told": 3}])
    assert (tmp_path / "a.csv").read_bytes().startswith(b"name,s,told\n")
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"name": "ä, b", "s": "1.5", "told": ""}, {"name": "c", "s": "2", "told": "3"}]


def test_texts_are_no_formulas(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"@x": "=1+1", "y": "-1e3", "z": -1.5, "path": "=a/b"}])
    assert (tmp_path / "a.csv").read_text() == "'@x,y,z,path\n'=1+1,-1e3,-1.5,./=a/b\n"


def test_plot(tmp_path: Path) -> None:
    marked = PANEL._replace(bars=[BARS[0]._replace(mark=4.0), *BARS[1:]], marked="reported")
    sizes = []
    for number, panels in enumerate(([PANEL], [PANEL, marked])):
        plot_bars(tmp_path / f"{number}.png", panels)
        with Image.open(tmp_path / f"{number}.png") as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10  # something is drawn
            sizes.append(image.size)
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1])
