from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
from PIL import Image
from plans import line

from effloop.errors import ConfigError
from effloop.measure.figures import Panel, plot, write_csv

PANEL = Panel("a title", "ms", "batch", ["1", "32"], {"a": [(2.0, 1.0, 3.0), None], "b": [(1.0, 1.0, 1.0)] * 2})


def test_csv(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", [{"name": "ä, b", "s": 1.5, "told": None}, {"name": "c", "s": 2, "told": 3}])
    assert (tmp_path / "a.csv").read_bytes().startswith(b"name,s,told\n")
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert rows == [{"name": "ä, b", "s": "1.5", "told": ""}, {"name": "c", "s": "2", "told": "3"}]


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    marked = Panel("marked", "ms", "batch", ["1", "32"], PANEL.bars, {"a": [4.0, None], "b": [None, None]}, "reported")
    sizes = []
    for number, panels in enumerate(([PANEL], [PANEL, marked])):
        plot(tmp_path / f"{number}.png", panels)
        with Image.open(tmp_path / f"{number}.png") as image:
            assert image.format == "PNG"
            assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 10  # something is drawn
            sizes.append(image.size)
    assert sizes[1] == (sizes[0][0], 2 * sizes[0][1])


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = "the plot needs the package 'matplotlib'; pip install 'effloop[plot]'"
    with pytest.raises(ConfigError, match=line(wanted)):
        plot(tmp_path / "a.png", [PANEL])
    assert not list(tmp_path.iterdir())
