"""What is said of shards of which a window has few classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from images import encode, photo
from plans import write_as
from runs import composed

from effloop.assemble.window import _warn_if_sorted
from effloop.cli.main import main
from effloop.data.source import Tail, sources
from effloop.data.windows import WindowOrder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """8 classes of 6 images each."""
    for split in ("train", "val"):
        for number in range(48):
            path = tmp_path / f"photos/{split}/{number // 6}/{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(photo(16, 16, number), "JPEG"))
    return tmp_path / "photos"


def said(root: Path, capsys: pytest.CaptureFixture[str], window: int = 2) -> str:
    source = sources.build(composed("data=tar", f"data.root={root}").data, "train")
    counts = tuple(source.shard_files()[1].tolist())  # type: ignore[attr-defined]
    assert len(counts) == 10
    capsys.readouterr()
    _warn_if_sorted(source, WindowOrder(48, 4, 0, Tail.drop, shards=counts, window=window))
    return capsys.readouterr().err


def test_sorted_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_as("tar", folder, tmp_path / "sorted", shard_bytes=6 * 2048)
    line = "the samples are sorted by class, so that 2 shards have 3 of 8 classes"
    assert line in said(tmp_path / "sorted", capsys)
    assert said(tmp_path / "sorted", capsys, window=6) == ""


def test_convert_writes_shuffled_shards(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"data.root={folder}", "to=tar", f"out={tmp_path}/mixed", "index=none"]
    assert main(["convert", *words, "shuffle=true"]) == 0
    source = sources.build(composed("data=tar", f"data.root={tmp_path}/mixed").data, "train")
    assert len({*source.targets[:12].tolist()}) > 4
    order = WindowOrder(48, 4, 0, Tail.drop, shards=(6,) * 8, window=2)
    capsys.readouterr()
    _warn_if_sorted(source, order)
    assert capsys.readouterr().err == ""
