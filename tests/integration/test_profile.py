"""A run that is profiled."""

import pytest
from runs import train

from effloop.cli.main import main


def test_it_ends_after_the_profile(photos, here, capsys):
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


def test_too_few_updates(photos, here, capsys):
    assert train(photos, "profile=cprofile", "epochs=1", "profile.wait=10") == 2
    assert (
        "profile: wait=10 and steps=20 need 30 updates, and 5 are left; set profile.wait=1" in capsys.readouterr().err
    )
    assert not (here / "outputs").exists()


@pytest.mark.nightly
def test_of_a_run_that_continues(finished, photos, here, capsys):
    """Updates that are done don't count; in its own folder a run is trained, and not only looked at."""
    words = ["epochs=4", "profile=cprofile", "profile.wait=4", "profile.steps=2"]
    assert train(photos, f"resume={finished}", *words) == 2 == main(["resume", str(finished), *words])
    first, second = capsys.readouterr().err.splitlines()
    assert "wait=4 and steps=2 need 6 updates, and 5 are left" in first
    assert "profile: cprofile ends the run, and this one is to be finished" in second
    assert (finished / "summary.json").is_file()
