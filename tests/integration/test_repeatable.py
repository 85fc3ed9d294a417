"""The same command gives the same numbers, whoever loads the images."""

import pytest
from plans import write_as
from runs import TINY, call, rows, train

WAYS = {
    "again": (),
    "threads-2": ("num_workers=2", "engine.run_length=3"),
    "inline": ("engine=inline",),
    "processes-2": ("engine=processes", "num_workers=2"),
}


@pytest.mark.parametrize("way", WAYS)
def test_same_numbers(way, finished, photos, here):
    assert train(photos, "run=x", "epochs=3", *WAYS[way]) == 0
    assert rows(here / "outputs/x") == rows(finished)


@pytest.mark.nightly
def test_same_numbers_by_dali(photos, here, capfd):
    """Its pixels are its own: the same for any number of threads, wherever the images come from."""
    pytest.importorskip("nvidia.dali")
    memmap = write_as("memmap", photos, here / "set.effloop")
    assert train(photos, "run=x", "data=dali") == 0
    assert train(photos, "run=y", "engine=dali", "num_workers=2", "engine.prefetch=1") == 0
    assert train(memmap, "run=z", "engine=dali", "data=memmap", "num_workers=1") == 0
    assert capfd.readouterr().err == ""
    wanted = rows(here / "outputs/x")
    assert rows(here / "outputs/y") == rows(here / "outputs/z") == wanted
    assert train(photos, "run=threads") == 0
    other = rows(here / "outputs/threads")
    assert other != wanted
    assert other[0]["loss"] == pytest.approx(wanted[0]["loss"], rel=0.02)


@pytest.mark.nightly
def test_dali_from_the_command_line(photos, here):
    pytest.importorskip("nvidia.dali")
    args = ["data=dali", f"data.root={photos}", *TINY, "num_workers=2", "run=x"]
    code, _, err = call(*args, cwd=here)
    assert (code, err) == (0, "")
    code, _, err = call("resume", "outputs/x", "epochs=3", cwd=here)
    assert (code, err) == (0, "")


def test_another_seed_gives_others(finished, photos, here):
    assert train(photos, "run=x", "epochs=3", "seed=1") == 0
    assert rows(here / "outputs/x")[0]["loss"] != rows(finished)[0]["loss"]


def test_learns(photos, here):
    """Three colours are told apart after a few epochs; chance is a third."""
    assert train(photos, "run=x", "epochs=12", "lr=0.01", "task.label_smoothing=0") == 0
    found = rows(here / "outputs/x")
    assert found[-1]["top1"] > 0.9
    assert found[-2]["loss"] < found[0]["loss"] / 2
