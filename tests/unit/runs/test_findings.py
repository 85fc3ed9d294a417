"""What was found on this machine for this data."""

import copy
from pathlib import Path
from typing import Any

import pytest

import effloop
from effloop.data.source import Cache
from effloop.runs import findings
from effloop.runs.findings import pipeline_key

COMPOSED = effloop.compose()
FINGERPRINT = {"samples": 3, "bytes": 10, "sha256": "abc"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_rows_are_kept_by_pipeline_and_data(cache, monkeypatch):
    other = effloop.compose(["batch_size=7"])
    assert not findings.any_here(COMPOSED)
    findings.keep(COMPOSED, FINGERPRINT, number=1)
    findings.keep(other, FINGERPRINT, number=2)
    (path,) = (cache / "effloop/findings").iterdir()
    damaged = b'[]\n\xff\xfe\n{"kind": "outcome", "pipeline": "p"}\n{"kind": "tune", "pipeline": "p", "num'
    path.write_bytes(path.read_bytes() + damaged)
    findings.keep(COMPOSED, FINGERPRINT, number=3)
    assert [row["number"] for row in findings.kept(COMPOSED, FINGERPRINT)] == [1, 3]
    [row] = findings.kept(other, FINGERPRINT)
    assert row == {"date": row["date"], "kind": "tune", "pipeline": pipeline_key(other), "number": 2}
    assert findings.kept(COMPOSED, {**FINGERPRINT, "bytes": 11}) == []
    assert findings.any_here(COMPOSED)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / ("a" * 300)))  # nobody can look there
    assert not findings.any_here(COMPOSED)
    monkeypatch.setattr(findings, "available_cores", lambda: 999)  # another machine
    assert findings.kept(COMPOSED, FINGERPRINT) == []
    assert not findings.any_here(COMPOSED)


@pytest.mark.parametrize("folder", ["file", ""])
def test_no_place_for_them_is_no_error(folder, tmp_path, monkeypatch):
    def nowhere(*_: object) -> Path:
        if folder:
            return tmp_path / folder
        raise RuntimeError

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(findings, "kept_folder", nowhere)
    findings.keep(COMPOSED, FINGERPRINT, number=1)
    assert findings.kept(COMPOSED, FINGERPRINT) == []
    assert not findings.any_here(COMPOSED)


def test_speed_does_not_depend_on_all():
    words = [
        *("seed=3", "epochs=9", "lr=0.1", "run=other", "out=elsewhere", "optim.weight_decay=0.1", "data.check=0"),
        *("record.log_every=1", "checkpoint=none", "schedule=constant", "objective=val/loss", "amp=false"),
    ]
    assert pipeline_key(effloop.compose(words)) == pipeline_key(COMPOSED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("batch_size", 8), ("image_size", 32), ("max_grad_norm", 1.0), ("deterministic", True)),
        *(("model.width", 8), ("optim.ema", 0.9), ("optim.name", "sgd")),
        *(("decode.dct_scaling", True), ("data.cache", Cache.bytes), ("augment.ops.crop.scale", [0.2, 1.0])),
    ],
)
def test_speed_depends_on(key, value):
    changed: Any = copy.deepcopy(COMPOSED)
    part, *names, last = changed, *key.split(".")
    for name in names:
        part = part[name] if isinstance(part, dict) else getattr(part, name)
    if isinstance(part, dict):
        part[last] = value
    else:
        setattr(part, last, value)
    assert pipeline_key(changed) != pipeline_key(COMPOSED)


def test_keys_that_do_not_count():
    chosen = copy.deepcopy(COMPOSED)
    chosen.num_workers, chosen.engine.prefetch = 3, 7
    assert pipeline_key(chosen) == pipeline_key(COMPOSED)


def test_findings_of_an_earlier_version_still_count():
    assert pipeline_key(effloop.compose([])) == "ecb0dea5de378b71"
