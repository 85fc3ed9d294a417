"""A look at a run at its end."""

import json
from pathlib import Path
from typing import Any

import pytest
from runs import train

from effloop.measure import diagnose
from effloop.run import training


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of any length is looked at."""
    monkeypatch.setattr(training, "_LEAST_TRAINED_S", 0.0)


def efficiency(here: Path) -> Any:
    return json.loads((here / "outputs/run/efficiency.json").read_text())


def test_stages_and_verdict(photos, here):
    assert train(photos, "run=run", "num_workers=1") == 0
    found = efficiency(here)
    assert [each["name"] for each in found["stages"]] == ["storage", "decode", "augment", "batch", "step", "loop"]
    assert f"bound  {found['verdict']['line']}" in (here / "outputs/run/log.txt").read_text()
    assert found["override"] is None or found["override"]["exact"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("any")])
def test_whatever_happens_the_run_is_done(error, photos, here, monkeypatch):
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(diagnose, "_measured_at_end", fails)
    assert train(photos, "run=run", "epochs=1") == 0
    assert (here / "outputs/run/summary.json").is_file()
    assert efficiency(here)["verdict"] is None
