"""Whether two models predict the same."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from effloop.errors import ParityError
from effloop.inference.parity import Parity
from effloop.task import Meter, Regression

TOP1 = Meter("top1", "Top@1")
ERROR = Meter("mae", "MAE", higher_is_better=False, percent=False)
R2 = Regression.meters[0]
SCORES = {"top1": 0.8, "mae": 4.0, "r2": 0.05}
SAME = Parity(1000, 1e-5, 1.0, 1.0, SCORES, SCORES)


@pytest.mark.parametrize(("agreement", "refused"), [(1.0, False), (0.999, False), (0.998, True), (math.nan, True)])
def test_agreement(agreement: float, refused: bool) -> None:
    """Is asked for, unless the file is int8."""
    parity = replace(SAME, agreement=agreement)
    parity.check(TOP1, int8=True)
    if not refused:
        parity.check(TOP1, int8=False)
        return
    with pytest.raises(ParityError, match=r"predicts the same for .* of 1,000 images, 99\.9% are needed"):
        parity.check(TOP1, int8=False)


@pytest.mark.parametrize(
    ("meter", "after", "refused"),
    [
        (TOP1, 0.791, False),
        (TOP1, 0.9, False),
        (TOP1, 0.789, True),
        (TOP1, math.nan, True),
        (R2, 0.041, False),
        (R2, 0.039, True),
        (ERROR, 4.03, False),
        (ERROR, 3.0, False),
        (ERROR, 4.05, True),
    ],
)
def test_int8_may_cost_a_point(meter: Meter, after: float, refused: bool) -> None:
    parity = replace(SAME, after={meter.name: after}, agreement=0.5)
    if not refused:
        parity.check(meter, int8=True)
        return
    with pytest.raises(ParityError, match=f"{meter.name} .* before, .* after; no file was written"):
        parity.check(meter, int8=True)


@pytest.mark.parametrize(("agreement", "warned"), [(0.96, False), (0.846, True)])
def test_int8_with_few_predictions_the_same(agreement: float, warned: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """Is kept if the score holds, but not in silence."""
    replace(SAME, agreement=agreement).check(TOP1, int8=True)
    err = capsys.readouterr().err
    assert err.startswith("effloop: warning: int8 predicts the same for 84.60% of 1,000 images only") == warned
    assert err.count("\n") == warned
