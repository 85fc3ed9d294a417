from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import open_source, read_bytes, write_as
from runs import TINY

from effloop import config as configs
from effloop.bench import scale
from effloop.bench.storage import data_config_for
from effloop.cli.main import main
from effloop.data.source.storage.index import index_path


@pytest.fixture(scope="module")
def small(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_as("tar", photos, tmp_path_factory.mktemp("small") / "tar")


def test_entries_go_round(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "_BLOCK", 7)  # so that there are several
    scale.write_scaled_index(small, tmp_path / "big", 90)
    first, grown = open_source("tar", small), open_source("tar", tmp_path / "big")
    assert len(grown) == 90
    assert grown.classes == first.classes
    assert grown.labels.tolist() == [first.labels[i % 40] for i in range(90)]
    assert [grown.key(i) for i in range(90)] == [f"{i:09}" for i in range(90)]
    assert [read_bytes(grown, i) for i in range(90)] == [read_bytes(first, i % 40) for i in range(90)]
    for index in range(90):
        grown.verify(index)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["threads", "processes"])
def test_one_process(small: Path, tmp_path: Path, engine: str) -> None:
    scale.write_scaled_index(small, tmp_path / "big", 500)
    config = configs.compose([f"data.root={small}", f"engine={engine}", *TINY, "num_workers=1"])
    config.data = data_config_for(config.data, "tar", tmp_path / "big", tmp_path)
    found = scale._load(config, config, index_path(tmp_path / "big", "train"))
    assert found["open_ms"] > 0
    assert found["first_batch_s"] > 0
    assert set(found["main"]) == {"rss", "pss", "private", "own", "held"}
    assert found["worker"].get("rss", 0) > 0 if engine == "processes" else found["worker"] == {}


@pytest.mark.slow
def test_figures(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["samples=4000", "repeats=1", "work=work", "out=result.json", "image_size=16", "batch_size=8"]
    assert main(["bench", "what=scale", *words]) == 0
    result = json.loads((here / "result.json").read_text())
    assert (result["base"], list(result["samples"])) == (1515, ["1515", "4000"])
    for count, row in result["samples"].items():
        assert row["index_bytes"] > 30 * int(count)
        assert all(row[key] > 0 for key in ("open_ms", "first_batch_s", "cold_open_ms", "cold_first_batch_s"))
        assert (
            set(row["main"]) == set(row["cold_main"]) == set(row["worker"]) == {"rss", "pss", "private", "own", "held"}
        )
    assert set(result["samples"]["1515"]["main"].values()) == {0}  # what the others are compared with
    assert "4,000" in capsys.readouterr().out
    assert list((here / "work").iterdir()) == []
