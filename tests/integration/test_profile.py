"""A run that is profiled."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import train


def test_it_ends_after_the_profile(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the first epoch: no validation, no checkpoint; tables on the screen and in the log."""
    assert train(photos, "run=p", "profile=torch", "profile.wait=2", "profile.steps=3", "batch_size=4") == 0
    run = here / "outputs" / "p"
    assert (run / "profile" / "effloop.pt.trace.json.gz").stat().st_size
    assert not (run / "checkpoints").exists()
    out = capsys.readouterr().out
    for text in (out, (run / "log.txt").read_text()):
        assert "operators of 3 updates" in text
        assert "no line of an update waits for the device" in text
    assert "result" not in out


def test_too_few_updates(photos: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(photos, "profile=cprofile", "epochs=1", "profile.wait=10") == 2
    assert "profile: wait=10 and steps=20 are 30 updates, the run has 5; set profile.wait=1" in capsys.readouterr().err
    assert not (here / "outputs").exists()
