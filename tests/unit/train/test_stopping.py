"""When a run ends before its last epoch."""

import math

import pytest

from effloop.errors import ConfigError
from effloop.task import Meter
from effloop.train.stopping import EarlyStop, StopConfig

ACCURACY, ERROR = Meter("top1", "Top@1"), Meter("mae", "MAE", higher_is_better=False, percent=False)


def epochs_until_stopped(stop: EarlyStop, values: list[float], first: int = 0) -> int:
    """How many epochs are trained."""
    for epoch, value in enumerate(values, start=first):
        stop.scored(epoch, {stop.meter.name: value})
        if stop.out_of_patience(epoch + 1):
            return epoch + 1
    return 0


@pytest.mark.parametrize(
    ("meter", "config", "values", "done"),
    [
        (ACCURACY, StopConfig(patience=2), [0.1, 0.3, 0.2, 0.3, 0.9], 4),  # as good as the best isn't better
        (ACCURACY, StopConfig(patience=2), [0.1, 0.3, 0.2, 0.31, 0.2, 0.3], 6),
        (ACCURACY, StopConfig(patience=2), [0.1, 0.2, 0.3, 0.4], 0),
        (ERROR, StopConfig(patience=1), [3.0, 2.0, 2.5], 3),
        (ACCURACY, StopConfig(patience=2, min_delta=0.1), [0.1, 0.15, 0.21, 0.3, 0.30, 0.5], 5),  # small steps add up
        (ACCURACY, StopConfig(patience=3), [math.nan] * 5, 3),
        (ACCURACY, StopConfig(patience=2), [math.nan, 0.1, math.nan, math.nan], 4),
        (ACCURACY, StopConfig(), [0.3, 0.2, 0.1], 0),
    ],
)
def test_patience(meter, config, values, done):
    assert epochs_until_stopped(EarlyStop(config, meter), values) == done


def test_it_goes_on_from_its_state():
    config, values = StopConfig(patience=3, min_delta=0.1), [0.1, 0.3, 0.35, 0.2, 0.39, 0.0]
    stop, again = EarlyStop(config, ACCURACY), EarlyStop(config, ACCURACY)
    assert not epochs_until_stopped(stop, values[:3])
    again.load_state_dict(stop.state_dict(), {"top1": 0.35, "epoch": 2})
    assert epochs_until_stopped(again, values[3:], first=3) == epochs_until_stopped(EarlyStop(config, ACCURACY), values)


def test_patience_that_begins_with_a_resume_counts_from_the_best_epoch():
    stop = EarlyStop(StopConfig(patience=3), ACCURACY)
    stop.load_state_dict({}, {"top1": 0.5, "epoch": 7})
    assert [bool(stop.out_of_patience(done)) for done in (9, 10, 11)] == [False, False, True]
    assert "50.00% of epoch 7" in stop.out_of_patience(11)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"patience": 0}, "stop.patience: 0"),
        ({"min_delta": -1.0, "patience": 1}, "stop.min_delta: -1.0"),
        ({"min_delta": 0.1}, "needs stop.patience"),
    ],
)
def test_what_is_refused(options, names):
    with pytest.raises(ConfigError, match=names):
        StopConfig(**options)  # type: ignore[arg-type]
