from __future__ import annotations

import csv
import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from effloop.cli.main import main
from effloop.measure.bench_augment import GRID, Case, table_rows

COLUMNS = (
    *("table", "recipe", "library", "device", "batch_size", "num_workers", "passes", "images"),
    *("median_s", "least_s", "most_s", "ms_per_image", "cores_used", "ratio_of", "ratio"),
    *("reported_s", "reported_ms_per_image", "reported_ratio", "engine", "repeats", "gpu_ran_on"),
)


def measured(seconds: float, cores: float = 1.0) -> dict[str, float]:
    """What a process says of a pass over 10 images."""
    return {"per_s": 10 / seconds, "cores_used": cores, "waited": 0.0, "bytes": 0.0}


def close(rows: list[dict[str, Any]], key: str, *wanted: float | None) -> None:
    assert [row[key] for row in rows] == pytest.approx(list(wanted))


def test_rows_of_libraries() -> None:
    cases = [Case("libraries", name, "cpu", 32, 1) for name in ("albumentations", "torchvision", "native")]
    turns = {"albumentations": (2, 3, 7), "torchvision": (6, 6, 6), "native": (1, 1.5, 1.2)}
    rows = table_rows(cases, {name: [[measured(s, 2.0)] for s in found] for name, found in turns.items()}, 10)
    close(rows, "median_s", 3, 6, 1.2)
    close(rows, "least_s", 2, 6, 1)
    close(rows, "most_s", 7, 6, 1.5)
    close(rows, "ms_per_image", 300, 600, 120)
    close(rows, "cores_used", 2, 2, 2)
    close(rows, "ratio", 0.5, 1, 0.2)
    close(rows, "reported_s", 81.40, 119.75, None)
    close(rows, "reported_ms_per_image", 81400 / 9469, 119750 / 9469, None)
    close(rows, "reported_ratio", 81.40 / 119.75, 1, None)
    assert [row["ratio_of"] for row in rows][::2] == ["albumentations/torchvision", "native/torchvision"]
    assert {row["recipe"] for row in rows} == {"resize_crop"}


def test_rows_of_devices() -> None:
    cases = [Case("device", "native", device, 32, 1) for device in ("cpu", "gpu")]
    turns = {"cpu": [measured(4, 2), measured(4), measured(4), measured(4)], "gpu": [measured(2)] * 4}
    rows = table_rows(cases, {name: [found] for name, found in turns.items()}, 10)
    assert [(row["passes"], row["device"]) for row in rows[:3]] == [(1, "cpu"), (1, "gpu"), (2, "cpu")]
    close(rows[::2], "median_s", 4, 8, 12, 16)
    close(rows[1::2], "median_s", 2, 4, 6, 8)
    close(rows[::2], "ms_per_image", 400, 400, 400, 400)
    close(rows[::2], "cores_used", 2, 1.5, 4 / 3, 1.25)
    close(rows[1::2], "ratio", 2, 2, 2, 2)
    close(
        rows[1::2], "reported_ratio", *(a / b for a, b in zip(rows_told(rows[::2]), rows_told(rows[1::2]), strict=True))
    )
    close(rows[6:], "reported_ms_per_image", 455330 / 9467 / 4, 415640 / 9467 / 4)


def rows_told(rows: list[dict[str, Any]]) -> list[float]:
    return [row["reported_s"] for row in rows]


def test_unreported_batch_sizes() -> None:
    case = Case("libraries", "torchvision", "cpu", 5, 3)
    (row,) = table_rows([case], {"torchvision": [[measured(1)]]}, 10)
    assert [row[key] for key in ("reported_s", "reported_ms_per_image", "reported_ratio")] == [None] * 3


def test_grid_is_what_was_reported() -> None:
    assert GRID == "1x1,2x1,32x1,128x1,256x1,128x2,256x2"


@pytest.mark.slow
def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.root={photos}", "repeats=2", "grid=256x1", "limit=20", "out=result.json"]
    assert main(["bench", "what=augment", *words, "batch_size=8", "num_workers=0", "device=cpu"]) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["what"], result["images"], result["repeats"]) == ("augment", 20, 2)
    assert result["gpu_ran_on"].startswith("the CPU")
    libraries = ["albumentations"] if find_spec("albumentations") else []
    libraries += ["torchvision", "native", "native fast"]
    rows = result["rows"]
    by_library = [row for row in rows if row["table"] == "libraries"]
    assert [row["library"] for row in by_library] == libraries
    assert {(row["batch_size"], row["num_workers"], row["passes"]) for row in by_library} == {(256, 1, 1)}
    by_device = [(row["library"], row["passes"], row["device"]) for row in rows if row["table"] == "device"]
    assert by_device == [
        (name, passes, device)
        for name in ("torchvision", "native")
        for passes in range(1, 5)
        for device in ("cpu", "gpu")
    ]
    for row in rows:
        assert len(row["seconds"]) == 2
        assert 0 < row["least_s"] <= row["median_s"] <= row["most_s"] == max(row["seconds"])
        assert row["ms_per_image"] == pytest.approx(1000 * row["median_s"] / 20 / row["passes"])
        assert row["cores_used"] > 0
    with (here / "result.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    assert tuple(written[0]) == COLUMNS
    assert [float(row["median_s"]) for row in written] == [row["median_s"] for row in rows]
    out = capsys.readouterr().out
    assert "device=gpu: batch operations ran on the CPU" in out
    assert all(f"│{name}" in out for name in libraries)
    assert max(map(len, out.replace(str(photos), "").splitlines())) <= 120
    with Image.open(here / "result.png") as image:
        assert image.format == "PNG"
    assert not (here / "outputs").exists()


@pytest.mark.slow
def test_what_is_not_installed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "albumentations"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "albumentations", None)
    words = ["table=libraries", "grid=4x0", "limit=4", "repeats=1", "data.check=4"]
    assert main(["bench", "what=augment", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "albumentations is left out, it isn't installed: pip install 'effloop[albumentations]'"
    (folder,) = (here / "outputs" / "bench").iterdir()
    assert folder.name.startswith("augment-20")
    assert sorted(path.name for path in folder.iterdir()) == ["augment.csv", "augment.json", "augment.png"]
    rows = json.loads((folder / "augment.json").read_text())["rows"]
    assert [row["library"] for row in rows] == ["torchvision", "native", "native fast"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("table=librarys", "table: no table 'librarys'; have both, libraries, device; did you mean 'libraries'?"),
        ("limit=0", "limit: '0' is not allowed; set a whole number above 0, or all"),
        ("limit=some", "limit: 'some' is not allowed; set a whole number above 0, or all"),
        ("grid=32", "grid: '32' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2"),
        ("grid=0x1", "grid: '0x1' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2"),
        ("grid=8x1,8x1", "grid: '8x1,8x1' is not allowed; set BATCHxWORKERS, each once, as in grid=32x1,128x2"),
        ("repeats=no", "repeats: 'no' is not allowed; set a whole number from 1 to 1,000,000"),
        (
            "augment.ops.flip.p=1",
            "augment: what=augment has its own recipes, resize_crop at 256 pixels and resize_crop_jitter at 224 "
            "pixels; leave out what sets augment",
        ),
        (
            "image_size=224",
            "image_size: what=augment has its own recipes, resize_crop at 256 pixels and resize_crop_jitter at 224 "
            "pixels; leave out what sets image_size",
        ),
        (
            "out=a.csv",
            "out: a.csv is not allowed, as a .csv and a .png are written beside it; set out=FILE.json",
        ),
        ("out=nowhere/a.json", "out: nowhere/a.json can't be written: No such file or directory; set out=FILE.json"),
        ("device=cuda:99", None),
    ],
)
def test_refusals(words: str, wanted: str | None, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=augment", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (err.count("\n"), out) == (1, "")
    if wanted:
        assert err == f"effloop: {wanted}\n"
    assert not list(here.iterdir())


def test_a_plot_in_the_way(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.png").mkdir()
    assert main(["bench", "what=augment", "out=a.json"]) == 2
    assert capsys.readouterr().err == "effloop: out: a.png can't be written: Is a directory; set out=FILE.json\n"
    assert [path.name for path in here.iterdir()] == ["a.png"]


def test_no_folder_for_the_figures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "outputs").write_text("a file")
    assert main(["bench", "what=augment"]) == 2
    err = capsys.readouterr().err
    assert "can't be written: Not a directory; set out=FILE.json" in err
    assert err.count("\n") == 1


def test_data_that_is_not_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "what=augment", "data.root=nowhere"]) == 2
    out, err = capsys.readouterr()
    assert "nowhere" in err
    assert (err.count("\n"), out) == (1, "")
    assert not list(here.iterdir())
