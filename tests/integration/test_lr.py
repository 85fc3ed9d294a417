"""`effloop lr`."""

import json

import pytest
from PIL import Image
from runs import TINY, once

from effloop.cli.main import main


@pytest.mark.slow
def test_a_rate_is_suggested_and_nothing_is_left(here, photos, capsys):
    """The rates are those that are asked for, also where `optim.scale_lr` makes others of them."""
    words = once(
        "lr",
        f"data.root={photos}",
        *TINY,
        "optim=sgd",
        "optim.scale_lr=64",
        "lr=0.1",
        "optim.head_lr=0.5",
        "accumulate=2",
    )
    assert main([*words, "updates=30", "lowest=1e-4", "highest=1", "out=test"]) == 0
    out = capsys.readouterr().out
    found = json.loads((here / "test/lr.json").read_text())
    assert found["lr"][0] == pytest.approx(1e-4)
    assert len(found["lr"]) == len(found["loss"]) == len(found["smoothed"]) <= 30
    assert found["images"] == 16
    assert found["overrides"] == [f"lr={found['suggested']:.2g}", f"optim.head_lr={5 * found['suggested']:.2g}"]
    assert " ".join(found["overrides"]) in out.splitlines()[1]
    assert "optim=sgd" in out.splitlines()[1]
    assert found["steepest"] <= found["minimum"]
    with Image.open(here / "test/lr.png") as picture:
        assert picture.width > 600
    assert sorted(path.name for path in here.iterdir()) == ["test"]


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["updates=5"], "updates: 5"),
        (["lowest=1", "highest=0.1"], "lowest: 1"),
        (["lowest=1e-12", "highest=1e-11", "updates=20"], "lowest: the loss doesn't fall"),
    ],
)
def test_refusals(here, photos, capsys, words, names):
    assert main([*once("lr", f"data.root={photos}", *TINY), *words]) == 2
    assert names in capsys.readouterr().err
