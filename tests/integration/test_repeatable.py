"""The same command gives the same numbers, whoever loads the images."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import rows, train

WAYS = {
    "again": (),
    "threads-1": ("num_workers=1",),
    "threads-2": ("num_workers=2", "engine.run_length=3"),
    "inline": ("engine=inline",),
    "processes-0": ("engine=processes",),
    "processes-1": ("engine=processes", "num_workers=1"),
    "processes-2": ("engine=processes", "num_workers=2"),
    "data=folder": ("data=folder",),
}


@pytest.mark.parametrize("way", WAYS)
def test_same_numbers(way: str, finished: Path, photos: Path, here: Path) -> None:
    assert train(photos, "run=x", "epochs=3", *WAYS[way]) == 0
    assert rows(here / "outputs/x") == rows(finished)


def test_another_seed_gives_others(finished: Path, photos: Path, here: Path) -> None:
    assert train(photos, "run=x", "epochs=3", "seed=1") == 0
    assert rows(here / "outputs/x")[0]["loss"] != rows(finished)[0]["loss"]


def test_learns(photos: Path, here: Path) -> None:
    """Three colours are told apart after a few epochs; chance is a third."""
    assert train(photos, "run=x", "epochs=12", "lr=0.01", "optim.label_smoothing=0") == 0
    found = rows(here / "outputs/x")
    assert found[-1]["top1"] > 0.9
    assert found[-2]["loss"] < found[0]["loss"] / 2
