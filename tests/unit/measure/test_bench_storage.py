from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from runs import TINY

from effloop.cli.main import main


@pytest.mark.slow
def test_figures(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["formats=memmap,folder", "repeats=2", "work=work", "out=result.json", f"data.root={photos}"]
    assert main(["bench", "what=storage", *words, *TINY]) == 0
    result = json.loads((here / "result.json").read_text())
    sizes = {split: sum(f.stat().st_size for f in (photos / split).rglob("*.jpg")) for split in ("train", "val")}
    assert (result["images"], result["bytes"], result["image_size"]) == (40, sizes["train"], 16)
    assert list(result["formats"]) == ["folder", "memmap"]  # what the others are compared with stands first
    for figures in result["formats"].values():
        for key in ("open_ms", "read_per_s", "unchecked_per_s", "load_per_s", "cold_read_per_s", "cold_load_per_s"):
            assert len(figures[key]) == 2
            assert all(math.isfinite(value) and value > 0 for value in figures[key])
        assert 0 <= figures["cold_share_left"] <= 1
        assert set(figures["memory"]) == {"rss", "pss", "private", "own", "held"}
        assert figures["bytes"] >= sum(sizes.values())
        assert figures["disk_bytes"] > 0
    files = {name: figures["files"] for name, figures in result["formats"].items()}
    assert files == {"folder": 53 + 1, "memmap": 1}  # the scan of the split that is measured
    out = capsys.readouterr().out
    assert out.count("memmap") == 2
    assert "the same over folder" in out
    assert max(map(len, out.splitlines())) <= 120
    assert list((here / "work").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("what=storage formats=memmap,tarr", "formats: no format 'tarr'; have all, "),
        ("what=storage formats=", "bench: 'formats=' has no value; set formats=TEXT or drop it"),
        ("what=storage data.root=nope", "data.root: 'nope' is not there"),
        ("what=storage limit=3", "limit: what=storage doesn't take it; set what to one of augment"),
        ("what=loop formats=all", "formats: what=loop doesn't take it; set what to one of storage"),
        ("what=loop repeats=0", "repeats: '0' is not allowed; set a whole number from 1 to 1,000,000"),
        ("what=loop out=a/b.json", "out: a/b.json can't be written: No such file or directory; set out="),
        ("what=loop out=.", "out: . can't be written: Is a directory; set out=FILE.json"),
        (
            "what=stroage",
            "what: 'stroage' is not allowed; set loop, step, ablate, loader, train, storage, augment or "
            "inference; did you mean 'storage'?",
        ),
    ],
)
def test_refusals(words: str, wanted: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert wanted in err
    assert (err.count("\n"), out) == (1, "")
