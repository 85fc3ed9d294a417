"""What was found on this machine for this data."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

import effloop
from effloop.data.source import Cache
from effloop.runs import findings
from effloop.runs.findings import Findings, pipeline_key

COMPOSED = effloop.compose()
FINGERPRINT = {"samples": 3, "bytes": 10, "sha256": "abc"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def of(**fingerprint: Any) -> Findings:
    return Findings.of(COMPOSED, {**FINGERPRINT, **fingerprint})


def test_rows_are_kept_by_pipeline_and_data(cache: Path) -> None:
    assert not Findings.any_here(COMPOSED)
    of().add("p", num_workers=3)
    of().add("q", num_workers=1)
    assert [row["num_workers"] for row in of().rows()] == [3, 1]
    [row] = of().rows("q")
    assert row == {"date": row["date"], "kind": "tune", "pipeline": "q", "num_workers": 1}
    assert of(bytes=11).rows() == []
    assert Findings.any_here(COMPOSED)


def test_another_machine_has_its_own(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of().add("p")
    monkeypatch.setattr(findings, "available_cores", lambda: 999)
    assert of().rows() == []
    assert not Findings.any_here(COMPOSED)


def test_damaged_lines_are_passed_over(cache: Path) -> None:
    of().add("p", number=1)
    path = of().path
    assert path is not None
    with path.open("ab") as file:
        file.write(b'[]\n\xff\xfe\n{"kind": "outcome", "pipeline": "p"}\n{"kind": "tune", "pipeline": "p", "num')
    of().add("p", number=2)
    assert [row["number"] for row in of().rows("p")] == [1, 2]


def test_no_place_for_them_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = Findings(tmp_path / "file" / "folder" / "rows.jsonl")
    nowhere.add("p")
    assert nowhere.rows() == []
    Findings(None).add("p")
    assert Findings(None).rows() == []


def test_speed_does_not_depend_on_all() -> None:
    words = [
        *("seed=3", "epochs=9", "lr=0.1", "run=other", "out=elsewhere", "optim.weight_decay=0.1", "data.check=0"),
        *("record.log_every=1", "checkpoint=none", "schedule=constant", "objective=val/loss", "amp=false"),
    ]
    assert pipeline_key(effloop.compose(words)) == pipeline_key(COMPOSED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("batch_size", 8), ("num_workers", 1), ("image_size", 32), ("max_grad_norm", 1.0), ("deterministic", True)),
        *(("model.width", 8), ("optim.ema", 0.9), ("optim.name", "sgd"), ("engine.prefetch", 3)),
        *(("decode.dct_scaling", True), ("data.cache", Cache.bytes), ("augment.ops.crop.scale", [0.2, 1.0])),
    ],
)
def test_speed_depends_on(key: str, value: Any) -> None:
    changed: Any = copy.deepcopy(COMPOSED)
    part, *names, last = changed, *key.split(".")
    for name in names:
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    if isinstance(part, dict):
        part[last] = value
    else:
        setattr(part, last, value)
    assert pipeline_key(changed) != pipeline_key(COMPOSED)


def test_keys_that_do_not_count() -> None:
    without = ("num_workers", "engine.prefetch")
    chosen = copy.deepcopy(COMPOSED)
    chosen.num_workers, chosen.engine.prefetch = 3, 7
    assert pipeline_key(chosen) != pipeline_key(COMPOSED)
    assert pipeline_key(chosen, without=without) == pipeline_key(COMPOSED, without=without)
