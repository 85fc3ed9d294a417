"""Predicted speeds, from costs that are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from effloop.measure.costs import Cost, LoadingCosts
from effloop.measure.forecast import Forecast, Load

LOADING = LoadingCosts(Cost(1e-3, 0.0), Cost(6e-3, 6e-3), Cost(1e-3, 1e-3), Cost(0.0, 0.0), images=1)
"""8 ms an image, of which 1 ms waits for the storage."""

LOAD = Load(LOADING, workers=1, serial_s=0.0, transfer_s=0.0, step_s=2e-3, log_s=0.0)


def milliseconds(forecast: Forecast, load: Load) -> float:
    return 1e3 * forecast.seconds(load)


def test_the_slower_of_loading_and_training_decides() -> None:
    plain = Forecast(cores=8)
    assert milliseconds(plain, LOAD) == pytest.approx(8)
    assert milliseconds(plain, replace(LOAD, workers=2)) == pytest.approx(4)
    assert milliseconds(plain, replace(LOAD, workers=8)) == pytest.approx(2)
    assert milliseconds(plain, replace(LOAD, workers=0)) == pytest.approx(10)


def test_workers_beyond_the_cores_only_wait() -> None:
    assert milliseconds(Forecast(cores=2), replace(LOAD, workers=8)) == pytest.approx(7 / 2)
    waiting = LOAD.with_loading(storage=Cost(33e-3, 0.0))
    assert milliseconds(Forecast(cores=2), replace(waiting, workers=8)) == pytest.approx(40 / 8)


def test_threads_that_wait_for_each_other_gain_nothing() -> None:
    serial = replace(LOAD, serial_s=7e-3)
    assert milliseconds(Forecast(cores=8), replace(serial, workers=8)) == pytest.approx(7)
    half = replace(serial, workers=8).with_loading(decode=Cost(2e-3, 2e-3))
    assert milliseconds(Forecast(cores=8), half) == pytest.approx(3.5)


@pytest.mark.parametrize(("images_per_s", "wait"), [(100.0, 0.7), (300.0, 0.0), (450.0, 0.01), (50.0, 0.3)])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_it_agrees_with_the_loop_that_it_is_calibrated_by(images_per_s: float, wait: float, workers: int) -> None:
    load = replace(LOAD, workers=workers)
    forecast = Forecast.of(load, 2, images_per_s, wait)
    assert forecast.images_per_s(load) == pytest.approx(images_per_s)


def test_loading_takes_cores_from_training() -> None:
    """The step takes 2 ms alone and 5.5 beside loading, which computes for 7: half of that is what it costs."""
    load = replace(LOAD, workers=4)
    forecast = Forecast.of(load, 2, 1 / 5.5e-3, wait=0.0)
    assert forecast.contention == pytest.approx(0.5)
    assert milliseconds(forecast, load.with_loading(decode=Cost())) == pytest.approx(2.5)
    assert forecast.without(load, "step") > forecast.images_per_s(load)


@pytest.mark.parametrize("stage", ["storage", "decode", "augment", "batch", "transfer", "step", "log"])
def test_nothing_gets_slower_if_a_stage_is_free(stage: str) -> None:
    forecast = Forecast.of(LOAD, 2, 100.0, 0.6)
    assert forecast.without(LOAD, stage) >= forecast.images_per_s(LOAD)


def test_the_step_and_the_workers_share_the_cores() -> None:
    """The step takes 2 ms of one core, loading 7: two cores need 4.5 ms, however many workers there are."""
    load = replace(LOAD, step_cores=1.0, workers=4)
    assert milliseconds(Forecast(cores=2), load) == pytest.approx(4.5)
    assert milliseconds(Forecast(cores=16), load) == pytest.approx(2)
    busy = Forecast.of(load, 2, 1 / 3e-3, wait=0.0)  # threads that wait in a loop count as busy
    assert milliseconds(busy, load) == pytest.approx(3)
