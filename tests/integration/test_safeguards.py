"""The tests of tests/gpu on the emulated GPU, and whether they see that a safeguard is missing."""

from pathlib import Path

import emulator
import pytest
from emulator.mutate import mutations

NAMES = ("transfer", "safeguards", "second_gpu")


@pytest.mark.parametrize(
    "schedule",
    [
        pytest.param("random", marks=pytest.mark.slow),
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("eager", "ahead")),
    ],
)
def test_nothing_is_used_before_its_time(schedule):
    """By the latest schedule they are run with all other tests for a GPU."""
    paths = [Path(__file__).parents[1] / "gpu" / f"test_{name}.py" for name in NAMES]
    done = emulator.run("-m", "pytest", "-q", "-n0", "-pno:cacheprovider", *paths, schedule=schedule)
    assert not done.returncode, done.stdout + done.stderr


def test_the_safeguards_that_are_removed_are_there():
    assert len([each.applied() for each in mutations()]) > 50


@pytest.mark.nightly
def test_a_missing_safeguard_is_seen():
    done = emulator.run(Path(emulator.__file__).with_name("mutate.py"), timeout_s=1200)
    assert not done.returncode, done.stdout + done.stderr
