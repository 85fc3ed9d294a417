"""Where a loss turns as the learning rate rises."""

import numpy as np
import pytest

from effloop.errors import ConfigError
from effloop.measure.lr import smooth, turning_points

RATES = np.geomspace(1e-5, 1.0, 200)


def valley(lowest: float, noise: float = 0.0) -> np.ndarray:
    """A loss that falls until `lowest`, most steeply a decade before, and then rises."""
    places = np.log10(RATES) - np.log10(lowest)
    fall = 1 / (1 + np.exp(6 * (places + 1)))
    return 1.0 + fall + np.exp(3 * places) / 200 + noise * np.random.default_rng(0).standard_normal(len(RATES))


@pytest.mark.parametrize(("lowest", "noise"), [(1e-3, 0.05), (0.1, 0.05), (1e-2, 0.0)])
def test_turning_points(lowest, noise):
    steepest, minimum = turning_points(RATES, smooth(RATES, valley(lowest, noise)))
    assert lowest / 5 < minimum < lowest * 5
    assert lowest / 30 < steepest < lowest / 4


def test_a_smoothed_constant_is_that_constant():
    np.testing.assert_allclose(smooth(RATES, np.full(len(RATES), 3.0)), 3.0)


def test_a_loss_that_does_not_fall():
    with pytest.raises(ConfigError, match="lowest: the loss doesn't fall"):
        turning_points(RATES, np.linspace(1.0, 2.0, len(RATES)))
